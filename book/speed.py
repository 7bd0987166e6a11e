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
# # Speed
#
# Twice as fast is twice as many seeds, or an idea tried before lunch instead of after it. In this
# chapter you see where the time of each algorithm in this book goes, how far its updates are from
# the bare arithmetic, what each trick in the earlier chapters bought when it is taken alone, and
# what gets dear as things grow. All numbers were measured by `make bench`, which writes the one file
# that this chapter draws.
#
# | | |
# |---|---|
# | Builds on | all algorithms; the tricks are taught where they are used |
# | Measured | on one thread of a CPU, in time of the processor unless said otherwise |
# | Compared with | Stable-Baselines3 2.9.2, bare passes through the networks, bare matrix products |
# | Not measured | a GPU: we had none |

# %%
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from rlbook.figures import COLORS, PALETTE, use_style

use_style()
speed: dict[str, Any] = json.loads(Path("results/speed.json").read_text())
about = {**speed["versions"], "stable-baselines3": speed["peers"]["stable-baselines3"]}
print(f"{speed['command']}, {speed['created']}, {speed['machine']['cores']} cores")
print(", ".join(f"{name} {number}" for name, number in about.items()))
for part, made in speed.get("made_later", {}).items():
    print(f"{part} alone: {made['command']}, {made['created']}")

# %% [markdown]
# ## How to measure where others work too
#
# Ask a stopwatch how long an update takes, and it will also tell you who else was using the machine.
# Three habits make numbers that can be trusted:
#
# - **The processor's own time** instead of the clock on the wall (`time.process_time`): while
#   another program has the core, it stands still.
# - **Taking turns.** A, B, A, B: a slow minute meets both. And compare pairs: the ratio of neighbours
#   has less noise than either of them.
# - **Medians with quartiles.** By hand: of the times 10, 11, 10, 60, 10 the mean is 20.2, and no
#   call took that long. The median is 10.

# %%
times = [10, 11, 10, 60, 10]
assert np.mean(times) == 20.2 and np.median(times) == 10

# %% [markdown]
# What taking turns is worth shows in a made-up hour in which the machine slows down by half. Two
# programs take exactly the same time. One benchmark runs all of A and then all of B, the other takes
# turns.

# %%
rng = np.random.default_rng(0)
slowness = np.linspace(1.0, 1.5, 40) * rng.lognormal(0, 0.05, size=40)  # of each slot of the hour
a_first, b_last = slowness[:20], slowness[20:]
a_turns, b_turns = slowness[0::2], slowness[1::2]
print(f"one after the other: B takes {np.median(b_last) / np.median(a_first):.2f} times A's time")
print(f"in turns:            B takes {np.median(b_turns / a_turns):.2f} times A's time")
assert np.median(b_last) / np.median(a_first) > 1.15
assert abs(np.median(b_turns / a_turns) - 1) < 0.06

# %% [markdown]
# ## Where the time goes
#
# Each algorithm at the settings that it is shipped with, past its warm-up. A stopwatch stands at the
# door of each part, and what runs inside another is taken out of it. *Acting* is the network that
# chooses, *forward* and *backward* are the networks that learn, *loss* is the rest of an update:
# targets, errors, metrics. *Target* is moving the target network. *Buffer* is storing and drawing,
# priorities included, and *loop* is all that is left.
#
# Looking at a stopwatch takes time itself. So this one is the clock on the wall, which can be read
# without a call to the system, unlike the processor's own time; a slow minute slows all parts of a run
# alike. What a look costs is measured, on a function that does nothing, and taken off. And the parts
# of an update are measured in a run of their own, which only says how to share out what updates took
# in a run that did not look inside them.

# %%
KINDS = ["acting", "environment", "forward", "loss", "backward", "optimiser", "target", "buffer", "loop"]
SHADES = dict(zip(KINDS, [*PALETTE[:7], "#888888", "#CCCCCC"], strict=True))


def shares(name: str) -> dict[str, float]:
    """Return the median share of each kind of work in the time of an algorithm, over the runs."""
    medians = {k: values[0] for k, values in speed["steps"][name]["shares"].items()}
    return {kind: medians.get(kind, 0.0) / sum(medians.values()) for kind in KINDS}


names = list(speed["steps"])
figure, ax = plt.subplots(figsize=(9, 0.55 * len(names) + 1.6))
left = np.zeros(len(names))
for kind in KINDS:
    widths = np.array([100 * shares(name)[kind] for name in names])
    ax.barh(names, widths, left=left, color=SHADES[kind], label=kind, height=0.7)
    for y, (start, width) in enumerate(zip(left, widths, strict=True)):
        if width > 6:
            ax.text(start + width / 2, y, f"{width:.0f}", ha="center", va="center", fontsize=8)
    left += widths
ax.invert_yaxis()
ax.grid(False)
ax.set(xlabel="% of the time of one environment step, its updates included", xlim=(0, 100))
ax.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.15))
plt.show()

# %%
print(f"{'':8}{'µs a step':>10}{'buffer + loop':>16}{'loss':>8}")
for name in names:
    total = sum(values[0] for values in speed["steps"][name]["microseconds"].values())
    part = shares(name)
    outside = part["buffer"] + part["loop"]
    print(f"{name:8}{total:10,.0f}{outside:15.1%}{part['loss']:9.1%}")
over = [name for name in names if shares(name)["buffer"] + shares(name)["loop"] > 0.10]
print("more than 10 % in buffer and loop:", ", ".join(over) or "none")

# %% [markdown]
# Buffer and loop are overhead, and this book wants to pay at most 10 % of the time for them; the
# last line names those that pay more. A small network makes the overhead look large: the same
# microseconds of buffer and loop are a larger part of less. They are mostly calls, not work, and what
# helps is fewer calls: one draw for all updates that are due, memory and views that lie ready, and
# more environments for each turn of the loop. DQN, whose network is the smallest, ships with five
# environments and an update every second step for this reason, too.
#
# *Loss* is arithmetic that an update cannot do without, but look at its size. With 64 units it is a
# quarter of DQN's time, since a dozen operations on 64 numbers take as long as a product of matrices.
#
# ## Beside Stable-Baselines3
#
# The same network, batch, updates per step and thread. For DQN a whole stretch of training is timed,
# environment included, at the settings of the RL Zoo for CartPole; for SAC the update. The third bar
# is the time of the matrix products alone, written into memory that lies ready: who multiplies the
# same matrices, batch by batch, can hardly be faster.

# %%
def draw_contest(ax: plt.Axes, contest: dict[str, Any], title: str, unit: str) -> None:
    """Draw medians as bars, with quartiles as whiskers."""
    shades = [PALETTE[0], PALETTE[1], COLORS["random"]]
    for y, found in enumerate(contest.values()):
        median, low, high = found["ms"]
        ax.barh(y, median, color=shades[y % 3], height=0.65)
        ax.errorbar(median, y, xerr=[[median - low], [high - median]], color="black", capsize=3)
        ax.text(high, y, f"  {median:.3g}" if median < 1_000 else f"  {median:,.0f}", va="center")
    ax.set_yticks(range(len(contest)), list(contest))
    ax.set(xlabel=unit, title=title, xlim=(0, 1.25 * max(f["ms"][2] for f in contest.values())))
    ax.invert_yaxis()
    ax.grid(False)


figure, axes = plt.subplots(1, 2, figsize=(9, 2.4), layout="constrained")
draw_contest(axes[0], speed["peers"]["dqn"], "DQN: 512 steps, 256 updates", "ms of the processor")
draw_contest(axes[1], speed["peers"]["sac"], "SAC: one update", "ms of the processor")
plt.show()
for name in ("dqn", "sac", "sac, two threads"):
    ratio, low, high = speed["peers"][name]["stable-baselines3"]["times"]
    print(f"{name}: Stable-Baselines3 takes {ratio:.2f} times as long (quartiles {low:.2f} to {high:.2f})")
    if name.endswith("threads"):
        continue
    ratio = 1 / speed["peers"][name]["matrix products"]["times"][0]
    print(f"{name}: and this book {ratio:.2f} times as long as its matrix products alone")
    theirs = speed["peers"][name]["stable-baselines3"]["ms"][0]
    bound = theirs / speed["peers"][name]["matrix products"]["ms"][0]
    print(f"{name}: nothing but those products would be {bound:.2f} times as fast as Stable-Baselines3")

# %% [markdown]
# SAC's products are most of its update: two layers of 256 units and a batch of 256 are real work, the
# same for both, and the last line says how much there is to gain at all. DQN's batch is 64, its
# products are over quickly, and what remains is calls. With two threads, which are PyTorch's default
# here, the products are shared, and by the clock on the wall the ratio is about the same.
#
# ## Beside bare passes
#
# Nobody else's code fits the other four so well, so they are measured against themselves: the whole
# update, with its sampling, target, loss and optimiser, against nothing but a forward and a backward
# pass through the same networks, on a batch that lies ready. For DrQ-v2 the pass is that of the
# convolutions alone. REDQ has ten critics of 256 units here, a batch of 256, and no update of the
# policy; the others are as they are shipped.

# %%
bare = speed["bare"]
figure, axes = plt.subplots(2, 2, figsize=(9, 4.4), layout="constrained")
for ax, (name, contest) in zip(axes.flat, bare.items(), strict=False):
    draw_contest(ax, contest, name, "ms of the processor")
for ax in axes.flat[len(bare) :]:
    ax.set_visible(False)
plt.show()
for name, contest in bare.items():
    times, low, high = contest["update"]["times"]
    print(f"{name:6} update: {times:.2f} times its bare passes (quartiles {low:.2f} to {high:.2f})")

# %% [markdown]
# ## One change at a time
#
# Now the tricks, each alone: the same work before and after one change. A ratio of 2 says that the
# old way takes twice as long. Where two sizes are given, the change pays far more at one of them.

# %%
changes = speed["changes"]
ratios = {}
for what, contest in changes.items():
    old, new = list(contest)  # what stood there before, and what it was compared with
    ratios[what] = (contest[old]["times"], f"{old} → {new}")
order = sorted(ratios, key=lambda what: ratios[what][0][0])
figure, ax = plt.subplots(figsize=(9, 0.45 * len(order) + 1))
for y, what in enumerate(order):
    (median, low, high), words = ratios[what]
    ax.barh(y, median, color=PALETTE[0] if median > 1 else PALETTE[3], height=0.65)
    ax.errorbar(median, y, xerr=[[median - low], [high - median]], color="black", capsize=3)
    ax.text(max(high, median), y, f"  {median:.2f}   {words}", va="center", fontsize=8)
ax.axvline(1, color="black", linewidth=1)
ax.set_yticks(range(len(order)), order)
ax.set(xlabel="time of the old way, as a multiple of the new", xlim=(0, 1.9 * max(r[0][2] for r in ratios.values())))
ax.grid(False)
plt.show()

# %% [markdown]
# - **Vector environments**: the interpreter and the network are paid once for eight environments.
# - **Gather once** ([replay](replay.ipynb)): a transition is one row, so a batch is one `take` and
#   not one for each field.
# - **Fused Adam**: on a CPU PyTorch steps through Adam's formula operation by operation, tensor by
#   tensor, unless it is told `fused=True`. **Weights in one tensor** ([DQN](dqn.ipynb)) leaves one
#   such step instead of six, and **Adam in one call** leaves out what PyTorch checks around it.
# - **Gradient by hand** ([DQN](dqn.ipynb), [ensembles](ensemble.ipynb)): for linear layers and ReLU
#   the backward pass is five lines, and autograd need not record anything.
# - **Values of a stretch** ([DQN](dqn.ipynb)): the target network does not change between two
#   copies, so the batches in between are valued in one pass.
# - **Batches in place** ([replay](replay.ipynb)): the batches of all updates that are due are drawn
#   in one gather, into memory whose tensors were made once.
# - **An ensemble** ([ensembles](ensemble.ipynb)): ten critics are one tensor of weights. With 32 units
#   the calls are the cost, and a batched product makes one of ten. With 256 units the products are,
#   and what helps is to take one critic at a time, so that its numbers stay in the cache.
#
# ## Compiling
#
# `torch.compile` writes a C++ program for a function of tensors. The first call pays for it, and each
# later call may save a little: then compiling is earned back after
#
# $$\text{updates} = \frac{\text{seconds of the first call}}{\text{seconds before} - \text{seconds after}}$$
#
# By hand: 30 s to compile, 1.0 ms before and 0.6 ms after, is 75,000 updates.

# %%
assert round(30 / (1.0e-3 - 0.6e-3)) == 75_000

# %% [markdown]
# Every agent has the setting `compile`, off by default. It compiles the functions that the agent's
# class lists in `compiled`, when they are first called: both networks of DQN, the target network of
# DRQN and R2D2, the critics of SAC and REDQ, the encoder of DrQ-v2. What is outside them, sampling,
# the optimiser, the backward passes that are written by hand, stays as it is. Does it pay?

# %%
print(f"{'':6s} {'plain':>9} {'compiled':>9} {'compiling':>10}   earned back after")
for name, found in speed["compile"].items():
    before, after = (found["works"][key]["ms"][0] for key in ("plain", "compiled"))
    took = found["compile_seconds"]
    saved = before - after
    when = f"{1e3 * took / saved:,.0f} updates" if saved > 0 else "never: it is not faster"
    print(f"{name:6s} {before:6.2f} ms {after:6.2f} ms {took:8.0f} s   {when}")

# %% [markdown]
# A compiled call costs more in checks at its door than it saves behind it: the matrix products, the
# LSTM and the convolutions are the same library calls either way, and the passes of SAC and REDQ,
# which write into memory that lies ready, are mostly handed back to PyTorch. Try it again with your
# own networks, or on a GPU.
#
# ## Threads
#
# A product can be shared between cores. What is gained must pay for the cores' meeting after each
# operation, so small products may lose what large ones gain. The same passes on one thread and on
# two, by the clock on the wall:

# %%
print("load of the machine before:", *speed["threads"]["load"])
for name in ("DQN", "REDQ"):
    one, two = (speed["threads"][name][key]["ms"][0] for key in ("1 thread", "2 threads"))
    times, low, high = speed["threads"][name]["1 thread"]["times"]
    print(f"{name:5s} {one:6.2f} ms on one thread, {two:6.2f} ms on two: {times:.2f} times as fast "
          f"(quartiles {low:.2f} to {high:.2f})")

# %% [markdown]
# DQN is one network with a batch of 64, REDQ ten with a batch of 256, all of two layers of 256. The
# book trains on one thread, so that a sweep can use the other core for another seed.
#
# ## How cost grows
#
# Ten times as many transitions, or critics, or pixels: what does a draw from the buffer, or an update,
# cost then? Both axes are logarithmic, so a line of slope 1 (dashed) says that twice as much costs twice as much.

# %%
growth = speed["growth"]
figure, axes = plt.subplots(2, 3, figsize=(8, 5.2), layout="constrained")
for ax, (family, found) in zip(axes.flat, growth.items(), strict=False):
    sizes = np.array([int(size) for size in found])
    median, low, high = np.array(list(found.values())).T
    ax.errorbar(sizes, median, yerr=[median - low, high - median], marker="o", color=PALETTE[0])
    ax.plot(sizes, median[0] * sizes / sizes[0], "--", color=COLORS["random"], linewidth=1)
    ax.set(xscale="log", yscale="log", title=f"{family}\n{median[0]:.2g} to {median[-1]:.2g} ms")
    ax.set_xticks(sizes, [f"{n:,}" if n < 1_000 else f"$10^{len(str(n)) - 1}$" for n in sizes])
    ax.set_yticks([])
    ax.minorticks_off()
for ax in axes.flat[len(growth) :]:
    ax.set_visible(False)
plt.show()
for family, found in growth.items():
    (first, a), *_, (last, b) = ((int(size), ms[0]) for size, ms in found.items())
    print(f"{family:24} {last / first:5.1f} times as many cost {b / a:5.2f} times as much")

# %% [markdown]
# A uniform draw does not care how large the buffer is until the buffer outgrows the processor's
# cache, and then each row is a walk to memory. A sum tree adds a level when it grows 128-fold, and
# its nodes widen in between: its cost grows with the logarithm. Critics, chunks and pixels are
# arithmetic and cost what they are worth, plus the fixed price of each call, which is why the lines
# start flat.
#
# ## Honest edges
#
# - **Time of the processor leaves out waiting** for a disk, but not for memory that another program has
#   pushed out of the cache. Evaluations and checkpoints are not in these numbers.
# - **A shared machine.** Each contestant has the number of turns that the first line names, and where
#   the time goes is seen in a third as many runs. A virtual machine has neighbours, who are not counted
#   and yet share the caches: quartiles are wide, a ratio of 1.1 is not far from none, and the same
#   benchmark an hour later may say 1.9 where this one says 2.0.
# - **One machine.** Ratios travel better than milliseconds, and neither travels to a GPU.
# - **Matrix products are a bound, not a goal**: an update also has to draw, to compare and to move
#   its weights.
# - **The stopwatches themselves take time.** What a look costs is taken off as it is in an idle
#   loop; amid the networks, which empty the cache, it costs more.
# - **Two threads, and where the time goes, are measured by the clock on the wall**, which wants a
#   machine with nothing else to do; everything else is time of the processor.
# - **A library does more than its update**: Stable-Baselines3 offers callbacks, loggers and
#   normalisation, which cost a little when they are not used.
#
# ## Exercises
#
# **Exercise 1.** If you made DQN's update infinitely fast, how much faster would training be? Use the
# shares in the first figure.

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# What is left is all that does not belong to updates (Amdahl's law): acting, environment and loop, and
# that part of the buffer which stores. One over their share is the most that a faster update can
# bring.
#
# ```python
# part = shares("dqn")
# most = 1 / (part["acting"] + part["environment"] + part["loop"])
# print(f"at most {most:.1f} times as fast")
# assert most > 2
# ```
#
# </details>

# %% [markdown]
# **Exercise 2: find the bug.** A colleague wants the share of several kinds of work together, and
# copies `shares` from memory. All results look like shares, and all are wrong. What must all kinds
# together be?

# %%
def share_of(name: str, kinds: list[str]) -> float:
    """Return the part of an algorithm's time that some kinds of work take together."""
    spent = speed["steps"][name]["microseconds"]
    return sum(spent[kind][0] for kind in kinds) / sum(values[-1] for values in spent.values())


print(f"forward and backward: {share_of('sac', ['forward', 'backward']):.1%} of SAC's time")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Medians above, upper quartiles below: `values[-1]` is the last of median, lower and upper quartile.
# Together all kinds must be 1, and they were less.
#
# ```python
# def share_of(name: str, kinds: list[str]) -> float:
#     """Return the part of an algorithm's time that some kinds of work take together."""
#     spent = speed["steps"][name]["microseconds"]
#     return sum(spent[kind][0] for kind in kinds) / sum(values[0] for values in spent.values())
#
# for name in speed["steps"]:
#     assert abs(share_of(name, list(speed["steps"][name]["microseconds"])) - 1) < 1e-9
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** A benchmark of two ways to sum. Its author concludes that the second is faster. Swap
# the two, and the conclusion swaps as well. What is measured here?

# %%
import time

import torch

x = torch.rand(64, 64)


def sum_a(x: torch.Tensor) -> torch.Tensor:
    """Sum rows, then columns."""
    return x.sum(dim=1).sum()


def sum_b(x: torch.Tensor) -> torch.Tensor:
    """Sum rows, then columns, in other words."""
    return torch.sum(torch.sum(x, 1))


pages = np.zeros(4_000_000)  # memory that is not there until it is touched
measured = {}
for work in (sum_a, sum_b):
    began = time.process_time()
    pages += 1  # "some work around it"
    work(x)
    measured[work.__name__] = time.process_time() - began
first, second = measured.values()
print("the second takes less time:", second < first)

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Whoever comes first pays for what is done once: pages of memory that the system hands out at their
# first touch, caches, threads, imports, lazily loaded kernels. Warm up both, repeat, take turns, and
# keep out of the stopwatch what does not belong to the question.
#
# ```python
# turns = {"sum_a": [], "sum_b": []}
# for turn in range(21):
#     for work in (sum_a, sum_b):
#         began = time.perf_counter()
#         for _ in range(100):
#             work(x)
#         turns[work.__name__] += [time.perf_counter() - began] * (turn > 0)  # the first warms up
# ratio = np.median(np.array(turns["sum_b"]) / np.array(turns["sum_a"]))
# print(f"the second takes {ratio:.2f} times as long as the first")
# ```
#
# </details>

# %% [markdown]
# **Exercise 4.** Fusing Adam and laying six tensors side by side both save calls. Once Adam is fused,
# why does the second save so much less than the first?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Plain Adam makes about ten operations for each tensor, sixty calls for six. The fused version is one
# call, with a small price for each tensor in it: that price is all that is left to gain from putting
# the weights into one.
#
# ```python
# plain, fused = (changes["fused Adam"][kind]["ms"][0] for kind in ("plain", "fused"))
# six, one = (changes["weights in one tensor"][kind]["ms"][0] for kind in ("six tensors", "one"))
# print(f"six tensors: fusing saves {plain - fused:.2f} ms; then joining them {six - one:.2f} ms")
# assert plain - fused > six - one
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# ```
# make bench                                        # all parts, and the older tables on the screen
# python bench/speed.py --only peers --rounds 21    # one part, the others stay as they are
# ```
#
# ## References
#
# - A. Raffin et al. (2021). Stable-Baselines3: reliable reinforcement learning implementations.
#   *JMLR* 22.
# - J. Ansel et al. (2024). PyTorch 2: faster machine learning through dynamic Python bytecode
#   transformation and graph compilation. *ASPLOS*.
