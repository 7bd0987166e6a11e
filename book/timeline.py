# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Timeline
#
# Deep reinforcement learning, from Q-learning's table of values to the large networks of today: what
# was new, when, and on what it was built. Names in a coloured box or frame have a chapter in
# this book, or a part in one. The table below has the idea and the paper of each.
#
# Everything here is drawn from one file, `book/timeline.yml`. A test compares it with the
# algorithms of the library, so that the two cannot drift apart.

# %%
from itertools import groupby
from pathlib import Path

import yaml
from IPython.display import Markdown
from matplotlib import pyplot as plt

from rlbook.figures import COLORS, use_style

use_style()
colors = COLORS | {"policy_gradient": COLORS["a2c"]}  # the chapter whose algorithm is A2C
entries = yaml.safe_load(Path("timeline.yml").read_text(encoding="utf-8"))["entries"]
by_name = {entry["name"]: entry for entry in entries}
print(len(entries), "entries,", sum("chapter" in entry for entry in entries), "with a chapter")

# %% [markdown]
# An entry can only build on what was there before it. The cell checks that, and gives each entry a
# place: a column for its family, a row for its year, and one more row where a year brought two of
# the same family.

# %%
families = {
    "values": "values",
    "actor-critic": "actor and critic,\noff-policy",
    "policy": "policies",
    "model": "models and planning",
}
place: dict[str, tuple[float, float]] = {}
years: dict[int, float] = {}
row = 0
for year, group in groupby(entries, key=lambda entry: entry["year"]):
    years[year], used = row, dict.fromkeys(families, 0)
    for entry in group:
        for name in entry.get("builds_on", []):
            assert by_name[name]["year"] <= year, f"{entry['name']} cannot build on {name}"
            assert name in place, f"{name} must stand before {entry['name']}"
        column = list(families).index(entry["family"])
        place[entry["name"]] = (column, row + used[entry["family"]])
        used[entry["family"]] += 1
    row += max(used.values())
assert list(years) == sorted(years), "the entries must be in the order of their years"

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(8, 0.34 * row + 0.6))
ax.set(xlim=(-0.75, len(families) - 0.45), ylim=(row - 0.4, -1.7))
ax.axis("off")
for column, text in enumerate(families.values()):
    ax.text(column, -1.2, text, ha="center", va="center", weight="bold", fontsize=9)
for i, (year, y) in enumerate(years.items()):
    until = [*years.values(), row][i + 1]
    ax.text(-0.72, y, year, va="center", fontsize=8, color="#555555")
    if i % 2 == 0:
        ax.axhspan(y - 0.5, until - 0.5, color="#f2f2f2", zorder=0, lw=0)
for entry in entries:
    x1, y1 = place[entry["name"]]
    for name in entry.get("builds_on", []):
        x0, y0 = place[name]
        ours = "chapter" in entry and "chapter" in by_name[name]
        ax.annotate(
            "", (x1, y1), (x0, y0), zorder=1,
            arrowprops={
                "arrowstyle": "-",
                "color": colors.get(entry.get("chapter"), "#333333") if ours else "#c4c4c4",
                "lw": 1.8 if ours else 0.7,
                "connectionstyle": f"arc3,rad={0.35 if x0 == x1 else 0}",
            },
        )
for entry in entries:
    x, y = place[entry["name"]]
    chapter = entry.get("chapter")
    part = colors.get(entry.get("within"), "#333333") if "within" in entry else "#bbbbbb"
    box = {
        "boxstyle": "round,pad=0.25",
        "facecolor": colors.get(chapter, "#333333") if chapter else "white",
        "edgecolor": colors.get(chapter, "#333333") if chapter else part,
        "linewidth": 1.6 if chapter or "within" in entry else 0.7,
    }
    dark = chapter and chapter not in ("drqv2", "drqn", "redq")
    ax.text(x, y, entry["name"], ha="center", va="center", fontsize=8, bbox=box, zorder=2,
            color="white" if dark else "black", weight="bold" if chapter else "normal")
plt.show()

# %% [markdown]
# Filled boxes are chapters, coloured frames are parts of one. A line leads from an idea down to
# what was built on it; thick lines join two chapters of this book.
#
# How many entries descend from Q-learning, and how many from REINFORCE? Follow the lines backwards
# from each name. (Each of the two counts as its own descendant.)


# %%
def roots(name: str) -> set[str]:
    """Return the entries without a predecessor from which one descends."""
    before = by_name[name].get("builds_on", [])
    return set().union(*map(roots, before)) if before else {name}


for root in ("Q-learning", "REINFORCE"):
    count = sum(root in roots(name) for name in by_name)
    print(f"{count} of {len(entries)} entries descend from {root}")
both = [name for name in by_name if roots(name) >= {"Q-learning", "REINFORCE"}]
print("the first that descends from both:", both[0])

# %% [markdown]
# ## Year by year
#
# The year is that of the publication named beside it; preprints were often out a year or two before.


# %%
def in_this_book(entry: dict) -> str:
    """Say where the book has an entry, and how much of it."""
    home = entry.get("chapter") or entry.get("within")
    if home is None:
        return "not yet"
    kind = "**chapter" if "chapter" in entry else "part of"
    end = "**" if "chapter" in entry else ""
    link = f"[{home}]({home}.ipynb)" if Path(f"{home}.ipynb").is_file() else home
    return f"{kind} {link}{end}: {entry['scope']}"


rows = ["| year | name | idea, and the paper | built on | in this book |", "|---|---|---|---|---|"]
rows += [
    f"| {entry['year']} | **{entry['name']}** | {entry['idea']}<br><small>{entry['paper']}</small> "
    f"| {', '.join(entry.get('builds_on', []))} | {in_this_book(entry)} |"
    for entry in entries
]
Markdown("\n".join(rows))

# %% [markdown]
# ## Adding to it
#
# Put an entry into `book/timeline.yml` where its year belongs and run this chapter again. An
# algorithm of your own gets `chapter: NAME` when its class is registered; the test
# `test_timeline_and_library_agree` fails as long as one of the two is missing.
#
# ## Exercises
#
# **Exercise 1: find the bug.** A colleague writes another version of `roots`, and finds fewer
# descendants of Q-learning than you did above. It raises no error. What does it overlook?

# %%
def first_ideas(name: str) -> set[str]:
    """Return the entries without a predecessor from which one descends."""
    while by_name[name].get("builds_on"):
        name = by_name[name]["builds_on"][0]
    return {name}


count = sum("Q-learning" in first_ideas(name) for name in by_name)
print(f"{count} of {len(entries)} entries descend from Q-learning, says the colleague")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Many ideas have two parents or more, and it follows only the first.
#
# ```python
# def first_ideas(name: str) -> set[str]:
#     """Return the entries without a predecessor from which one descends."""
#     before = by_name[name].get("builds_on", [])
#     return set().union(*map(first_ideas, before)) if before else {name}
#
# assert all(first_ideas(name) == roots(name) for name in by_name)
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** On which entry do most others build directly?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# ```python
# children = {name: 0 for name in by_name}
# for entry in entries:
#     for name in entry.get("builds_on", []):
#         children[name] += 1
# most = max(children, key=children.get)
# print(f"{children[most]} entries build on {most}")
# assert sum(children.values()) == sum(len(entry.get("builds_on", [])) for entry in entries)
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** How long is the longest chain of ideas that leads to REDQ, and which one is it?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The longest chain to an entry is the longest to one of its parents, and the entry.
#
# ```python
# def chain(name: str) -> list[str]:
#     """Return the longest chain of ideas that ends with one."""
#     before = by_name[name].get("builds_on", [])
#     return [*max(map(chain, before), key=len, default=[]), name]
#
# print(" → ".join(chain("REDQ")))
# years_of = [by_name[name]["year"] for name in chain("REDQ")]
# assert chain("REDQ")[0] in roots("REDQ") and years_of == sorted(years_of)
# ```
#
# </details>

# %% [markdown]
# **Exercise 4.** How many years pass before an idea is built upon? Take the median over all lines of
# the figure, and that of the lines between two chapters of this book.

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# ```python
# from statistics import median
#
# pairs = [(by_name[name], entry) for entry in entries for name in entry.get("builds_on", [])]
# ours = [pair for pair in pairs if all("chapter" in entry for entry in pair)]
# for which, lines in (("all", pairs), ("between chapters", ours)):
#     waits = [later["year"] - earlier["year"] for earlier, later in lines]
#     print(f"{which}: {median(waits)} years over {len(waits)} lines")
#     assert min(waits) >= 0
# ```
#
# </details>

# %% [markdown]
# ## References
#
# - R. Sutton and A. Barto (2018). *Reinforcement Learning: An Introduction*, second edition. MIT
#   Press: section 1.7 tells the history before 1989.
# - K. Arulkumaran, M. Deisenroth, M. Brundage, A. Bharath (2017). *Deep Reinforcement Learning: A
#   Brief Survey.* IEEE Signal Processing Magazine 34.
