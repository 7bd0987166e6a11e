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
# If training is twice as fast, you can afford twice as many seeds. In this chapter you see what an
# update is made of, why almost nothing of it is arithmetic when networks are small, what one
# switch, `compile`, gains and costs, and how costs grow with buffers, ensembles, chunks and
# images. The figure compares three agents of this book, with the switch off and on, with two
# libraries at the same settings.

# %% tags=["hide-input"]
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.ticker import FormatStrFormatter, LogLocator
from torch import Tensor, nn

from rlbook.dqn import MLP
from rlbook.drqn import DRQN
from rlbook.figures import COLORS, PALETTE, made_by, use_style

use_style()


def spread(found: list[float]) -> str:
    """Write a median with its quartiles."""
    return "{:.2f} ({:.2f} to {:.2f})".format(*found)


LABELS = {
    "eager": ("this book", PALETTE[0]),
    "compiled": ("this book, compiled", PALETTE[5]),
    "stable-baselines3": ("Stable-Baselines3", COLORS["random"]),
    "sbx": ("SBX", PALETTE[1]),
    "sbx, 20 at once": ("SBX, 20 updates at once", PALETTE[3]),
}

# %% tags=["hide-input"]
speed: dict[str, Any] = json.loads(Path("results/speed.json").read_text())
figure, axes = plt.subplots(3, 2, figsize=(9, 7.5))
axes[2, 1].axis("off")
for ax, (name, contest) in zip(axes.flat, speed["peers"].items(), strict=False):
    works = contest["works"]
    ratios = [found["speedup"][0] for found in works.values()]
    bars = ax.barh([LABELS[work][0] for work in works], ratios, color=[LABELS[work][1] for work in works])
    ax.bar_label(bars, fmt="  %.2f")
    ax.set(title=name, xlabel="times as fast as Stable-Baselines3", xlim=(0, 1.2 * max(ratios)))
    ax.invert_yaxis()
    ax.grid(False)
plt.show()
print(made_by(speed))
print(f"{speed['machine']['cores']} cores of {speed['machine']['processor']}")
print(", ".join(f"{name} {number}" for name, number in speed["versions"].items()))
measured_again: dict[str, list[str]] = {}  # a command, and the parts that it measured
for part, made in speed.get("made_later", {}).items():
    line = f"{made['command']}  # {made['created']}, {made['machine']['processor']}"
    measured_again.setdefault(line, []).append(part)
for line, parts in measured_again.items():
    print(f"{', '.join(parts)} alone: {line}")

# %% [markdown]
# | | |
# |---|---|
# | Builds on | the algorithms of this book; most numbers are for [DQN](dqn.ipynb) and [SAC](sac.ipynb) |
# | Measured | on one thread of a CPU, by `make bench`; the lines above say which parts were measured again |
# | Compared with | Stable-Baselines3 (PyTorch), SBX (the same algorithms in JAX) |
# | Not measured | a GPU: we had none |
#
# ## How to measure
#
# A stopwatch also measures the other programs on the machine. Three habits help. Read the **time
# of the processor** (`time.process_time`), which stands still while another program has the core.
# **Take turns**, A, B, A, B: a slow minute hits both, and the ratio of neighbours stays the same.
# And report **medians with quartiles**. By hand: the mean of 10, 11, 10, 60 and 10 ms is 20.2 ms,
# and no call took that long. The median is 10.
#
# And mind what one contestant does to the others. Compiling anything in a process switches off the checks
# of `torch.distributions` for all of it, and Stable-Baselines3's PPO, which leaves them on, would then be faster
# here than its users see. So the benchmark switches them on again.

# %%
times = [10, 11, 10, 60, 10]
assert np.mean(times) == 20.2 and np.median(times) == 10

# %% [markdown]
# ## What an update is made of
#
# The six algorithms with a replay buffer train as they are shipped, and DQN and SAC also with
# larger networks and batches. *Forward* is every pass through a network in an update, those of
# target networks included. *Loss* is everything else that an update computes: targets, errors,
# metrics, and the noise of sampled actions. *Acting*, *environment* and *storing* are the cost of
# the environment steps, divided by the number of updates. *Loop* is the rest, logging for example.

# %% tags=["hide-input"]
KINDS = ["forward", "loss", "backward", "optimiser", "target update", "sampling"]
OUTSIDE = ["acting", "environment", "storing", "loop"]  # not a part of the update itself
INKS = [*PALETTE[:6], "#777777", "#999999", "#BBBBBB", "#DDDDDD"]


def microseconds(name: str) -> dict[str, float]:
    """Return the median time of each kind of work in the training of an algorithm, per update."""
    stored = speed["parts"][name]["microseconds"]
    return {kind: stored.get(kind, [0.0])[0] for kind in [*KINDS, *OUTSIDE]}


names = list(speed["parts"])
figure, ax = plt.subplots(figsize=(9, 0.5 * len(names) + 1.6))
left = np.zeros(len(names))
for kind, ink in zip([*KINDS, *OUTSIDE], INKS, strict=True):
    totals = np.array([sum(microseconds(name).values()) for name in names])
    widths = 100 * np.array([microseconds(name)[kind] for name in names]) / totals
    ax.barh(names, widths, left=left, color=ink, label=kind, height=0.7)
    left += widths
ax.invert_yaxis()
ax.grid(False)
ax.set(xlabel="% of the time of training", xlim=(0, 100))
ax.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.16))
plt.show()
print(f"{'':12}{'hidden':>12}{'batch':>7}{'an update':>13}{'with its steps':>16}")
for name in names:
    part, found = speed["parts"][name], microseconds(name)
    update, whole = (sum(found[kind] for kind in kinds) for kinds in (KINDS, found))
    print(f"{name:12}{part['hidden']!s:>12}{part['batch_size']:>7}{update:10,.0f} µs{whole:13,.0f} µs")

# %% [markdown]
# With two layers of 64 units (DQN, SAC, REDQ) forward and backward passes are between 46 and 63 % of
# an update, and loss, optimiser, target update and sampling share the rest. With LSTMs and
# convolutions the passes are about three quarters of it, and with two layers of 512 units nine tenths.
#
# ## Small networks are all overhead
#
# How much arithmetic is in an update of the shipped DQN? By hand: the network has $4 \cdot 64 + 64
# \cdot 64 + 64 \cdot 2 = 4{,}480$ weights, and each is multiplied once for each of 64 transitions,
# in three forward passes (Double DQN needs the next Q-values of both networks). A backward pass
# costs about twice a forward pass. That is $5 \cdot 64 \cdot 4{,}480 \approx 1.4$ million
# multiplications. Measure how many this processor makes in a second, and see how long they should
# take:

# %%
def seconds(work: Callable[[], object], calls: int = 30, rounds: int = 7) -> float:
    """Return the median time of one call."""
    work()  # the first call pays for what is done once
    times = []
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(calls):
            work()
        times.append((time.process_time() - began) / calls)
    return float(np.median(times))


torch.set_num_threads(1)
a, b = torch.rand(512, 512), torch.rand(512, 512)
rate = 512**3 / seconds(lambda: a @ b)
multiplications = 5 * 64 * sum(p.numel() for p in MLP((4, 64, 64, 2)).parameters() if p.ndim == 2)
assert multiplications == 5 * 64 * 4_480
print(f"{rate / 1e9:.0f} billion multiplications a second: {1e6 * multiplications / rate:.0f} µs of arithmetic "
      f"in an update that was measured at {sum(microseconds('dqn')[kind] for kind in KINDS):,.0f} µs")

# %% [markdown]
# Where is the rest? Each operation of PyTorch is called from Python, checks shapes and types,
# allocates its result, and records for autograd what the backward pass will need. That takes some
# microseconds, for ten numbers as well as for ten thousand. One layer shows it: double the width,
# and at first nothing happens.

# %%
sizes = [4, 8, 16, 32, 64, 128, 256, 512, 1024]
layers = {n: (nn.Linear(n, n), torch.rand(64, n)) for n in sizes}
measured = [1e6 * seconds(lambda n=n: layers[n][0](layers[n][1])) for n in sizes]
figure, ax = plt.subplots(figsize=(6, 3.2))
ax.plot(sizes, measured, "o-", color=PALETTE[0], label="measured")
ax.plot(sizes, [64 * n * n / rate * 1e6 for n in sizes], "--", color=COLORS["random"], label="arithmetic")
ax.set(xscale="log", yscale="log", xlabel="inputs and outputs of the layer", ylabel="µs, batch 64")
ax.set_xticks(sizes, [str(n) for n in sizes])
ax.minorticks_off()
ax.legend()
plt.show()
assert measured[3] < 16 * measured[0]  # 64 times the arithmetic

# %% [markdown]
# So there are two ways to be faster. Large networks need faster arithmetic: more cores or a GPU. Small
# networks need fewer operations.
#
# ## Compiling
#
# Without compiling PyTorch is *eager*: it runs each operation when Python reaches it.
# `torch.compile` traces a function of tensors and writes a C++ program that does the same in fewer
# operations. Every agent has the setting `compile`, off by default. It compiles the method that
# turns a batch into gradients: forward passes, loss and backward pass.
# [The chapter on agents](agent.ipynb) has the few lines that do it. Here are the operations that
# one update starts and the time that it takes, with the shipped sizes and an update of the actor
# each time:

# %%
print(f"{'':6}{'operations':>16}{'eager':>11}{'compiled':>12}{'times as fast':>24}")
for name, found in speed["compile"].items():
    before, after = found["operations"]
    slow, fast = (found["works"][kind] for kind in ("eager", "compiled"))
    milliseconds = f"{slow['ms'][0]:8.2f} ms{fast['ms'][0]:9.2f} ms"
    print(f"{name:6}{before:>8} → {after:>4} {milliseconds}{spread(fast['speedup']):>24}")

# %% [markdown]
# What remains are matrix products and convolutions, which are calls of a library either way, and
# what is outside the method: sampling, the optimiser, the target update. DrQ-v2, with its
# convolutions, gains the least.
#
# ### Where it does not pay
#
# **In short runs.** The first update waits for the C++ compiler. That time is earned back after
#
# $$\text{updates} = \frac{\text{seconds of compiling}}{\text{seconds before} - \text{seconds after}}$$
#
# By hand: 10 s to compile, 1.0 ms before and 0.6 ms after, is 25,000 updates. PyTorch keeps its programs on
# the disk, so another run with the same sizes waits less.

# %%
def earned_back(compiling: float, before: float, after: float) -> float:
    """Return the updates after which compiling has paid, from three times in seconds."""
    return compiling / (before - after) if before > after else float("inf")


assert round(earned_back(10, 1.0e-3, 0.6e-3)) == 25_000
print(f"{'':6}{'the first time':>30}{'from the disk':>30}")
for name, found in speed["compile"].items():
    update = [found["works"][kind]["ms"][0] / 1e3 for kind in ("eager", "compiled")]
    waits = found["first_seconds"], found["again_seconds"]
    print(f"{name:6}" + "".join(f"{w:8.1f} s,{earned_back(w, *update):10,.0f} updates" for w in waits))

# %% [markdown]
# **With large networks.** The operations that compiling removes cost about the same at any width;
# the matrix products that it leaves do not. Here are DQN and SAC with two layers of 16 to 1,024
# units and a batch of 128:

# %%
figure, ax = plt.subplots(figsize=(6.5, 3.4))
for name, found in speed["widths"].items():
    units = [int(width) for width in found]
    median, low, high = np.array([each["compiled"]["speedup"] for each in found.values()]).T
    ax.errorbar(units, median, [median - low, high - median], marker="o", capsize=3, color=COLORS[name], label=name)
ax.axhline(1, color="black", linewidth=1)
ax.set(xscale="log", xlabel="units of each hidden layer", ylabel="compiled, times as fast as eager")
ax.set_xticks(units, [str(width) for width in units])
ax.minorticks_off()
ax.legend()
plt.show()

# %% [markdown]
# With 1,024 units little or nothing of the gain is left.
#
# **With LSTMs.** PyTorch cannot compile a backward pass through an LSTM. So recurrent agents refuse:

# %%
try:
    DRQN("CartPole-v1", compile=True)
except ValueError as error:
    print(error)

# %% [markdown]
# They refuse because the alternative is worse than slow. When PyTorch meets something that it
# cannot compile, it cuts the function there and compiles the pieces. If the cut is between a
# forward and a backward pass, **the gradients can be lost without a message**: training runs fast,
# and the parameters never change. Exercise 2 shows how easily it happens. With `fullgraph=True`
# there is one piece or an error. So the library never compiles without it, and a test compares the
# parameters of compiled and eager agents.
#
# ## Beside Stable-Baselines3 and SBX
#
# Three libraries take turns, with the same networks, batches and updates per step, each on one
# thread:
#
# - **dqn**: training on CartPole at the settings of the RL Zoo (tuned settings for
#   Stable-Baselines3), environment and acting included.
# - **sac**: one update with two layers of 256 units and a batch of 256, the defaults of Stable-Baselines3.
# - **sac, as shipped**: one update with our shipped sizes, and then training on Pendulum with them.
# - **ppo**: training on CartPole at the settings of the RL Zoo.
#
# *Aim* is what we ask of plain code: in eager mode a little faster than Stable-Baselines3,
# compiled clearly faster where networks are small. A missed aim stays in the table.

# %%
AIMS = {
    "dqn": {"eager": 1.15, "compiled": 1.5},
    "sac": {"eager": 1.15, "compiled": 1.2},
    "sac, as shipped": {"eager": 1.5, "compiled": 2.8},
    "ppo": {"eager": 1.25},
}
for name, contest in speed["peers"].items():
    print(f"{name}: {contest['what']}\n{'':32}ms {contest['unit']:12}times as fast (quartiles)   aim")
    for work, found in contest["works"].items():
        aim = AIMS.get(name, {}).get(work)
        verdict = "" if aim is None else f"{aim:7.2f} {'reached' if found['speedup'][0] >= aim else 'missed'}"
        print(f"    {LABELS[work][0]:24}{found['ms'][0]:6.3g}{'':15}{spread(found['speedup']):>20}{verdict}")

# %% [markdown]
# Our eager code is plain PyTorch with an Adam that makes its step in one operation (`fused=True`),
# two critics in one batched product, no gradients for the critics when the actor of SAC learns, one
# indexing operation to sample a batch, and metrics that stay tensors until a line is written.
#
# SBX has the same algorithms in JAX. There the whole update, optimiser included, is one compiled
# program, and so are twenty updates if they are asked for at once. Our switch leaves sampling,
# optimiser and target update outside, where you can read and change them. The price is speed: SBX
# is ahead of the compiled agents in DQN and in the update of SAC with 256 units. With 64 units the two
# are close, until SBX makes twenty updates at once, which is three times as fast there and changes
# nothing with 256. In training SAC they are close, too, and in PPO the compiled agent is ahead.
#
# Neither library has DRQN, R2D2, REDQ or DrQ-v2 in the same form. So compare their updates with
# the bare forward and backward passes of their networks, on a batch that is ready:

# %%
for name, found in speed["bare"].items():
    update, bare = (found["works"][kind] for kind in ("update", "bare passes"))
    print(f"{name:6}{update['ms'][0]:7.2f} ms, bare passes {bare['ms'][0]:6.2f} ms: "
          f"{spread(bare['speedup'])} times as long\n{'':6}{found['what']}")

# %% [markdown]
# ## Few large operations
#
# REDQ has ten critics. As ten networks in a loop they start ten times as many operations as one.
# If their weights are stacked, each layer of all ten is one batched product, `torch.baddbmm`;
# [SAC](sac.ipynb) writes its critics in this way. Here are forward and backward pass of ten
# critics with a batch of 256:

# %%
print("units     in a loop      batched   times as fast")
for width, found in speed["batching"]["critics"].items():
    loop, batched = found["loop"], found["batched"]
    print(f"{width:>5}{loop['ms'][0]:11.2f} ms{batched['ms'][0]:10.2f} ms   {spread(batched['speedup'])}")
print("\na step of Adam for two layers of 64 units:")
for name, found in speed["batching"]["adam"].items():
    print(f"    {name:22}{1e3 * found['ms'][0]:6.0f} µs")

# %% [markdown]
# Narrow critics gain a lot, wide ones nothing. Why? Ten critics of 512 units and a batch of 256
# have activations of $10 \cdot 256 \cdot 512$ numbers, 5 MB a layer. A loop finishes one critic
# while its half megabyte is in the cache. The batched product writes all 5 MB before the next
# layer reads any of it, probably from main memory.
#
# Adam is the same story. It can start an operation for each step of its formula and each tensor,
# or for each step and all tensors together (`foreach`), or one for everything (`fused=True`, which
# every agent of this book uses).
#
# ## How cost grows
#
# What does a sample or an update cost with ten times as many transitions, critics or pixels? Both
# axes are logarithmic. Along the dashed line, twice as much costs twice as much. (More environments
# have no such line: together they take the same 120 steps.)

# %% tags=["hide-input"]
growth = speed["growth"]
figure, axes = plt.subplots(2, 3, figsize=(9, 5.6))
for ax, (name, found) in zip(axes.flat, growth.items(), strict=True):
    sizes = np.array([int(size) for size in found["ms"]])
    median, low, high = np.array(list(found["ms"].values())).T
    if name != "environments":
        ax.plot(sizes, median[0] * sizes / sizes[0], "--", color=COLORS["random"], linewidth=1)
    ax.errorbar(sizes, median, yerr=[median - low, high - median], marker="o", capsize=3)
    ax.set(xscale="log", yscale="log", ylabel="ms", xlabel=found["unit"])
    ax.set_title(found["what"].replace(", ", ",\n", 1), fontsize=9)
    ax.set_ylim(0.6 * low.min(), max(1.5 * high.max(), 5 * low.min()))
    ax.set_xticks(sizes, [f"$10^{len(str(n)) - 1}$" if sizes[0] >= 10_000 else f"{n:,}" for n in sizes])
    ax.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter=FormatStrFormatter("%g"))
    ax.minorticks_off()
plt.show()

# %% [markdown]
# - **Buffer**: with a hundred times as many transitions stored, a uniform sample takes less than
#   twice as long. The likely reason is that the buffer no longer fits into the cache.
# - **Priorities**: a sample goes down a binary tree, which has one level more for each doubling.
#   So the cost grows with the logarithm of the size.
# - **Environments**: one call of the network acts in all of them, so eight environments need an
#   eighth of the calls for the same steps. The steps of the environments themselves remain.
# - **Critics**: two narrow critics are nearly all overhead, so ten cost far less than five times
#   as much. From ten to twenty arithmetic begins to count.
# - **Chunks**: an LSTM goes through its steps one after another, so for long chunks the curve
#   becomes nearly as steep as the dashed line.
# - **Images**: shifts, convolutions and the first layer behind them grow with the pixels; the
#   other layers and the overhead do not.
#
# ## Honest edges
#
# - **One machine.** Ratios carry over to another machine better than milliseconds, and neither
#   carries over to a GPU. Do not trust a difference of five per cent. Parts that were measured at
#   different times differ more: the same update of SAC, 64 units and a batch of 128, is in three
#   places of this chapter, with different gains from compiling.
# - **The contests are not quite equal.** SBX does not clip DQN's gradient. Stable-Baselines3 and
#   SBX wrap their environments in a monitor. Ours are vector environments, and the loop checks
#   that all rewards and observations are finite. The stopwatch takes about a microsecond at each
#   switch from one kind of work to another, which makes the parts of small updates look larger.
# - **Not measured**: A2C, TRPO and recurrent PPO; evaluations, checkpoints, more threads, several
#   seeds at once. For networks of this size one run per core is the best use of several cores, and
#   [sweeps](sweep.ipynb) do that.
#
# ## Exercises
#
# **Exercise 1.** If you made DQN's update infinitely fast, how much faster would training get?
#
# <details>
# <summary>Solution</summary>
#
# What is left is everything outside the update (Amdahl's law).
#
# ```python
# found = microseconds("dqn")
# most = sum(found.values()) / sum(found[kind] for kind in OUTSIDE)
# print(f"at most {most:.1f} times as fast")
# assert most > 1
# ```
#
# </details>
#
# **Exercise 2: find the bug.** A colleague compiles the gradients of a small regression and adds a
# line that shows her its progress. The first loss is right and it runs fast. But the network does
# not learn. Why, and what would have told her?

# %%
torch._dynamo.config.trace_autograd_ops = True  # as `compile: true` does


def squared_error_gradients(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Backpropagate the squared error, and return it."""
    loss = (network(x).squeeze(1) - y).square().mean()
    print(f"a batch of {len(x)}")
    loss.backward()
    return loss.detach()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function; this backend needs no C++ compiler."""
    return torch.compile(function, backend="aot_eager")


x, y, network = torch.rand(32, 4), torch.rand(32), nn.Linear(4, 1)
optimizer, gradients, losses = torch.optim.SGD(network.parameters(), lr=0.5), compiled(squared_error_gradients), []
for _ in range(5):
    optimizer.zero_grad()
    losses.append(float(gradients(network, x, y)))
    optimizer.step()
print(f"loss of the first step {losses[0]:.3f}, of the last {losses[-1]:.3f}")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# `print` cannot be compiled, so PyTorch cuts the function there, and the gradients of the forward
# pass before the cut are lost. `fullgraph=True` raises an error instead. Whatever is not part of
# the computation goes outside.
#
# ```python
# def squared_error_gradients(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
#     """Backpropagate the squared error, and return it."""
#     loss = (network(x).squeeze(1) - y).square().mean()
#     loss.backward()
#     return loss.detach()
#
# def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
#     """Compile a function as a whole; this backend needs no C++ compiler."""
#     return torch.compile(function, backend="aot_eager", fullgraph=True)
#
# networks = [nn.Linear(4, 1), nn.Linear(4, 1)]
# networks[1].load_state_dict(networks[0].state_dict())
# squared_error_gradients(networks[0], x, y)
# compiled(squared_error_gradients)(networks[1], x, y)
# eager, fast = (network.weight.grad for network in networks)
# assert eager is not None and fast is not None and torch.allclose(eager, fast)
# ```
#
# </details>
#
# **Exercise 3.** The shipped SAC trains for 10,000 steps and makes an update after each of the last 9,750.
# Does compiling pay, the first time and from the disk?
#
# <details>
# <summary>Solution</summary>
#
# Compare what all updates save with what compiling takes.
#
# ```python
# found = speed["compile"]["sac"]
# before, after = (found["works"][kind]["ms"][0] / 1e3 for kind in ("eager", "compiled"))
# saved = 9_750 * (before - after)
# for when in ("first_seconds", "again_seconds"):
#     print(f"{when}: {found[when]:.1f} s of compiling, {saved:.1f} s saved, pays: {saved > found[when]}")
# ```
#
# </details>
#
# **Exercise 4.** `seconds` calls its work once before it starts the stopwatch. Take a function that was just
# compiled: how much longer does its first call take than a later one?
#
# <details>
# <summary>Solution</summary>
#
# The first call pays for what is done once: compiling, imports, memory that the system hands out
# at its first touch. A benchmark that times A once and then B once measures that.
#
# ```python
# work = torch.compile(lambda: a.sin().sum(), backend="aot_eager")
# began = time.perf_counter()
# work()
# first, later = time.perf_counter() - began, seconds(work)
# print(f"first call {1e3 * first:.0f} ms, later {1e3 * later:.2f} ms")
# assert first > later
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# ```
# rlbook train sac --config pendulum --compile      # the switch
# make bench                                        # all numbers of this chapter, ten minutes
# python bench/speed.py --only peers --rounds 9     # one part, the others stay as they are
# ```
#
# ## References
#
# - A. Raffin et al. (2021). Stable-Baselines3: reliable reinforcement learning implementations.
#   *JMLR* 22. SBX is its counterpart in JAX, by the same authors.
# - J. Ansel et al. (2024). PyTorch 2: faster machine learning through dynamic Python bytecode
#   transformation and graph compilation. *ASPLOS*.
