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
# # Replay
#
# An agent that learns from each step once, in the order of its life, learns badly: neighbouring
# steps tell nearly the same story, and what it saw an hour ago is gone. In this chapter you build
# the memory that mends both, a ring of the last transitions from which batches are drawn at random.
# A draw takes microseconds, whether ten thousand transitions are stored or a million. You also
# build the small machine that turns single steps into n-step returns on their way into the ring.
#
# | | |
# |---|---|
# | Papers | Lin (1992): replay; Mnih et al. (2015): replay in DQN; Sutton (1988): n steps |
# | You need | NumPy, and `terminated` against `truncated` from [environments](envs.ipynb) |
# | Same as in most libraries | a ring of preallocated memory, uniform draws with replacement |
# | Different | one row per transition instead of one array per field; its own generator |

# %%
#| export
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

# %% [markdown]
# The cells that are not part of the library need a little more, and rows that one can tell apart:
# the reward of each is its number.

# %%
import io
import random
import time
from collections import deque
from collections.abc import Callable

import matplotlib.pyplot as plt

import rlbook.replay as finished
from rlbook.figures import PALETTE, use_style

use_style()
box, two = gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(2)


def numbered(numbers: Any) -> np.ndarray:
    """Return rows whose reward is their number."""
    rows = np.zeros(len(numbers), finished.transition_dtype(box, two))
    rows["reward"] = numbers
    return rows


# %% [markdown]
# This is what you will have built, drawn with the finished module. On the left is a ring with room
# for 24 rows after it has taken 30: the last six have overwritten the first six. On the right an
# agent draws 20 rows after every 25th step from a ring of 1,000. The age of a drawn row is
# anything from 0 to the age of the oldest one that is left, and every age is equally likely.

# %% tags=["hide-input"]
def draw_ring(ax: Any, buffer: finished.ReplayBuffer, now: int) -> None:
    """Draw a ring of rows, coloured by their age, with their numbers and the place to write."""
    capacity = len(buffer.rows)
    angle = np.pi / 2 - 2 * np.pi * (np.arange(capacity) + 0.5) / capacity
    age = now - buffer.rows["reward"]
    colors = plt.get_cmap("viridis_r")(age / age.max())
    ax.bar(angle, 0.45, 2 * np.pi / capacity, bottom=1, color=colors, edgecolor="white")
    for place in range(capacity):
        number = int(buffer.rows["reward"][place])
        color = "white" if age[place] > 0.45 * age.max() else "black"
        ax.text(angle[place], 1.22, number, ha="center", va="center", fontsize=8, color=color)
    here = np.pi / 2 - 2 * np.pi * buffer.position / capacity
    arrow = {"arrowstyle": "-|>", "color": PALETTE[3], "linewidth": 1.8}
    ax.annotate("", (here, 1.0), (here, 0.5), arrowprops=arrow)
    ax.text(0, 0, "the next row\ngoes here", ha="center", va="center", fontsize=9)
    ax.set(ylim=(0, 1.5), title="a ring of 24 after 30 rows")
    ax.axis("off")


figure = plt.figure(figsize=(9, 3.6))
ring = finished.ReplayBuffer(24, numbered([0]).dtype, seed=0)
ring.add(numbered(np.arange(30)))
draw_ring(figure.add_subplot(1, 2, 1, projection="polar"), ring, now=29)

buffer = finished.ReplayBuffer(1_000, numbered([0]).dtype, seed=0)
steps, ages = [], []
for step in range(3_000):
    buffer.add(numbered([step]))
    if step % 25 == 0:
        steps += [step] * 20
        ages += list(step - buffer.sample(20)["reward"])
ax = figure.add_subplot(1, 2, 2)
ax.scatter(steps, ages, s=2, color=PALETTE[0])
oldest = np.minimum(np.arange(3_000), 999)
ax.plot(oldest, color="black", linewidth=1, label="oldest row in the ring")
ax.plot(oldest / 2, color="black", linewidth=1, linestyle="--", label="mean age of a draw")
ax.set(xlabel="environment steps", ylabel="age of a drawn row (steps)", ylim=(0, 1_300))
ax.set_title("what is drawn from a ring of 1,000")
ax.legend(loc="upper right", ncols=2)
plt.show()

# %% [markdown]
# ## The problem: neighbours look alike
#
# Let a random policy play CartPole for 10,000 steps and write down the angle of the pole. How much
# does one angle tell about the angle $k$ steps later? The autocorrelation says it, 1 for
# everything and 0 for nothing:
#
# $$\rho_k = \frac{\operatorname{mean}\bigl[(x_t - \bar x)(x_{t+k} - \bar x)\bigr]}
# {\operatorname{mean}\bigl[(x_t - \bar x)^2\bigr]}$$


# %%
def random_angles(steps: int, seed: int) -> np.ndarray:
    """Return the angle of the pole at each step of a random policy."""
    env, rng, angles = gym.make("CartPole-v1"), np.random.default_rng(seed), []
    obs, _ = env.reset(seed=seed)
    for action in rng.integers(2, size=steps):
        angles.append(obs[2])
        obs, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            obs, _ = env.reset()
    return np.array(angles)


def autocorrelation(x: np.ndarray, k: int) -> float:
    """Return how much a value tells about the value k steps later."""
    x = x - x.mean()
    return float((x[: len(x) - k] * x[k:]).mean() / x.var())


angles = random_angles(10_000, seed=0)
drawn = np.random.default_rng(0).choice(angles, size=len(angles))  # the same, in random order
assert autocorrelation(angles, 1) > 0.8
assert abs(autocorrelation(drawn, 1)) < 0.1

# %% [markdown]
# What does that do to a gradient? A gradient is a mean over a batch. The mean of $B$ independent
# values has $1/B$ of the variance of one value. So divide the variance of one value by the
# variance of the batch mean, and you have the number of independent values that the batch is worth.


# %%
def worth(x: np.ndarray, batch: int) -> float:
    """Return how many independent values a batch of neighbours in `x` is worth."""
    means = x[: len(x) // batch * batch].reshape(-1, batch).mean(axis=1)
    return float(x.var() / means.var())


print(f"32 neighbours are worth {worth(angles, 32):4.1f} independent angles")
print(f"32 draws      are worth {worth(drawn, 32):4.1f} independent angles")
assert worth(angles, 32) < 6
assert worth(drawn, 32) > 16

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
left.plot(angles[:150], color=PALETTE[3], label="as they come")
left.plot(drawn[:150], ".", color=PALETTE[0], markersize=5, label="drawn from all")
left.set(xlabel="place in the stream", ylabel="angle of the pole (rad)", ylim=(-0.3, 0.4))
left.legend(ncols=2, loc="upper center")
lags = np.arange(41)
for x, color in ((angles, PALETTE[3]), (drawn, PALETTE[0])):
    right.plot(lags, [autocorrelation(x, k) for k in lags], color=color)
right.set(xlabel="lag (steps)", ylabel="autocorrelation")
plt.show()

# %% [markdown]
# A batch of 32 neighbours does the work of 3. That is the first reason to remember. The second:
# each step is then used many times, and steps in an environment are often what costs most.
#
# ## A transition is a row
#
# What one update needs to know about one step is small and fixed: the observation, the action, the
# reward, the next observation, whether the episode terminated there, and the discount $\gamma^k$
# of the value of the next observation, where $k$ is the number of steps in between (1 until n-step
# returns come). You could keep six arrays. Then a batch of 64 is 64 times six visits to distant
# places in memory. Keep one array of **rows** instead, and all that belongs to a transition lies
# side by side.
#
# NumPy calls such a row a structured type. First, what type has one entry? Floats are stored with
# 32 bits, which is what networks compute with. Everything else stays what it is, above all the
# bytes of an image: as floats they would take four times the memory and say nothing more.

# %%
#| export
def storage_dtype(space: gym.Space) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the type and shape in which values of `space` are stored: images stay bytes."""
    if space.dtype is None or space.shape is None:
        raise ValueError(f"A replay buffer stores arrays of numbers, and {space} is not one array.")
    if isinstance(space, gym.spaces.Discrete):
        return np.dtype(np.int64), ()  # PyTorch wants it so, whatever the environment counts in
    dtype = np.dtype(np.float32) if space.dtype.kind == "f" else space.dtype
    return dtype, space.shape


# %% [markdown]
# By hand: a `Box` of two 64-bit floats is stored as two 32-bit floats; an image of bytes stays an
# image of bytes; a `Discrete` action is one 64-bit integer, with the empty shape.

# %%
image = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
assert storage_dtype(gym.spaces.Box(-1, 1, (2,), np.float64)) == (np.float32, (2,))
assert storage_dtype(image) == (np.uint8, (84, 84, 4))
assert storage_dtype(gym.spaces.Discrete(2)) == (np.int64, ())
try:
    storage_dtype(gym.spaces.Dict(position=box))
except ValueError as error:
    print(error)

# %% [markdown]
# Now the row. `align=True` puts each number at a multiple of its own size and rounds the row up to
# a multiple of the largest. Torch needs that to look at a column without copying it (exercise 3).

# %%
#| export
def transition_dtype(observation_space: gym.Space, action_space: gym.Space) -> np.dtype:
    """Describe one transition as a row of bytes, so that all an update needs lies side by side."""
    observation, action = storage_dtype(observation_space), storage_dtype(action_space)
    fields = [
        ("obs", *observation),
        ("next_obs", *observation),
        ("action", *action),
        ("reward", np.float32),
        ("discount", np.float32),  # gamma ** (steps taken), the weight of the value of next_obs
        ("terminated", np.bool_),
    ]
    return np.dtype(fields, align=True)


# %% [markdown]
# By hand: two observations of 2 floats are 16 bytes, an action 8, reward and discount 8, the flag
# 1, together 33; rounded up to a multiple of 8, the size of the action, that makes 40 bytes.

# %%
dtype = transition_dtype(box, two)
print({name: offset for name, (_, offset, *_) in (dtype.fields or {}).items()})
assert dtype.itemsize == 40

# %% [markdown]
# A million of DQN's stacks of four frames, as bytes and as floats:

# %%
atari = transition_dtype(image, gym.spaces.Discrete(18)).itemsize
floats = transition_dtype(gym.spaces.Box(0, 1, image.shape), gym.spaces.Discrete(18)).itemsize
print(f"{atari / 1e3:.0f} GB as bytes, {floats / 1e3:.0f} GB as floats")
assert atari == 2 * 84 * 84 * 4 + 24 and floats > 3.9 * atari

# %% [markdown]
# One step of a batch of environments becomes one row for each.

# %%
#| export
def make_rows(
    dtype: np.dtype,
    *,
    obs: np.ndarray,
    action: np.ndarray,
    reward: np.ndarray,
    next_obs: np.ndarray,
    terminated: np.ndarray,
    discount: float | np.ndarray,
) -> np.ndarray:
    """Put one step of a batch of environments into rows, one row an environment."""
    rows = np.zeros(len(reward), dtype)  # (num_envs,)
    rows["obs"], rows["next_obs"], rows["action"] = obs, next_obs, action
    rows["reward"], rows["discount"], rows["terminated"] = reward, discount, terminated
    return rows


# %% [markdown]
# By hand, two environments: the first earns 1 and goes on, the second earns −1 and terminates.

# %%
rows = make_rows(
    dtype,
    obs=np.array([[0.0, 0.1], [0.2, 0.3]]),
    action=np.array([1, 0]),
    reward=np.array([1.0, -1.0]),
    next_obs=np.array([[0.4, 0.5], [0.6, 0.7]]),
    terminated=np.array([False, True]),
    discount=0.99,
)
print(rows[1])
assert rows.shape == (2,) and rows["obs"].shape == (2, 2)
assert rows["reward"].tolist() == [1, -1] and rows["terminated"].tolist() == [False, True]
assert np.allclose(rows[1]["next_obs"], [0.6, 0.7])

# %% [markdown]
# ## The ring
#
# Room for `capacity` rows is reserved at the start; the system hands it out as rows are first written,
# so a ring that is too large for the machine shows it late. A row goes to the place `position`, which
# then moves on by one, and after the last place comes the first:
#
# $$\text{place of the } i\text{-th new row} = (\text{position} + i) \bmod \text{capacity}$$
#
# So the newest row always takes the place of the oldest, and nothing is ever moved. A draw is a
# list of random places and one `take`, which copies whole rows.

# %%
#| export
def draw_places(generator: np.random.Generator, size: int, count: int) -> np.ndarray:
    """Draw `count` of `size` places with replacement, each as likely as any other."""
    return (generator.random(count) * size).astype(np.int64)  # quicker than `integers`

# %%
places = draw_places(np.random.default_rng(0), size=4, count=4_000)
assert set(places) == {0, 1, 2, 3} and np.bincount(places).min() > 800  # about a thousand each

# %% [markdown]
# By hand, with room for four: after the rows 0, 1, 2 the position is 3. Then 3, 4, 5 arrive
# together. Row 3 goes to place 3, row 4 wraps around to place 0, and row 5 goes to place 1, where
# they overwrite the rows 0 and 1. The ring holds `4 5 2 3`, and the next row goes to place 2, where
# the oldest row is.

# %%
#| export
class ReplayBuffer:
    """A ring of the last `capacity` transitions, sampled uniformly with its own generator."""

    def __init__(self, capacity: int, dtype: np.dtype, seed: int) -> None:
        if capacity < 1:
            raise ValueError(f"A replay buffer needs room for one row at least, not {capacity}.")
        self.rows = np.zeros(capacity, dtype)
        self.position = 0  # where the next row goes
        self.size = 0
        self.generator = np.random.default_rng(seed)

    def __len__(self) -> int:
        return self.size

    def add(self, rows: np.ndarray) -> None:
        """Store rows, the oldest of the ring giving way."""
        end, capacity = self.position + len(rows), len(self.rows)
        if end <= capacity:
            self.rows[self.position : end] = rows
        else:  # around the end of the ring
            self.rows[np.arange(self.position, end) % capacity] = rows
        self.position = end % capacity
        self.size = min(self.size + len(rows), capacity)

    def sample(self, batch_size: int, out: np.ndarray | None = None) -> np.ndarray:
        """Draw rows uniformly, with replacement, in one gather, into `out` if it is given."""
        if self.size == 0:
            raise ValueError("The replay buffer is empty: add transitions before you sample.")
        places = draw_places(self.generator, self.size, batch_size)
        return self.rows.take(places, out=out, mode="clip")  # other modes fill `out` by a detour

    def state_dict(self) -> dict[str, Any]:
        """Return the filled part of the ring, without a copy, and the state of the generator."""
        return {
            "rows": torch.from_numpy(self.rows[: self.size].view(np.uint8)),
            "dtype": self.rows.dtype.descr,
            "capacity": len(self.rows),
            "position": self.position,
            "generator": self.generator.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a stored ring: the samples go on as if nothing had happened."""
        for name, here in (("dtype", self.rows.dtype.descr), ("capacity", len(self.rows))):
            if state[name] != here:
                raise ValueError(
                    f"The stored replay buffer has the {name} {state[name]}, this one {here}."
                )
        rows = state["rows"].cpu().numpy().view(self.rows.dtype)
        self.size, self.position = len(rows), state["position"]
        self.rows[: self.size] = rows
        self.generator.bit_generator.state = state["generator"]


# %%
ring = ReplayBuffer(4, dtype, seed=0)
ring.add(numbered([0, 1, 2]))
assert len(ring) == 3 and ring.position == 3
ring.add(numbered([3, 4, 5]))
assert ring.rows["reward"].tolist() == [4, 5, 2, 3]
assert len(ring) == 4 and ring.position == 2
ring.add(numbered(range(100, 110)))  # more than there is room for: the last four stay
assert sorted(ring.rows["reward"]) == [106, 107, 108, 109]
print(ring.sample(8)["reward"])

# %% [markdown]
# The first figure said that all ages are equally likely. A ring of 1,000 holds the ages 0 to 999,
# whose mean is 499.5, and a mean of 100,000 draws misses it by about
# $1000 / \sqrt{12 \cdot 100{,}000} \approx 0.9$.

# %%
ring = ReplayBuffer(1_000, dtype, seed=0)
ring.add(numbered(np.arange(3_456)))
ages = 3_455 - ring.sample(100_000)["reward"]
print(f"ages from {ages.min():.0f} to {ages.max():.0f}, mean {ages.mean():.1f}")
assert ages.min() == 0 and ages.max() == 999
assert abs(ages.mean() - 499.5) < 6

# %% [markdown]
# ## From rows to tensors
#
# Up to here everything was NumPy. This is the one place where it becomes torch, and where a batch
# moves to the device. On a CPU no number is copied: each tensor is a view of a column, which steps
# from row to row.

# %%
#| export
@dataclass
class Batch:
    """Transitions as tensors on the device of the networks."""

    obs: Tensor  # (batch, ...)
    next_obs: Tensor  # (batch, ...)
    action: Tensor  # (batch,) or (batch, dimensions)
    reward: Tensor  # (batch,)
    discount: Tensor  # (batch,)
    terminated: Tensor  # (batch,)


def to_batch(rows: np.ndarray, device: torch.device) -> Batch:
    """View the columns of the rows as tensors: on a CPU nothing is copied."""
    columns = {name: torch.from_numpy(rows[name]) for name in rows.dtype.names or ()}
    if device.type == "cpu":
        return Batch(**columns)
    return Batch(**{name: column.to(device) for name, column in columns.items()})


# %%
batch = to_batch(rows, torch.device("cpu"))
print(batch.obs.stride(), batch.terminated.stride(), batch.obs.dtype, batch.terminated.dtype)
assert batch.reward.tolist() == [1, -1]
assert batch.obs.stride() == (10, 1)  # a row of 40 bytes is ten 32-bit floats long
rows["reward"][0] = 5
assert batch.reward[0] == 5  # the same memory

# %% [markdown]
# For a small network this is still too much: to make six views of a batch takes longer than to copy
# its rows. So an agent that draws often keeps memory for its batches. `DrawnBatches` draws for all
# updates that are due in one gather, always into the same rows, whose views were made once. The
# price is that a batch is gone when the next ones are drawn.

# %%
#| export
class DrawnBatches:
    """Memory for batches that are drawn together; the next draw overwrites them."""

    def __init__(
        self, dtype: np.dtype, batch_size: int, max_batches: int, device: torch.device
    ) -> None:
        self.rows = np.zeros(max_batches * batch_size, dtype)
        self.batch_size, self.max_batches, self.device = batch_size, max_batches, device
        self.views = self.to_batches(max_batches) if device.type == "cpu" else None

    def to_batches(self, count: int) -> list[Batch]:
        """Turn the first rows into `count` batches of tensors."""
        rows = self.rows[: count * self.batch_size].reshape(count, self.batch_size)
        return [to_batch(part, self.device) for part in rows]

    def draw(self, replay: ReplayBuffer, count: int) -> list[Batch]:
        """Draw `count` batches."""
        size = count * self.batch_size
        replay.sample(size, out=self.rows[:size])
        return self.to_batches(count) if self.views is None else self.views[:count]

    def draw_all(self, replay: ReplayBuffer, count: int) -> Iterator[list[Batch]]:
        """Draw `count` batches, at each turn as many as there is memory for."""
        for start in range(0, count, self.max_batches):
            yield self.draw(replay, min(count - start, self.max_batches))

    def whole(self, first: int, last: int) -> Batch:
        """Return some batches of the last draw as one."""
        return to_batch(self.rows[first * self.batch_size : last * self.batch_size], self.device)

# %%
ring, same = ReplayBuffer(4, dtype, seed=0), ReplayBuffer(4, dtype, seed=0)
for each in (ring, same):
    each.add(numbered([0, 1, 2, 3]))
drawn = DrawnBatches(dtype, batch_size=3, max_batches=8, device=torch.device("cpu"))
first, second = drawn.draw(ring, count=2)
assert torch.cat([first.reward, second.reward]).tolist() == same.sample(6)["reward"].tolist()
assert torch.equal(drawn.whole(1, 2).reward, second.reward)
assert [len(batches) for batches in drawn.draw_all(ring, count=20)] == [8, 8, 4]

# %% [markdown]
# ## What a sample costs
#
# Now the promise: the cost of a draw does not grow with what is stored. Draw batches of 256 from
# rings of CartPole rows with ten thousand to a million rows, and compare two other ways: one array
# per field, and `random.sample` from a `deque`, which many tutorials use. (The deque holds plain
# integers here; what takes its time is finding them.) The sizes take turns, and the figure shows
# medians, so that a busy moment of the machine hits all alike.


# %%
def medians(calls: list[Callable[[], Any]], rounds: int, repeats: int) -> np.ndarray:
    """Return the median time of each call in microseconds; the calls take turns."""
    seconds = np.zeros((rounds, len(calls)))
    for turn in range(rounds):
        for i, call in enumerate(calls):
            call()  # so that the one before has no say in what the cache holds
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            seconds[turn, i] = (time.perf_counter() - start) / repeats
    return 1e6 * np.median(seconds, axis=0)


sizes = [10_000, 30_000, 100_000, 300_000, 1_000_000]
cartpole = transition_dtype(gym.spaces.Box(-1, 1, (4,), np.float32), two)
rng = np.random.default_rng(0)


def full_ring(size: int) -> ReplayBuffer:
    """Return a ring that is full of ones."""
    ring = ReplayBuffer(size, cartpole, seed=0)
    ring.add(np.ones(size, cartpole))
    return ring


def sample_columns(columns: list[np.ndarray]) -> list[np.ndarray]:
    """Draw a batch from one array per field."""
    places = rng.integers(len(columns[0]), size=256)
    return [column.take(places, axis=0) for column in columns]


# %%
rings = [full_ring(size) for size in sizes]
fields = [[ring.rows[name].copy() for name in cartpole.names or ()] for ring in rings]
deques = [deque(range(size)) for size in sizes]
cost = {
    "deque": medians([lambda d=d: random.sample(d, 256) for d in deques], 5, 2),
    "one array per field": medians([lambda f=f: sample_columns(f) for f in fields], 30, 20),
    "ring of rows": medians([lambda r=r: r.sample(256) for r in rings], 30, 20),
}

# %%
figure, ax = plt.subplots()
for color, (name, microseconds) in zip((3, 1, 0), cost.items(), strict=True):
    ax.plot(sizes, microseconds, "o-", color=PALETTE[color], label=name)
    growth = microseconds[-1] / microseconds[0]
    print(f"{name:19s} {microseconds[-1]:8.1f} µs from a million rows, {growth:4.1f} times 10⁴")
ax.set(xscale="log", yscale="log", xlabel="stored transitions", ylabel="µs for a batch of 256")
ax.legend()
plt.show()
assert cost["ring of rows"][-1] < 5 * cost["ring of rows"][0]
assert cost["deque"][-1] > 5 * cost["deque"][0]

# %% [markdown]
# The ring is almost flat. What is left is the cache: ten thousand rows of 56 bytes fit into the
# fast memory beside a core, and a million, 56 MB, do not, so that most draws wait for main memory.
# Six arrays wait up to six times as often. A deque is a chain of blocks of 64 entries, and to reach
# its middle one has to walk: the cost grows with the length.
#
# ## n-step returns
#
# A one-step target is one true reward and one guess, the value of the next state. While the guess
# is bad, more truth helps. An n-step target sums n rewards before it guesses:
#
# $$y_t = \underbrace{\sum_{i=0}^{k-1} \gamma^i\, r_{t+i}}_{\texttt{reward}}
# \;+\; \underbrace{\gamma^{k}}_{\texttt{discount}}\; V(s_{t+k}),
# \qquad k = \min(n,\ \text{steps to the end of the episode})$$
#
# A row has a place for all of it: its reward is the sum, its discount is $\gamma^k$, its next
# observation is $s_{t+k}$. An update that handles one-step rows handles n-step rows without
# knowing it. Three things can happen to a window:
#
# | step $t + i$ is | the window of step $t$ | $V$ counts? |
# |---|---|---|
# | an ordinary one | grows, and is complete after n steps | yes, with $\gamma^n$ |
# | terminated | is complete, however short | no: `terminated` is true |
# | truncated | is complete, however short | yes, with $\gamma^k$ of the $k$ steps taken |
#
# **By hand**, $n = 3$ and $\gamma = \tfrac12$, one episode with the rewards 1, 2, 4, 8 in the
# states 0, 1, 2, 3; it ends in state 4.
#
# - From state 0: $1 + \tfrac12 \cdot 2 + \tfrac14 \cdot 4 = 3$, then $\tfrac18$ of the value of
#   state 3. Complete at the third step.
# - From state 1: $2 + \tfrac12 \cdot 4 + \tfrac14 \cdot 8 = 6$, then $\tfrac18$ of state 4.
# - From state 2: $4 + \tfrac12 \cdot 8 = 8$, then $\tfrac14$ of state 4: the end cut it short.
# - From state 3: $8$, then $\tfrac12$ of state 4.
#
# The last three are complete at the fourth step, the end. If it was a termination, state 4 has no
# value, and all three rows say so. If it was a truncation, its value counts.
#
# First the memory: one window for each of the last n steps of each environment, in a ring again. It
# can forget, and be stored and loaded with an agent. This runs at every step, so it is kept short.
# The sums, which all change at each step, lie side by side, and go into the rows when those leave. The
# discounts depend on the age of a window alone, so they stand in a table, one row for each place at
# which the newest step may lie. And NumPy copies a row field by field, but the same row, seen as so
# many bytes, in one go.

# %%
#| export
class NStepWindows:
    """The windows of the last n steps of a batch of environments."""

    def __init__(self, n: int, gamma: float, num_envs: int, dtype: np.dtype) -> None:
        self.gamma = gamma
        self.pending = np.zeros((n, num_envs), dtype)  # the windows of the last n steps, a ring
        self.bytes = self.pending.view(np.dtype((np.void, dtype.itemsize)))  # the same memory
        self.fields = {name: self.pending[name] for name in dtype.names or ()}  # views
        self.reward = np.zeros((n, num_envs), np.float32)  # apart, since all change at each step
        powers = np.cumprod(np.full(n, gamma, np.float32), dtype=np.float32)
        ages = np.subtract.outer(np.arange(n), np.arange(n)) % n  # (place of the newest, place)
        self.discounts = powers[ages][:, :, None]  # after a step more than the age
        self.complete = powers[-1]  # that of a window of n steps
        self.waiting = np.zeros((n, num_envs), dtype=bool)  # not handed out yet
        self.newest = 0  # the place of the last step in the ring

    def start(self, rows: np.ndarray) -> None:
        """Let the windows of a new step begin."""
        self.newest = (self.newest + 1) % len(self.waiting)
        self.bytes[self.newest], self.waiting[self.newest] = rows.view(self.bytes.dtype), True
        self.reward[self.newest] = rows["reward"]

    def write_back(self) -> None:
        """Put sums and discounts into the rows of all windows."""
        self.fields["reward"][:] = self.reward
        self.fields["discount"][:] = self.discounts[self.newest]

    def forget(self, episode_start: np.ndarray) -> None:
        """Drop what waits where a new episode starts: the end of the old one was not seen."""
        if np.count_nonzero(episode_start):
            self.waiting[:, episode_start] = False

    def state_dict(self) -> dict[str, Any]:
        """Return the steps that still wait for their return."""
        self.write_back()
        return {
            "pending": torch.from_numpy(self.pending.view(np.uint8)),
            "waiting": torch.from_numpy(self.waiting),
            "newest": self.newest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over stored waiting steps."""
        pending = state["pending"].cpu().numpy().view(self.pending.dtype)
        if pending.shape != self.pending.shape:
            raise ValueError(f"Steps of {pending.shape} were stored, not {self.pending.shape}.")
        self.pending[:], self.waiting[:] = pending, state["waiting"].cpu().numpy()
        self.reward[:] = pending["reward"]
        self.newest = state["newest"]

# %% [markdown]
# The accumulator adds each new reward to all windows at once. What is handed out is marked, and
# handed out only once. Most steps end no episode, and then only the oldest windows need a look.

# %%
#| export
class NStepAccumulator(NStepWindows):
    """Turns one-step rows of a batch of environments into n-step rows, never across an end."""

    def add(self, rows: np.ndarray, truncated: np.ndarray) -> np.ndarray:
        """Take one step of each environment and return the rows whose return is now complete."""
        n = len(self.waiting)
        if n == 1:  # a one-step return is complete at once
            return rows
        self.reward += self.discounts[self.newest] * rows["reward"]
        self.start(rows)
        ended = rows["terminated"] | truncated
        if np.count_nonzero(ended):  # quicker than `any`
            return self.finish(rows, ended)
        oldest = (self.newest + 1) % n  # n steps complete these, and none of them saw an end
        ready = self.waiting[oldest]
        fields = self.fields
        fields["reward"][oldest], fields["discount"][oldest] = self.reward[oldest], self.complete
        fields["next_obs"][oldest] = rows["next_obs"]
        complete = self.bytes[oldest][ready].view(rows.dtype)
        ready[:] = False
        return complete

    def finish(self, rows: np.ndarray, ended: np.ndarray) -> np.ndarray:
        """Return all windows of episodes that ended, and those that n steps complete."""
        oldest = (self.newest + 1) % len(self.waiting)
        ready = self.waiting & ended
        ready[oldest] = self.waiting[oldest]
        self.write_back()
        self.fields["next_obs"][:] = rows["next_obs"]  # a window that goes on gets a later one
        self.fields["terminated"][:] = rows["terminated"]
        self.waiting ^= ready
        return self.bytes[ready].view(rows.dtype)


# %%
counting = gym.spaces.Box(0, 4, (), np.float32)  # the observation is the number of the state
state_dtype = transition_dtype(counting, two)


def play_by_hand(terminated: bool) -> list[list[tuple[float, ...]]]:
    """Play the episode above; return (state, reward, discount, next state, terminated) by step."""
    accumulator = NStepAccumulator(3, 0.5, num_envs=1, dtype=state_dtype)
    handed_out = []
    for state, reward in enumerate([1, 2, 4, 8]):
        last = np.array([state == 3])
        rows = make_rows(
            state_dtype,
            obs=np.array([state]),
            action=np.array([0]),
            reward=np.array([reward]),
            next_obs=np.array([state + 1]),
            terminated=last & terminated,
            discount=0.5,
        )
        done = accumulator.add(rows, truncated=last & (not terminated))
        columns = [done[name].tolist() for name in ("obs", "reward", "discount", "next_obs")]
        handed_out.append(sorted(zip(*columns, done["terminated"].tolist(), strict=True)))
    return handed_out


for step, done in enumerate(play_by_hand(terminated=True)):
    print(f"step {step}: {done}")
by_hand = [(1, 6, 1 / 8, 4), (2, 8, 1 / 4, 4), (3, 8, 1 / 2, 4)]
for terminated in (True, False):
    first = [(0, 3, 1 / 8, 3, False)]
    end = [(*row, terminated) for row in by_hand]
    assert play_by_hand(terminated) == [[], [], first, end]

# %% [markdown]
# ## What n buys
#
# Nineteen states stand in a line. A walker starts in the middle and goes left or right by chance;
# off the right end it earns 1, off the left end −1, and both ends terminate. The true values are
# known: a tenth for each state right of the middle, minus a tenth for each state left of it. Two
# hundred walkers learn a table each, side by side, all zeros at first. How fast does the error
# fall?


# %%
walkers, true_values = 200, np.arange(-9, 10) / 10  # of the states 1 to 19
table_dtype = transition_dtype(gym.spaces.MultiDiscrete([walkers, 21]), two)


def learn_walk(n: int, seed: int, steps: int = 600, rate: float = 0.2) -> np.ndarray:
    """Return the mean error of the tables after each step of all walkers."""
    rng, who = np.random.default_rng(seed), np.arange(walkers)
    accumulator = NStepAccumulator(n, 1.0, walkers, table_dtype)
    values, state, errors = np.zeros((walkers, 21)), np.full(walkers, 10), []
    for _ in range(steps):
        next_state = state + rng.choice([-1, 1], size=walkers)
        ended = (next_state == 0) | (next_state == 20)
        rows = make_rows(
            table_dtype,
            obs=np.stack([who, state], axis=1),
            action=np.zeros(walkers),
            reward=np.where(ended, np.sign(next_state - 10), 0),
            next_obs=np.stack([who, next_state], axis=1),
            terminated=ended,
            discount=1.0,
        )
        done = accumulator.add(rows, truncated=np.zeros(walkers, dtype=bool))
        at, to = tuple(done["obs"].T), tuple(done["next_obs"].T)
        target = done["reward"] + done["discount"] * ~done["terminated"] * values[to]
        np.add.at(values, at, rate * (target - values[at]))
        state = np.where(ended, 10, next_state)
        errors.append(np.sqrt(((values[:, 1:20] - true_values) ** 2).mean(axis=1)).mean())
    return np.array(errors)


error = {n: learn_walk(n, seed=0) for n in (1, 2, 4, 8, 16)}
figure, ax = plt.subplots()
for color, (n, curve) in zip(PALETTE, error.items(), strict=False):
    ax.plot(curve, color=color, label=f"n = {n}")
ax.set(xlabel="steps of each walker", ylabel="error of the table (root mean square)", ylim=0)
ax.legend(ncols=2)
plt.show()
assert error[8][-1] < error[4][-1] < error[2][-1] < error[1][-1]
assert error[16][-1] > error[8][-1]

# %% [markdown]
# Each curve is the mean over 200 walkers. With $n = 1$ the news from an end creeps inwards by one
# state per visit, with $n = 8$ it jumps eight. But a long window also collects the chance of eight
# steps: $n = 16$ is as fast at first, then stays above. How much n is good depends on the task, so
# it is a setting.
#
# ## Stop and go on
#
# A run that is stopped and resumed must draw the same batches as one that was not. So the state of
# a ring is its rows, its position and its generator. The rows are a view of the live ring and not a
# copy, since a copy of a large ring may not fit into memory: write the state to a file before you
# add another row. ([Checkpoints](checkpoint.ipynb) does that well.)

# %%
ring = ReplayBuffer(1_000, dtype, seed=0)
ring.add(numbered(np.arange(1_500)))
ring.sample(64)

file = io.BytesIO()
torch.save(ring.state_dict(), file)
file.seek(0)
resumed = ReplayBuffer(1_000, dtype, seed=99)
resumed.load_state_dict(torch.load(file, weights_only=True))
for step in range(1_500, 2_700):  # far enough to wrap around
    assert (ring.sample(64) == resumed.sample(64)).all()
    ring.add(numbered([step]))
    resumed.add(numbered([step]))
print("1,200 batches are the same, row by row")

# %% [markdown]
# The accumulator's state is its waiting steps, and goes on in the same way.

# %%
rewards, never = np.random.default_rng(0).normal(size=40), np.array([False])
left, right = (NStepAccumulator(5, 0.9, 1, dtype) for _ in range(2))
for reward in rewards[:17]:
    left.add(numbered([reward]), never)
right.load_state_dict(left.state_dict())
for reward in rewards[17:]:
    assert (left.add(numbered([reward]), never) == right.add(numbered([reward]), never)).all()

# %% [markdown]
# ## Honest edges
#
# - An observation is stored twice, as `next_obs` of one row and as `obs` of the next. Mnih et al.
#   store each frame once and put stacks together when they sample. For vectors the second copy is
#   cheap, and it keeps the true last observation of every episode without a special case. For
#   images it doubles the memory.
# - n-step rewards in the ring were earned by an older policy, and nothing corrects for that. With
#   small n that works well in practice, and Fedus et al. (2020) find it to be what makes large
#   buffers pay, but the theory of Q-learning covers $n = 1$ only.
# - Draws are uniform. Drawing surprising rows more often is another buffer, not this one.
# - 64-bit observations are rounded to 32 bits on their way in.
# - A stored ring goes back only into a ring of the same capacity.
#
# ## Exercises
#
# **Exercise 1.** Draws are with replacement, so a batch can hold a row twice. How likely is that
# for a batch of 64 from 50,000 rows? Find a formula and check it by drawing.

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# All 64 differ with probability
# $\prod_{i=0}^{63} (1 - i / 50000) \approx e^{-64 \cdot 63 / (2 \cdot 50000)} \approx 0.96$, so
# about 4 % of the batches hold a row twice. Such a row counts double in one gradient, which is no
# bias: over many batches every row still counts the same.
#
# ```python
# ring = ReplayBuffer(50_000, dtype, seed=0)
# ring.add(numbered(np.arange(50_000)))
# twice = np.mean([len(np.unique(ring.sample(64)["reward"])) < 64 for _ in range(5_000)])
# exact = 1 - np.prod(1 - np.arange(64) / 50_000)
# assert abs(twice - exact) < 0.015
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** An agent makes one update with a batch of 64 after every 4 environment steps, and
# its ring is full. How often is a transition used before it is overwritten, and how likely is it
# never to be used at all? Does the size of the ring matter?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# A row stays for `capacity` steps, in which `capacity / 4` batches are drawn, each hitting it
# $64 / \text{capacity}$ times on average: 16 uses, whatever the capacity. The number of uses is
# nearly Poisson, so the chance of none is $e^{-16} \approx 10^{-7}$. The size of the ring decides
# how long these 16 uses are spread out, that is how old a row can be when it is used.
#
# ```python
# rng, uses = np.random.default_rng(0), np.zeros(1_000, int)
# for _ in range(1_000 // 4):  # the updates during the life of a row in a ring of 1,000
#     np.add.at(uses, rng.integers(1_000, size=64), 1)
# assert uses.mean() == 16
# assert abs(np.mean(uses < 10) - 0.0433) < 0.03  # what Poisson's law says of fewer than ten uses
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** Remove `align=True` from `transition_dtype` and run the chapter. Which cell fails
# first, and why? How many bytes does the alignment cost per CartPole row?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# First the asserts on the sizes of rows. Take those away, and `to_batch` fails: *given numpy array
# strides not a multiple of the element byte size*. A packed CartPole row has 16 + 16 + 8 + 4 + 4 + 1 = 49 bytes, so from one row to the next it is 12¼ floats,
# and a tensor counts its strides in whole elements. Alignment makes the row 56 bytes long: 7 bytes
# more.
#
# ```python
# import gymnasium as gym
#
# row = transition_dtype(gym.spaces.Box(-1, 1, (4,), np.float32), gym.spaces.Discrete(2))
# packed = np.dtype([(name, row[name]) for name in row.names])
# assert (packed.itemsize, row.itemsize) == (49, 56)
# ```
#
# </details>

# %% [markdown]
# **Exercise 4, a planted bug.** Somebody wrote a shorter `load_state_dict`. Every reward in this
# environment is 1. The buffer is saved when it is half full and loaded again, 400 more rows come
# in, and then the mean reward of a large sample is not 1. Nothing crashed. What went wrong, and
# would you have seen it in a run?


# %%
class ShortBuffer(ReplayBuffer):
    """A replay buffer with a bug."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a stored ring."""
        rows = state["rows"].numpy().view(self.rows.dtype)
        self.size = len(rows)
        self.rows[: self.size] = rows
        self.generator.bit_generator.state = state["generator"]


before = ShortBuffer(1_000, dtype, seed=0)
before.add(numbered(np.ones(500)))
after = ShortBuffer(1_000, dtype, seed=0)
after.load_state_dict(before.state_dict())
after.add(numbered(np.ones(400)))
print(f"{len(after)} rows, mean reward {after.sample(100_000)['reward'].mean():.2f}")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The position is not restored. It is 0 again, so the 400 new rows overwrite the first 400, while
# the size grows from 500 to 900: the places 500 to 899 were never written and hold zeros. Four
# ninths of all draws are rows of zeros, observation, action and reward alike, and the agent learns
# that nothing follows from nothing. In a run you would see a dip after each resume, and blame the
# learning rate. A test that compares the batches of a resumed buffer with those of one that was
# never stopped finds it at once, if it goes on to **add** rows after loading.
#
# ```python
# class ShortBuffer(ReplayBuffer):
#     """A replay buffer without the bug."""
#
#     def load_state_dict(self, state: dict[str, Any]) -> None:
#         """Take over a stored ring."""
#         rows = state["rows"].numpy().view(self.rows.dtype)
#         self.size, self.position = len(rows), state["position"]
#         self.rows[: self.size] = rows
#         self.generator.bit_generator.state = state["generator"]
#
# resumed = ShortBuffer(1_000, dtype, seed=0)
# resumed.load_state_dict(before.state_dict())
# resumed.add(numbered(np.ones(400)))
# assert resumed.position == 900
# assert (resumed.sample(1_000)["reward"] == 1).all()
# ```
#
# </details>

# %% [markdown]
# **Exercise 5.** A careless accumulator stores the discount $\gamma^n$ in every row, also in those
# that a truncation cut short. Take the reward 1 in every step for ever, $\gamma = 0.9$, $n = 5$,
# and an episode that is truncated. What target does the second last step get, with the true value
# of every state as $V$? What should it be?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The true value is $1 / (1 - 0.9) = 10$. Two steps are left, so the sum of rewards is 1.9, and the
# right target is $1.9 + 0.9^2 \cdot 10 = 10$. With $\gamma^5$ it is $1.9 + 0.59 \cdot 10 = 7.8$:
# the careless agent learns that the world ends when its time limit is near.
#
# ```python
# gamma, value = 0.9, 10
# assert abs(1 + gamma + gamma**2 * value - 10) < 1e-9  # right
# assert abs(1 + gamma + gamma**5 * value - 7.8) < 0.01  # careless
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# ```python
# from rlbook.replay import ReplayBuffer, make_rows, to_batch, transition_dtype
#
# replay = ReplayBuffer(100_000, transition_dtype(env.observation_space, env.action_space), seed=0)
# replay.add(make_rows(replay.rows.dtype, obs=obs, action=action, reward=reward, next_obs=next_obs,
#                      terminated=terminated, discount=0.99))
# batch = to_batch(replay.sample(64), torch.device("cpu"))
# ```
#
# In the shell, capacity and n are settings of each agent that has a replay buffer:
#
# ```
# rlbook train dqn --buffer-size 100000 --n-step 3 --run-dir runs/a
# ```
#
# ## References
#
# - L.-J. Lin (1992). Self-improving reactive agents based on reinforcement learning, planning and
#   teaching. *Machine Learning* 8.
# - V. Mnih et al. (2015). Human-level control through deep reinforcement learning. *Nature* 518.
# - R. S. Sutton (1988). Learning to predict by the methods of temporal differences. *Machine
#   Learning* 3.
# - R. S. Sutton and A. G. Barto (2018). *Reinforcement Learning: An Introduction*, chapter 7. The
#   walk over nineteen states is theirs.
# - W. Fedus et al. (2020). Revisiting fundamentals of experience replay. *ICML*.
