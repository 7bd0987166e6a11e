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
# # Deep reinforcement learning, a sourcebook
#
# **A book that runs.** Each chapter builds one algorithm from nothing, with an example by hand before
# each piece of code. Its cells are also a Python package, so what you read is what you import; and the
# tests run every chapter, with asserts on the numbers that it shows.
#
# ![An arm that a DQN agent swings up](_static/agent_dqn.gif)
# ![A pole that a DRQN agent balances without seeing speeds](_static/agent_drqn.gif)
# ![A pendulum that a SAC agent swings up](_static/agent_sac.gif)
# ![A point that a DrQ-v2 agent moves to its goal, from pixels](_static/agent_drqv2.gif)
#
# **For whom?** For students and engineers with a laptop and no GPU who want to see an idea work within
# a minute, trust the numbers, and take the code into their own scripts.
#
# **In five minutes** you can train an agent and look at it. Each agent above was trained by a line like
# the first, with its own algorithm and config, and drawn by the second, with seed 0:
#
# ```
# rlbook train sac --config pendulum --run-dir runs/a    # a minute or two
# rlbook watch runs/a --out agent.gif
# ```
#
# Or read on: below, an agent learns in the page itself. Then [DQN](dqn.ipynb) is where the algorithms
# start, and [the timeline](timeline.ipynb) shows what is built on what.

# %% [markdown]
# ## Five minutes
#
# In this very cell an agent learns to balance a pole. It plays at random at first; nobody tells it the
# laws of motion. From Python, three lines do it: make an agent, let it learn, and `evaluate` or
# `predict`.

# %%
import os

from matplotlib import pyplot as plt

import rlbook
from rlbook.dqn import DQN
from rlbook.envs import make_env
from rlbook.figures import COLORS, filmstrip, label_curves, use_style

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # draw without a screen
use_style()
agent = DQN("CartPole-v1", num_envs=4, n_step=10, tau=0.02, target_every=1, update_every=3,
            observation_scale=(1, 1, 8, 1), epsilon_steps=10_000, epsilon_floor=0.1,
            lr_decay_from=0.5, eval_every=2000, seed=0)
result = agent.learn(20_000)

# %% tags=["hide-input"]
lines = [line for line in result.history if "eval_return_mean" in line]
figure, ax = plt.subplots(figsize=(6, 2.8))
ax.plot(
    [line["global_step"] for line in lines],
    [line["eval_return_mean"] for line in lines],
    color=COLORS["dqn"],
    marker="o",
)
ax.axhline(22, color=COLORS["random"], ls="--", label="pushing at random")
label_curves(ax, ylabel="steps balanced, of 500")
ax.set_ylim(0, 515)
ax.legend()
plt.show()

# %% [markdown]
# What it does now, in an episode that it has not seen, every 25 steps a picture:

# %%
env = make_env("CartPole-v1", render_mode="rgb_array")
obs, _ = env.reset(seed=7)
frames = []
for step in range(200):
    if step % 25 == 0:
        frames.append(env.render())
    action, _ = agent.predict(obs)
    obs, _, terminated, truncated, _ = env.step(int(action))
    if terminated or truncated:
        break
env.close()
filmstrip(frames)

# %% [markdown]
# ## How to read
#
# You need Python with NumPy, enough PyTorch to read a training loop (tensors, modules, `backward`),
# and to know what a derivative and an expected value are. You need no reinforcement learning: the
# words are introduced where they are first needed, and the [glossary](glossary.ipynb) has them all.
# If you would like a first book on the subject itself, read the opening chapters of Sutton and Barto
# (2018) beside this one. What came when, and what is built on what, shows the
# [timeline](timeline.ipynb).
#
# Read the foundations in order if you want to know how everything works, or go straight to an
# algorithm and come back when a name is new: every name that a chapter imports from `rlbook.envs`,
# say, is built in the chapter *Environments*, under the same name. So the imports of the library
# say which chapter needs which, and the figure is drawn from them. A chapter needs those that an
# arrow leads from, and what they need in turn. (What a function imports only when it is called is not
# drawn, as most of what the command line needs.)

# %% tags=["hide-input"]
import ast
from pathlib import Path

library = Path(rlbook.__file__).parent
chapters = (library / "chapters.txt").read_text(encoding="utf-8").split()


def needs(chapter: str) -> set[str]:
    """Return the chapters from which the module of a chapter imports."""
    tree = ast.parse((library / f"{chapter}.py").read_text(encoding="utf-8"))
    found = [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    return {name.removeprefix("rlbook.") for name in found} & set(chapters) - {chapter}


direct = {chapter: needs(chapter) for chapter in chapters}
reached: dict[str, set[str]] = {}


def all_needs(chapter: str) -> set[str]:
    """Return what a chapter needs, and what that needs in turn."""
    if chapter not in reached:
        reached[chapter] = direct[chapter].union(*map(all_needs, direct[chapter]))
    return reached[chapter]


def depth(chapter: str) -> int:
    """Return the length of the longest way from the start of the book."""
    return max((depth(name) + 1 for name in direct[chapter]), default=0)


columns: dict[int, list[str]] = {}
for chapter in chapters:
    columns.setdefault(depth(chapter), []).append(chapter)
tallest = max(map(len, columns.values()))
place = {
    chapter: (x, (i + 0.5) * tallest / len(column))
    for x, column in columns.items()
    for i, chapter in enumerate(column)
}
figure, ax = plt.subplots(figsize=(8, 0.62 * tallest + 0.3))
ax.set(xlim=(-0.5, max(columns) + 0.5), ylim=(tallest, 0))
ax.axis("off")
for chapter in chapters:
    around = set().union(*(all_needs(name) for name in direct[chapter]))
    for name in direct[chapter] - around:  # an arrow that others imply is left out
        ax.annotate("", place[chapter], place[name], zorder=1, arrowprops={
            "arrowstyle": "-|>", "color": "#999999", "lw": 0.9, "shrinkA": 16, "shrinkB": 20})
for chapter, (x, y) in place.items():
    color = COLORS.get(chapter, "#666666")
    ax.text(x, y, chapter, ha="center", va="center", fontsize=9, zorder=2,
            weight="bold" if chapter in COLORS else "normal",
            bbox={"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": color, "lw": 1.4})
plt.show()

# %% [markdown]
# Each chapter on an algorithm has the same parts: a promise, the problem that it solves, the pieces
# with numbers by hand, a live run of at most a minute and a half, a look inside the trained agent,
# what each part buys over several seeds, what differs from the paper, and exercises, one of which is
# a bug that somebody planted. The solutions are folded away.
#
# The algorithms that this book has built so far:

# %%
for name, algorithm in rlbook.ALGORITHMS.items():
    print(f"{name:>6}: {algorithm.observations} observations, {algorithm.actions} actions;",
          algorithm.__doc__)

# %% [markdown]
# ## Ways to use it
#
# | | |
# |---|---|
# | Read | this site, or the notebooks in `book/` on your code host |
# | Experiment | `make lab` opens JupyterLab on the chapters |
# | Import | `from rlbook.dqn import DQN` |
# | Shell | `rlbook train dqn --config cartpole --run-dir runs/a` |
# | Test | `make test` runs the library's tests and every chapter |
#
# Symbols, shapes and what a *step* and a *return* are stand under [notation](notation.ipynb).
#
# ## Reference
#
# - R. Sutton and A. Barto (2018). *Reinforcement Learning: An Introduction*, second edition. MIT Press.
