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
# what gets dear as things grow. All numbers were measured by `make bench`, which writes the one
# file that this chapter draws.
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
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

from rlbook.figures import COLORS, PALETTE, made_by, use_style

use_style()
speed: dict[str, Any] = json.loads(Path("results/speed.json").read_text())
about = {**speed["versions"], "stable-baselines3": speed["peers"]["stable-baselines3"]}
print(made_by(speed))
print(f"{speed['machine']['cores']} cores of {speed['machine']['processor']}")
print(", ".join(f"{name} {number}" for name, number in about.items()))
for part, made in speed.get("made_later", {}).items():
    print(f"{part} alone: {made['command']}, {made['created']}, {made['machine']['processor']}")

# %% [markdown]
# ## How to measure where others work too
#
# Ask a stopwatch how long an update takes, and it will also tell you who else was using the
# machine. Three habits make numbers that can be trusted:
#
# - **The processor's own time** instead of the clock on the wall (`time.process_time`): while
#   another program has the core, it stands still.
# - **Taking turns.** A, B, A, B: a slow minute meets both. And compare pairs: the ratio of
#   neighbours has less noise than either of them.
# - **Medians with quartiles.** By hand: of the times 10, 11, 10, 60, 10 the mean is 20.2, and no
#   call took that long. The median is 10.
#
# So each ratio in this chapter is a median over neighbouring turns. It may differ a little from the
# ratio of the two medians that stand beside it.

# %%
times = [10, 11, 10, 60, 10]
assert np.mean(times) == 20.2 and np.median(times) == 10

# %% [markdown]
# What taking turns is worth shows in a made-up hour in which the machine slows down until all work
# takes half as long again. Two programs take exactly the same time. One benchmark runs all of A and
# then all of B, the other takes turns. What is left of the difference then is noise, and that B always
# comes second.

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
# Each algorithm at the settings that it is shipped with, past its warm-up. A stopwatch stands at
# the door of each part, and what runs inside another is taken out of it.
#
# - *Acting* is the whole choice of an action: the network, its noise, the scaling to the bounds and
#   the way from NumPy to torch and back.
# - *Environment* is `step` and `reset`.
# - *Forward* is every pass through a network in an update, those of target networks and of burn-in
#   included, and in SAC and REDQ the squashing of actions; *backward* is the way back.
# - *Optimiser* is Adam, and *target* is moving the weights of the target network.
# - *Loss* is the other arithmetic of an update: noise, targets, TD errors, slopes and, in R2D2, the
#   priorities that follow from the errors.
# - *Buffer* is storing and drawing, the tree of priorities included. In DrQ-v2 a draw puts frames
#   together and shifts the images, and that counts here as well.
# - *Metrics* is the loss as a number, once a turn of the loop, which the check for a loss that is not
#   finite needs as well, and what is for reports alone, in one turn of thirty-two.
# - *Loop* is all that is left, from the checks of each observation to the mean of the metrics.
#
# Looking at a stopwatch takes time itself. So this one is the clock on the wall, which can be read
# without a call to the system, unlike the processor's own time; a slow minute slows all parts of a
# run alike. What a look costs is measured, on a function that does nothing, and taken off. And the
# parts of an update are measured in a run of their own, which only says how to share out what
# updates took in a run that did not look inside them.

# %%
LEARNING = ["forward", "loss", "backward", "optimiser", "target"]
OVERHEAD = ["buffer", "metrics", "loop"]
KINDS = ["acting", "environment", *LEARNING, *OVERHEAD]
SHADES = dict(zip(KINDS, [*PALETTE[:6], "#F0E442", "#777777", "#A6A6A6", "#D2D2D2"], strict=True))


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
        if width > 4:
            ink = "white" if kind in ("acting", "buffer") else "black"
            where = {"ha": "center", "va": "center", "fontsize": 8, "color": ink}
            ax.text(start + width / 2, y, f"{width:.0f}", **where)
    left += widths
ax.invert_yaxis()
ax.grid(False)
ax.set(xlabel="% of the time of one environment step, its updates included", xlim=(0, 100))
ax.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.15))
plt.show()
for name in names:
    its = speed["steps"][name]
    print(f"{name:6} {its['config'] + '.yaml':21} {its['env_id']} x {its['num_envs']}")

# %% [markdown]
# The three grey parts are overhead, and the bar of this book is 10 %: no algorithm is to spend more
# than that outside environment, networks and optimiser. The loss is counted with the networks, since
# it is what they are taught by; with autograd it would be a part of the forward and the backward pass.
# Acting counts as network, too, its noise and its way from NumPy to torch and back included. Whoever
# takes the loss for overhead finds the sum in the last column, and in the last line who is above the
# bar then.

# %%
def outside(name: str, kinds: list[str]) -> float:
    """Return the share that some kinds of work take together."""
    return sum(shares(name)[kind] for kind in kinds)


def over_the_bar(kinds: list[str], bar: float = 0.10) -> str:
    """Name the algorithms that spend more than the bar on some kinds of work."""
    found = [f"{name} ({outside(name, kinds):.1%})" for name in names if outside(name, kinds) > bar]
    return ", ".join(found) or "none"


titles = "".join(f"{kind:>9}" for kind in OVERHEAD)
print(f"{'':6}{'µs a step':>10}{titles}{'together':>10}{'with loss':>11}")
for name in names:
    total = sum(values[0] for values in speed["steps"][name]["microseconds"].values())
    parts = "".join(f"{shares(name)[kind]:9.1%}" for kind in OVERHEAD)
    together, with_loss = outside(name, OVERHEAD), outside(name, [*OVERHEAD, "loss"])
    print(f"{name:6}{total:10,.0f}{parts}{together:10.1%}{with_loss:11.1%}")
print("over 10 % in buffer, metrics and loop:", over_the_bar(OVERHEAD))
print("over 10 % with the loss, too:", over_the_bar([*OVERHEAD, "loss"]))

# %% [markdown]
# The last two lines are the verdict: an algorithm that is named there misses the bar. A small network
# makes the overhead look large: the same microseconds are a larger part of less. They are mostly calls,
# not work, and what helps is fewer calls: one draw for all updates that are due, memory and views that
# lie ready, metrics that are read now and then, and more environments for each turn of the loop. DQN,
# whose network is the smallest, ships with five environments and an update every second step for this
# reason, too.
#
# The loss is calls as well. With DQN it is about seventeen operations on 64 numbers each: the numbers
# are nothing, the calls are what you see in the figure.
#
# ## Beside Stable-Baselines3
#
# Two libraries in one run, with the same networks, batch sizes, updates per step and threads. There
# are five contests, four of them drawn and all in the table below:
#
# - **dqn**: training on CartPole at the settings of the RL Zoo, environment and acting included.
#   Both explore as little and copy the target once a round.
# - **sac, as shipped**: training on Pendulum at the sizes of `rlbook/configs/sac/pendulum.yaml`,
#   one environment, one update a step.
# - **sac**: one update at the default sizes of Stable-Baselines3, two layers of 256 units and a
#   batch of 256. Nothing is played: the transitions are random numbers of Pendulum's sizes.
# - **sac, two threads**: the same by the clock on the wall, with as many threads as PyTorch takes
#   by itself on two cores.
# - **sac, training**: the same sizes in training, as in the second contest.
#
# The third bar is the time of the matrix products that this book makes, those of target networks
# included and, in training, those of acting; and of nothing else: no ReLU, no TD targets, no loss, no
# Adam, no environment. They are written into memory that lies ready. Who multiplies these matrices can
# hardly be faster.

# %%
def draw_contest(ax: plt.Axes, contest: dict[str, Any], title: str, unit: str) -> None:
    """Draw medians as bars, with quartiles as whiskers."""
    shades, works = [PALETTE[0], PALETTE[1], COLORS["random"]], contest["works"]
    for y, found in enumerate(works.values()):
        median, low, high = found["ms"]
        ax.barh(y, median, color=shades[y % 3], height=0.65)
        ax.errorbar(median, y, xerr=[[median - low], [high - median]], color="black", capsize=3)
        ax.text(high, y, f"  {median:.3g}" if median < 1_000 else f"  {median:,.0f}", va="center")
    ax.set_yticks(range(len(works)), list(works))
    ax.set(xlabel=unit, title=title, xlim=(0, 1.3 * max(f["ms"][2] for f in works.values())))
    ax.invert_yaxis()
    ax.grid(False)


peers = {name: contest for name, contest in speed["peers"].items() if isinstance(contest, dict)}
shown = [name for name in peers if "threads" not in name]
figure, axes = plt.subplots(2, 2, figsize=(9, 4.8))
for ax, name in zip(axes.flat, shown, strict=True):
    draw_contest(ax, peers[name], name, peers[name]["unit"])
plt.show()
for name, contest in peers.items():
    print(f"{name + ':':18}{contest['what']}, {contest['turns']} turns")

# %%
def times_as_long(contest: dict[str, Any], slow: str, fast: str) -> list[float]:
    """Return how many times as long one work takes as another: median and quartiles."""
    return contest["works"][slow]["times"][fast]


def verdict(contest: dict[str, Any], bar: float = 2.0) -> str:
    """Say whether Stable-Baselines3 takes at least twice as long."""
    return "yes" if times_as_long(contest, "stable-baselines3", "rlbook")[0] >= bar else "no"


print(f"{'':17}{'Stable-Baselines3':>27}{'at least':>10}{'this book':>13}{'Stable-B.3':>15}")
print(f"{'':17}{'/ this book':>27}{'twice?':>10}{'/ products':>13}{'/ products':>15}")
for name, contest in peers.items():
    ratio, low, high = times_as_long(contest, "stable-baselines3", "rlbook")
    near = times_as_long(contest, "rlbook", "matrix products")[0]
    bound = times_as_long(contest, "stable-baselines3", "matrix products")[0]
    words = f"{ratio:.2f} ({low:.2f} to {high:.2f})"
    print(f"{name:17}{words:>27}{verdict(contest):>10}{near:13.2f}{bound:15.2f}")
below = [name for name, contest in peers.items() if verdict(contest) == "no"]
print("below twice:", "; ".join(below) or "none")

# %% [markdown]
# Columns are ratios of times, of neighbouring turns. The bar of this book is two, and the last line
# names the contests that miss it. The last column is the limit: the time of Stable-Baselines3 over
# that of the bare products of this book. Where it is far above two, the time goes into calls, and a
# library can be many times as fast by making fewer. Where it is near two, nearly everything would have
# to be free but the products.
#
# ### The wider the layers, the less there is to gain
#
# Where is the border? One update of SAC again, with a batch of 256 and two layers of 32 to 512
# units:

# %%
units = np.array([int(width) for width in speed["widths"]])
figure, ax = plt.subplots(figsize=(7, 3.6))
for fast, label, color in (
    ("matrix products", "bound: bare matrix products", COLORS["random"]),
    ("rlbook", "this book", PALETTE[0]),
):
    ratios = [times_as_long(each, "stable-baselines3", fast) for each in speed["widths"].values()]
    median, low, high = np.array(ratios).T
    ax.errorbar(
        units, median, yerr=[median - low, high - median],
        marker="o", capsize=3, color=color, label=label,
    )  # fmt: skip
ax.axhline(2, color=PALETTE[3], linestyle="--", linewidth=1.2, label="twice")
ax.set(xscale="log", yscale="log", xlabel="units of each of the two hidden layers")
ax.set_ylabel("time of Stable-Baselines3,\nas a multiple")
ax.set_xticks(units, [str(width) for width in units])
ax.xaxis.set_minor_locator(NullLocator())
ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
ax.yaxis.set_major_formatter(FormatStrFormatter("%g"))
ax.yaxis.set_minor_locator(NullLocator())
ax.legend()
plt.show()
print("units  this book  Stable-B.3  times as long (quartiles)  bound  multiplications")
for width, each in speed["widths"].items():
    ours, theirs = (each["works"][name]["ms"][0] for name in ("rlbook", "stable-baselines3"))
    ratio, low, high = times_as_long(each, "stable-baselines3", "rlbook")
    bound = times_as_long(each, "stable-baselines3", "matrix products")[0]
    more = each["multiplications"]["stable-baselines3"] / each["multiplications"]["rlbook"]
    words = f"{ratio:.2f} ({low:.2f} to {high:.2f})"
    print(f"{width:>5}{ours:8.2f} ms{theirs:9.2f} ms{words:>27}{bound:7.2f}{more:11.2f} times")
twice = [width for width, each in speed["widths"].items() if verdict(each) == "yes"]
print("at least twice at", ", ".join(twice) or "none", "units; below it at",
      ", ".join(width for width in speed["widths"] if width not in twice) or "none")

# %% [markdown]
# With narrow layers calls rule. Both libraries multiply for a fraction of a millisecond, and the
# rest is the interpreter, autograd and the optimiser, which this book calls less often: the ratio
# is large. With wide layers arithmetic rules. Twice the width is four times the products, the calls
# stay as many, and both libraries multiply nearly the same matrices: no library can be twice as
# fast on one core then, unless it multiplies less. Where the products of a processor are slow
# relative to its interpreter this point comes at narrower layers; where it came on the processor
# named at the top, the last line says. So ask for the width before you believe a ratio, this book's
# included.
#
# *Nearly* the same: the last column counts how many pairs of numbers Stable-Baselines3 multiplies
# for each pair of this book, about a fifth more from 128 units on. In the step of the policy
# autograd also finds the slopes of the critics' weights, which nobody uses, and it takes all rows
# of the batch back through both critics, although only the lower one has a slope. This book leaves
# those weights out and, from 128 units on, takes each row back through its lower critic alone;
# below that, one batched product for both critics is quicker than picking rows.
#
# ## Beside bare passes
#
# Nobody else's code fits the other four so well, so they are measured against themselves: the whole
# update, with its sampling, target, loss and optimiser, against nothing but a forward and a
# backward pass through the same networks, on a batch that lies ready. A bare pass goes the way of
# the update: by hand through layers of ReLU, by autograd through the LSTM, without a gradient
# through burn-in. For DrQ-v2 it is that of the convolutions alone, while the products are those of
# all its networks, with one update of the actor in two. REDQ has ten critics here; what else
# differs from the shipped settings stands below the figure.

# %%
bare = speed["bare"]
figure, axes = plt.subplots(2, 2, figsize=(9, 4.8))
for ax, (name, contest) in zip(axes.flat, bare.items(), strict=True):
    draw_contest(ax, contest, name, "ms for an update")
plt.show()
for name, contest in bare.items():
    passes = list(contest["works"])[1]
    ratio, low, high = times_as_long(contest, "update", passes)
    products = times_as_long(contest, "update", "matrix products")[0]
    print(f"{name:6}{ratio:.2f} times its {passes} ({low:.2f} to {high:.2f}), "
          f"{products:.2f} times its products")
    print(f"{'':6}{contest['what']}")

# %% [markdown]
# What does an update do beyond its passes?
#
# - **DRQN** draws chunks and lays them out with time first, finds targets and the slope of the loss
#   in small operations on all steps of all chunks, makes metrics, and lets Adam and the target
#   network take their steps.
# - **R2D2** does the same, and what priorities ask for: a draw that goes down a tree, weights of
#   importance, a new priority for each chunk from its TD errors, and the way back up the tree.
# - **REDQ** draws noise and squashes it into actions, picks two of the ten target critics, and
#   finds the slope of the loss and the metrics for all ten critics. Then Adam and the moving
#   average go through some 670,000 weights: no arithmetic to speak of, but a lot of memory to read
#   and write.
# - **DrQ-v2** has more networks than its convolutions. The trunks, the actor and the critics go
#   there and back as well; the images of each batch are put together and shifted first; and Adam
#   and the moving target follow. Its products take each patch of an image as a row that lies ready,
#   so convolutions that have to collect their patches take longer than these.
#
# ## One change at a time
#
# Now the tricks, each alone: the same work before and after one change. A ratio of 2 says that the
# old way takes twice as long. It says nothing of how long that was, so the table below the figure has
# what each saves. Where two sizes are given, look at both: what pays at one of them may buy little at
# the other.

# %%
changes = speed["changes"]
gains = {}
for what, contest in changes.items():
    old, new = contest["works"]  # what stood there before, and what stands there now
    gains[what] = (times_as_long(contest, old, new), f"{old} → {new}")
order = sorted(gains, key=lambda what: gains[what][0][0])
figure, ax = plt.subplots(figsize=(9, 0.42 * len(order) + 1))
for y, what in enumerate(order):
    (median, low, high), words = gains[what]
    ax.barh(y, median, color=PALETTE[0] if median > 1 else PALETTE[3], height=0.65)
    ax.errorbar(median, y, xerr=[[median - low], [high - median]], color="black", capsize=3)
    ax.text(max(high, median), y, f"  {median:.2f}   {words}", va="center", fontsize=8)
ax.axvline(1, color="black", linewidth=1)
ax.set_yticks(range(len(order)), order)
ax.set(xlabel="time of the old way, as a multiple of the new")
ax.set(xlim=(0, 1.5 * max(gain[2] for gain, _ in gains.values())))
ax.grid(False)
plt.show()
for what in reversed(order):
    before, after = (works["ms"][0] for works in changes[what]["works"].values())
    (_, low, high), _ = gains[what]
    within = "   (within the spread)" if low < 1 < high else ""
    print(f"{what:44}{1e3 * before:9,.1f} → {1e3 * after:9,.1f} µs{within}")

# %% [markdown]
# - **Vector environments**: one call of the network chooses for eight environments, and one call of
#   `step` serves them all. Each environment itself still takes its step in Python, one after the
#   other. (What the loop saves on top is not in this bar.)
# - **Gather once** ([replay](replay.ipynb)): a transition is one row, so a batch is one `take` and
#   not one for each field.
# - **Fused Adam**: on a CPU PyTorch steps through Adam's formula operation by operation, tensor by
#   tensor, unless it is told `fused=True`. **Weights in one tensor** ([DQN](dqn.ipynb)) leaves one
#   tensor instead of six, and **Adam in one call** leaves out what PyTorch checks around it.
# - **Gradient by hand** ([DQN](dqn.ipynb), [ensembles](ensemble.ipynb)): for linear layers and ReLU
#   the backward pass is five lines, and autograd need not record anything.
# - **Values of a stretch** ([DQN](dqn.ipynb)): the target network does not change between two
#   copies, so the batches in between are valued in one pass. It buys next to nothing, and the shipped
#   DQN, whose target moves at every update, does not use it; the RL Zoo's settings do.
# - **Batches in place** ([replay](replay.ipynb)): the batches of all updates that are due are drawn
#   in one gather, into memory whose tensors were made once.
# - **One ensemble** ([ensembles](ensemble.ipynb)): the gradients of ten critics and a step of one
#   Adam, first as ten ensembles of one critic, then as one of ten. With 32 units the calls are the
#   cost, and a batched product makes one of ten. With 256 units the products are the cost, and they
#   stay: what is left to save is little, some calls and the memory between the layers, which the
#   critics of one ensemble share.
# - **Critic by critic**: the same ensemble twice, its ten critics in batched products or one after
#   the other, which the library does from 128 units on. A batched product writes what all ten
#   critics put out before the next layer reads any of it: too much for the cache, probably.
#
# ## Compiling
#
# `torch.compile` writes a C++ program for a function of tensors. The first call pays for it, and
# each later call may save a little: then compiling is earned back after
#
# $$\text{updates} = \frac{\text{seconds of the first call}}{\text{seconds before} - \text{seconds after}}$$
#
# By hand: 30 s to compile, 1.0 ms before and 0.6 ms after, is 75,000 updates.

# %%
assert round(30 / (1.0e-3 - 0.6e-3)) == 75_000

# %% [markdown]
# Every agent has the setting `compile`, off by default. It compiles the functions that the agent's
# class lists in `compiled`, when they are first called, and nothing else:
#
# - DQN: the forward passes of both networks, also when it acts.
# - DRQN and R2D2: the pass of the target network, without its burn-in.
# - SAC and REDQ: the critics' forward pass in the step of the policy. Their own learning, which
#   takes more time, is not compiled.
# - DrQ-v2: the encoder, forward and backward.
#
# Does it pay? Updates are in time of the processor, compiling is in seconds by the clock on the
# wall, and the compiler had been imported before.

# %%
def earned_back(found: dict[str, Any]) -> str:
    """Say after how many updates compiling is earned back, if the spread allows to say it."""
    ratio, low, high = times_as_long(found, "plain", "compiled")
    if low > 1:
        saved = found["works"]["plain"]["ms"][0] * (1 - 1 / ratio)
        return f"{1e3 * found['compile_seconds'] / saved:,.0f} updates"
    return "not at all: it is slower" if high < 1 else "cannot be told: within the spread"


print(f"{'':6}{'plain':>9}{'compiled':>12}{'times as fast (quartiles)':>28}{'compiling':>11}")
for name, found in speed["compile"].items():
    before, after = (found["works"][key]["ms"][0] for key in ("plain", "compiled"))
    ratio, low, high = times_as_long(found, "plain", "compiled")
    words = f"{ratio:.2f} ({low:.2f} to {high:.2f})"
    took = f"{found['compile_seconds']:.0f} s"
    print(f"{name:6}{before:6.2f} ms{after:9.2f} ms{words:>28}{took:>11}")
    print(f"{'':9}{', '.join(found['functions'])}; earned back: {earned_back(found)}")

# %% [markdown]
# Where it pays is said by the lines above, and where no line names a number of updates, it pays
# nowhere on this machine, which is why `compile` is off. The matrix products, the LSTM and the
# convolutions are the same library calls either way. What compiling can save are the small operations
# around them, and where an update gets slower, a compiled function probably costs more in checks at
# each call than it saves: we did not measure the two apart. Try it again with your own networks, or on
# a GPU.
#
# ## Threads
#
# A product can be shared between cores. What is gained must pay for the cores' meeting after each
# operation, so small products may lose what large ones gain. Forward and backward passes of linear
# layers on one thread and on two, by the clock on the wall; the first size is about that of the
# shipped DQN, the last that of REDQ in its paper:

# %%
for name, contest in speed["threads"].items():
    one, two = (contest["works"][key]["ms"][0] for key in ("1 thread", "2 threads"))
    ratio, low, high = times_as_long(contest, "1 thread", "2 threads")
    print(f"{name}:\n    {one:.2f} ms on one thread, {two:.2f} ms on two: "
          f"{ratio:.2f} times as fast ({low:.2f} to {high:.2f})")

# %% [markdown]
# The book trains on one thread whatever these numbers are, so that a sweep can use the other core
# for another seed: two runs on two cores gain up to a factor of two, and need not meet.
#
# ## How cost grows
#
# Ten times as many transitions, or critics, or pixels: what does a draw from the buffer, or an
# update, cost then? Both axes are logarithmic. Along the dashed line twice as much costs twice as
# much.

# %%
growth = speed["growth"]
figure, axes = plt.subplots(2, 3, figsize=(9, 5.6))
for ax, found in zip(axes.flat, growth.values(), strict=False):
    sizes = np.array([int(size) for size in found["ms"]])
    median, low, high = np.array(list(found["ms"].values())).T
    ax.plot(sizes, median[0] * sizes / sizes[0], "--", color=COLORS["random"], linewidth=1)
    ax.errorbar(
        sizes, median, yerr=[median - low, high - median], marker="o", capsize=3, color=PALETTE[0]
    )
    ax.set(xscale="log", yscale="log", ylabel="ms", xlabel=found["unit"])
    ax.set_title(found["what"].replace("units, ", "units,\n"), fontsize=9)
    ax.set_ylim(0.6 * low.min(), max(1.5 * high.max(), 5 * low.min()))
    large = sizes[0] >= 10_000
    ax.set_xticks(sizes, [f"$10^{len(str(n)) - 1}$" if large else f"{n:,}" for n in sizes])
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_minor_locator(NullLocator())
for ax in axes.flat[len(growth) :]:
    ax.set_visible(False)
plt.show()
for family, found in growth.items():
    (first, a), *_, (last, b) = ((int(size), ms[0]) for size, ms in found["ms"].items())
    more = f"{1e3 * (b - a):.1f} µs" if b < 1 else f"{b - a:.1f} ms"
    print(f"{family:11}{last / first:6.1f} times as many {found['unit']:18} "
          f"{b / a:5.2f} times the time, {more} more")

# %% [markdown]
# - **Replay**: a uniform draw hardly cares how large the buffer is. What a buffer that outgrows the
#   cache adds to a draw of 64 rows stands in the first line: about a microsecond for all of them,
#   less than 64 walks to memory one after the other, since the processor fetches many rows at once.
# - **Priorities**: the cost is the number of levels of the sum tree times the width of a node, since a
#   draw looks at whole nodes. From $10^4$ to $10^5$ a third level is added; from $10^5$ to $10^6$ its
#   nodes widen from 47 children to 100. Over many powers of ten that is a logarithm; between two levels
#   it is steeper.
# - **Critics**: with 64 units and a batch of 128, two critics cost mostly calls, and a batched product
#   makes no more of them for twenty; of twenty, most of the time is the critics' own. Wide critics
#   would lie closer to the dashed line from the start.
# - **Chunks**: an LSTM takes its steps one after the other, so the way through it grows with the
#   length. What does not grow are the calls outside it, which a short chunk pays, too.
# - **Pixels**: the convolutions, the shifts and the first layers behind the convolutions grow with the
#   image; the rest of actor and critics and the calls do not.
#
# ## Honest edges
#
# - **The bar of 10 % counts the loss with the networks**, and so the priorities of R2D2 that are made
#   of its errors, and the value in SAC's report on its policy, which cannot be told from the loss. With
#   the loss as overhead every algorithm of this book misses the bar.
# - **Time of the processor leaves out waiting** for a disk, but not for memory that another program
#   has pushed out of the cache. Evaluations and checkpoints are not in these numbers.
# - **A shared machine.** Each contestant has the number of turns that the first line names, in
#   training a third of it, and where the time goes is seen in a quarter as many runs. A virtual
#   machine has neighbours, who are not counted and yet share the caches and the units that
#   multiply. Quartiles within a part are narrow, but parts differ: the contest *sac* is measured twice,
#   the second time as the 256 units of the table of widths, and DrQ-v2's update three times, beside
#   its bare passes, before compiling and at 24 pixels. Compare their milliseconds before you believe a
#   ratio of 1.1.
# - **One machine.** Ratios travel better than milliseconds, and neither travels to a GPU. A ratio
#   to Stable-Baselines3 does not even travel to another width.
# - **Matrix products are a bound, not a goal**: an update also has to draw, to compare and to move
#   its weights. And they bound who multiplies these matrices, not who finds a way to multiply
#   fewer.
# - **Set-up is inside the stopwatch**: a call of `learn` makes its environments first, in this
#   book, and its callbacks, in Stable-Baselines3. A millisecond or so, and stretches of training
#   are long enough for that to be less than one per cent.
# - **The stopwatches themselves take time.** What a look costs is taken off as it is in an idle
#   loop; amid the networks, which empty the cache, it costs more.
# - **Two threads, compiling, and where the time goes are measured by the clock on the wall**, which
#   wants a machine with nothing else to do; everything else is time of the processor.
# - **A library does more than its update**: Stable-Baselines3 offers callbacks, loggers and
#   normalisation, which cost a little when they are not used.
#
# ## Exercises
#
# **Exercise 1.** If you made DQN's update infinitely fast, how much faster would training be? Use
# the shares in the first figure.

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# What is left is all that does not belong to updates (Amdahl's law): acting, environment and loop,
# and that part of the buffer which stores. One over their share is the most that a faster update
# can bring.
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
# Medians above, upper quartiles below: `values[-1]` is the last of median, lower and upper
# quartile. Together all kinds must be 1, and they were less.
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
# **Exercise 3.** A benchmark of two ways to sum. Its author concludes that the second is faster.
# Swap the two, and the conclusion swaps as well. What is measured here?

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
# first touch, caches, threads, imports, lazily loaded kernels. Warm up both, repeat, take turns,
# and keep out of the stopwatch what does not belong to the question.
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
# **Exercise 4.** Fusing Adam and laying six tensors side by side both save calls. Once Adam is
# fused, why does the second save so much less than the first?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Plain Adam makes about ten operations for each tensor, sixty calls for six. The fused version is
# one call, with a small price for each tensor in it: that price is all that is left to gain from
# putting the weights into one.
#
# ```python
# adam, joined = (changes[what]["works"] for what in ("fused Adam", "weights in one tensor"))
# plain, fused = (adam[kind]["ms"][0] for kind in ("plain", "fused"))
# six, one = (joined[kind]["ms"][0] for kind in ("six tensors", "one"))
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
