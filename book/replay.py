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
# A table can learn from each step once, in the order in which the steps come. A network that does
# so learns badly: neighbouring steps are nearly the same, and each update also changes what it
# learned about other states. In this chapter you build the replay buffer, which helps with both.
# It keeps the last transitions, each new one overwriting the oldest, and samples batches from them
# at random. You also build n-step returns, which sum several rewards before they bootstrap, and
# the settings that all agents with a replay buffer share.
#
# | | |
# |---|---|
# | Papers | Lin (1992): replay; Mnih et al. (2015): replay in DQN; Sutton (1988): n steps |
# | You need | NumPy, PyTorch tensors, and the difference between `terminated` and `truncated` from [Environments](envs.ipynb) |
# | Same as in most libraries | a preallocated circular buffer, uniform sampling with replacement |
# | Different | a transition is one element of a structured array; the buffer owns its generator |

# %% tags=["hide-input"]
#| export
from dataclasses import dataclass
from typing import Any, Self

import gymnasium as gym
import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlbook.settings import Config

# %% tags=["hide-input"]
import io

import matplotlib.pyplot as plt

import rlbook.replay as finished
from rlbook.figures import PALETTE, use_style

use_style()
box, two = gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(2)


def numbered(numbers: Any) -> np.ndarray:
    """Return transitions that can be told apart: the reward of each is its number."""
    transitions = np.zeros(len(numbers), finished.transition_dtype(box, two))
    transitions["reward"] = numbers
    return transitions


# %% [markdown]
# This is what you will have built. On the left is a buffer with room for 24 transitions after it has
# taken 30: the last six have overwritten the first six. On the right an agent samples 20 transitions
# after every 25th step from a buffer of 1,000. The age of a transition is the number of steps since it
# was stored. A sample can have any age up to that of the oldest transition in the buffer, and every age
# is equally likely.

# %% tags=["hide-input"]
def draw_ring(ax: Any, buffer: finished.ReplayBuffer, now: int) -> None:
    """Draw a circular buffer, coloured by age, with the numbers of its transitions."""
    capacity = len(buffer.storage)
    angle = np.pi / 2 - 2 * np.pi * (np.arange(capacity) + 0.5) / capacity
    age = now - buffer.storage["reward"]
    colors = plt.get_cmap("viridis_r")(age / age.max())
    ax.bar(angle, 0.45, 2 * np.pi / capacity, bottom=1, color=colors, edgecolor="white")
    for index in range(capacity):
        number = int(buffer.storage["reward"][index])
        color = "white" if age[index] > 0.45 * age.max() else "black"
        ax.text(angle[index], 1.22, number, ha="center", va="center", fontsize=8, color=color)
    here = np.pi / 2 - 2 * np.pi * buffer.position / capacity
    arrow = {"arrowstyle": "-|>", "color": PALETTE[3], "linewidth": 1.8}
    ax.annotate("", (here, 1.0), (here, 0.5), arrowprops=arrow)
    ax.text(0, 0, "the next\ntransition\ngoes here", ha="center", va="center", fontsize=9)
    ax.set(ylim=(0, 1.5), title="a buffer of 24 after 30 transitions")
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
ax.plot(oldest, color="black", linewidth=1, label="oldest in the buffer")
ax.plot(oldest / 2, color="black", linewidth=1, linestyle="--", label="mean age of a sample")
ax.set(xlabel="environment steps", ylabel="age of a sampled transition (steps)", ylim=(0, 1_300))
ax.set_title("what is sampled from a buffer of 1,000")
ax.legend(loc="upper right", ncols=2)
plt.show()

# %% [markdown]
# ## The problem: neighbours look alike
#
# Let a random policy play CartPole for 10,000 steps and write down the angle of the pole. How much does
# one angle tell about the angle $k$ steps later? The autocorrelation measures this; 1 means everything
# and 0 nothing:
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
drawn = np.random.default_rng(0).choice(angles, size=len(angles))  # as from a buffer
assert autocorrelation(angles, 1) > 0.8
assert abs(autocorrelation(drawn, 1)) < 0.1

# %% [markdown]
# What does that do to a gradient, which is a mean over a batch? As a stand-in for the gradient, take
# the angle: how noisy is its mean over a batch? The mean of $B$ independent values has $1/B$ of the
# variance of one value. So the variance of one value, divided by the variance of the batch mean, is
# the number of independent values that the batch is worth.


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
# A batch of 32 neighbours is worth about 3 independent steps; 32 random draws are worth 32, up to
# chance. That is the first reason for replay. The second is that a batch also holds old states,
# so an update spoils less of what the network knows about them. The third is that each step is
# used many times, and steps in an environment are often what costs most. Old steps may be used
# because Q-learning is off-policy ([Basics](basics.ipynb)): its target does not depend on the
# policy that took the step. SARSA could not learn from them.
#
# ## A transition
#
# What one update needs to know about one step is small and fixed: the observation, the action, the
# reward, the next observation, whether the episode terminated there, and the factor by which the value
# of the next observation counts, its discount. For now that is $\gamma$; with n-step returns, below, it
# is $\gamma^k$ for $k$ steps. A NumPy *structured array* keeps all six fields of a transition side by
# side, so one indexing operation gathers a whole batch.
#
# First the type of a single field. Floats are stored with 32 bits, which is what networks compute
# with. Everything else keeps its type. An image stays in bytes, because as floats it would take four
# times the memory and hold no more information.

# %%
#| export
def storage_dtype(space: gym.Space) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the type and shape in which values of `space` are stored: images stay bytes."""
    if space.dtype is None or space.shape is None:
        raise ValueError(f"A replay buffer stores arrays of numbers, and {space} is not one array.")
    if isinstance(space, gym.spaces.Discrete):
        return np.dtype(np.int64), ()  # PyTorch indexes with int64
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
# Now the whole transition. `align=True` puts each number at a multiple of its own size, which PyTorch
# needs to view a field as a tensor without copying it (exercise 3).

# %%
#| export
def transition_dtype(observation_space: gym.Space, action_space: gym.Space) -> np.dtype:
    """Describe one transition as an element of a structured array."""
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
# By hand: two observations of 2 floats are 16 bytes, an action 8, reward and discount 8, the flag 1,
# together 33; rounded up to a multiple of 8, the size of the action, that makes 40 bytes. The cell
# prints at which byte each field starts.

# %%
dtype = transition_dtype(box, two)
print({name: offset for name, (_, offset, *_) in (dtype.fields or {}).items()})
assert dtype.itemsize == 40

# %% [markdown]
# A million transitions of an Atari game, each with two observations of four grey images of 84 × 84
# pixels, as bytes and as floats:

# %%
atari = transition_dtype(image, gym.spaces.Discrete(18)).itemsize
floats = transition_dtype(gym.spaces.Box(0, 1, image.shape), gym.spaces.Discrete(18)).itemsize
print(f"{atari / 1e3:.0f} GB as bytes, {floats / 1e3:.0f} GB as floats")
assert atari == 2 * 84 * 84 * 4 + 24 and floats > 3.9 * atari

# %% [markdown]
# One step of several environments becomes one transition for each.

# %%
#| export
def make_transitions(
    dtype: np.dtype,
    *,
    obs: np.ndarray,
    action: np.ndarray,
    reward: np.ndarray,
    next_obs: np.ndarray,
    terminated: np.ndarray,
    discount: float | np.ndarray,
) -> np.ndarray:
    """Put one step of several environments into a structured array, one element each."""
    new = np.zeros(len(reward), dtype)  # (num_envs,)
    new["obs"], new["next_obs"], new["action"] = obs, next_obs, action
    new["reward"], new["discount"], new["terminated"] = reward, discount, terminated
    return new


# %% [markdown]
# By hand, two environments: the first earns 1 and goes on, the second earns −1 and terminates.

# %%
transitions = make_transitions(
    dtype,
    obs=np.array([[0.0, 0.1], [0.2, 0.3]]),
    action=np.array([1, 0]),
    reward=np.array([1.0, -1.0]),
    next_obs=np.array([[0.4, 0.5], [0.6, 0.7]]),
    terminated=np.array([False, True]),
    discount=0.99,
)
print(transitions[1])
assert transitions.shape == (2,) and transitions["obs"].shape == (2, 2)
assert transitions["reward"].tolist() == [1, -1]
assert transitions["terminated"].tolist() == [False, True]
assert np.allclose(transitions[1]["next_obs"], [0.6, 0.7])

# %% [markdown]
# ## The circular buffer
#
# Room for `capacity` transitions is reserved at the start. A new transition goes to the index
# `position`, which then moves on by one, and after the last index comes the first:
#
# $$\text{index of the } i\text{-th new transition} = (\text{position} + i) \bmod \text{capacity}$$
#
# So once the buffer is full, the newest transition overwrites the oldest, and nothing is ever moved.
# Sampling draws random indices and gathers the transitions there.
#
# By hand, with room for four: after the transitions 0, 1, 2 the position is 3. Then 3, 4, 5 arrive
# together. Transition 3 goes to index 3, transition 4 wraps around to index 0, and transition 5 goes to
# index 1: they overwrite the transitions 0 and 1. The buffer holds `4 5 2 3`, and the next transition
# goes to index 2, where the oldest one is. (In the test below, `numbered` makes transitions whose
# reward is their number.)

# %%
#| export
def check_stored(storage: np.ndarray, state: dict[str, Any]) -> None:
    """Raise unless a stored buffer has the fields and the capacity of this one."""
    for name, here in (("dtype", storage.dtype.descr), ("capacity", len(storage))):
        if state[name] != here:
            stored = f"The stored replay buffer has the {name} {state[name]}"
            raise ValueError(f"{stored}, this one {here}.")


class ReplayBuffer:
    """A circular buffer of the last `capacity` transitions, sampled uniformly."""

    def __init__(self, capacity: int, dtype: np.dtype, seed: int) -> None:
        if capacity < 1:
            raise ValueError(f"A replay buffer needs room for one transition, not {capacity}.")
        self.storage = np.zeros(capacity, dtype)
        self.position = 0  # where the next transition goes
        self.size = 0
        self.generator = np.random.default_rng(seed)

    def __len__(self) -> int:
        return self.size

    def add(self, transitions: np.ndarray) -> None:
        """Store transitions; the oldest ones are overwritten."""
        capacity = len(self.storage)
        indices = np.arange(self.position, self.position + len(transitions)) % capacity
        self.storage[indices] = transitions
        self.position = (self.position + len(transitions)) % capacity
        self.size = min(self.size + len(transitions), capacity)

    def sample(self, batch_size: int) -> np.ndarray:
        """Draw transitions uniformly, with replacement."""
        if self.size == 0:
            raise ValueError("The replay buffer is empty: add transitions before you sample.")
        return self.storage[self.generator.integers(self.size, size=batch_size)]

    def state_dict(self) -> dict[str, Any]:
        """Return the filled part of the storage, without a copy, and the generator's state."""
        return {
            "storage": torch.from_numpy(self.storage[: self.size].view(np.uint8)),
            "dtype": self.storage.dtype.descr,
            "capacity": len(self.storage),
            "position": self.position,
            "generator": self.generator.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a stored buffer: the samples go on as if nothing had happened."""
        check_stored(self.storage, state)
        stored = state["storage"].cpu().numpy().view(self.storage.dtype)
        self.size, self.position = len(stored), state["position"]
        self.storage[: self.size] = stored
        self.generator.bit_generator.state = state["generator"]


# %%
ring = ReplayBuffer(4, dtype, seed=0)
ring.add(numbered([0, 1, 2]))
assert len(ring) == 3 and ring.position == 3
ring.add(numbered([3, 4, 5]))
assert ring.storage["reward"].tolist() == [4, 5, 2, 3]
assert len(ring) == 4 and ring.position == 2
ring.add(numbered(range(100, 110)))  # more than there is room for: the last four stay
assert sorted(ring.storage["reward"]) == [106, 107, 108, 109]
print(ring.sample(8)["reward"])

# %% [markdown]
# The first figure said that all ages are equally likely. A buffer of 1,000 holds the ages 0 to 999,
# whose mean is 499.5:

# %%
ring = ReplayBuffer(1_000, dtype, seed=0)
ring.add(numbered(np.arange(3_456)))
ages = 3_455 - ring.sample(100_000)["reward"]
print(f"ages from {ages.min():.0f} to {ages.max():.0f}, mean {ages.mean():.1f}")
assert ages.min() == 0 and ages.max() == 999
assert abs(ages.mean() - 499.5) < 6

# %% [markdown]
# ## From transitions to tensors
#
# Up to here everything was NumPy. This is the one place where arrays become tensors and a batch moves
# to the device. On a CPU no number is copied: each tensor is a view of a field.

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


def to_batch(transitions: np.ndarray, device: torch.device) -> Batch:
    """View the fields of transitions as tensors; on a CPU nothing is copied."""
    names = transitions.dtype.names or ()
    return Batch(**{name: torch.from_numpy(transitions[name]).to(device) for name in names})


# %%
batch = to_batch(transitions, torch.device("cpu"))
assert batch.reward.tolist() == [1, -1] and batch.obs.shape == (2, 2)
transitions["reward"][0] = 5
assert batch.reward[0] == 5  # the same memory

# %% [markdown]
# ## n-step returns
#
# A one-step target is one true reward and one guess, the value of the next state. While the guess
# is bad, more truth helps. An n-step target sums n rewards before it guesses:
#
# $$y_t = \underbrace{\sum_{i=0}^{k-1} \gamma^i\, r_{t+i}}_{\texttt{reward}}
# \;+\; \underbrace{\gamma^{k}}_{\texttt{discount}}\; V(s_{t+k}),
# \qquad k = \min(n,\ \text{steps to the end of the episode})$$
#
# A transition has a field for each part: its reward is the sum, its discount is $\gamma^k$, its
# next observation is $s_{t+k}$. So the same update works for one-step and n-step transitions. Call
# the steps whose rewards a target sums its *window*. Three things can happen to it:
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
# value, and all three transitions say so. If it was a truncation, its value counts.
#
# The accumulator keeps one window for each of the last $n$ steps of each environment. At each step it
# adds the discounted reward to every window and replaces its next observation by the newest one. Then
# it opens a window for the new step. A window is complete after $n$ steps, or when its episode ends,
# and a copy of it is returned once. Windows that were already returned change too, but nobody reads
# them. Each call of `learn` may start new episodes, and then the last ones of the call before stopped
# without a flag. `drop` discards their open windows, which would otherwise collect the rewards of the
# next episode.

# %%
#| export
class NStepAccumulator:
    """Turns single steps of several environments into n-step transitions, never across an end."""

    def __init__(self, n: int, gamma: float, num_envs: int, dtype: np.dtype) -> None:
        self.n, self.gamma = n, gamma
        self.windows = np.zeros((n, num_envs), dtype)  # of the last n steps, a circular buffer
        self.waiting = np.zeros((n, num_envs), dtype=bool)  # not returned yet
        self.newest = 0  # the index of the last step

    def add(self, step: np.ndarray, truncated: np.ndarray) -> np.ndarray:
        """Take one step of each environment; return the transitions that it completes."""
        if self.n == 1:
            return step
        windows = self.windows
        windows["reward"] += windows["discount"] * step["reward"]
        windows["discount"] *= np.float32(self.gamma)
        windows["next_obs"], windows["terminated"] = step["next_obs"], step["terminated"]
        self.newest = (self.newest + 1) % self.n
        windows[self.newest], self.waiting[self.newest] = step, True
        oldest = (self.newest + 1) % self.n
        complete = self.waiting & (step["terminated"] | truncated)
        complete[oldest] = self.waiting[oldest]
        self.waiting &= ~complete
        return windows[complete]

    def drop(self, episode_start: np.ndarray) -> None:
        """Drop the windows of an episode whose end was never seen: a new one starts."""
        self.waiting[:, episode_start] = False

    def state_dict(self) -> dict[str, Any]:
        """Return the windows that wait."""
        return {
            "windows": torch.from_numpy(self.windows.view(np.uint8)),
            "waiting": torch.from_numpy(self.waiting),
            "newest": self.newest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over stored windows."""
        windows = state["windows"].cpu().numpy().view(self.windows.dtype)
        if windows.shape != self.windows.shape:
            raise ValueError(f"Windows of {windows.shape} were stored, not {self.windows.shape}.")
        self.windows[:], self.waiting[:] = windows, state["waiting"].cpu().numpy()
        self.newest = state["newest"]


# %%
counting = gym.spaces.Box(0, 4, (), np.float32)  # the observation is the number of the state
state_dtype = transition_dtype(counting, two)


def play_by_hand(terminated: bool) -> list[list[tuple[float, ...]]]:
    """Play the episode above; return (state, reward, discount, next state, terminated) by step."""
    accumulator = NStepAccumulator(3, 0.5, num_envs=1, dtype=state_dtype)
    handed_out = []
    for state, reward in enumerate([1, 2, 4, 8]):
        last = np.array([state == 3])
        step = make_transitions(
            state_dtype,
            obs=np.array([state]),
            action=np.array([0]),
            reward=np.array([reward]),
            next_obs=np.array([state + 1]),
            terminated=last & terminated,
            discount=0.5,
        )
        complete = accumulator.add(step, truncated=last & (not terminated))
        columns = [complete[name].tolist() for name in ("obs", "reward", "discount", "next_obs")]
        handed_out.append(sorted(zip(*columns, complete["terminated"].tolist(), strict=True)))
    return handed_out


for step, done in enumerate(play_by_hand(terminated=True)):
    print(f"step {step}: {done}")
by_hand = [(1, 6, 1 / 8, 4), (2, 8, 1 / 4, 4), (3, 8, 1 / 2, 4)]
for terminated in (True, False):
    first = [(0, 3, 1 / 8, 3, False)]
    end = [(*window, terminated) for window in by_hand]
    assert play_by_hand(terminated) == [[], [], first, end]

# %% [markdown]
# ## What n changes
#
# Nineteen states form a line. A walker starts in the middle and goes left or right at random. Beyond
# the right end it gets the reward 1, beyond the left end −1, and both ends terminate. The true values
# are known: 0 in the middle, and a tenth more for each state to the right of it, a tenth less for each
# state to the left. Two hundred walkers each learn a table that starts with zeros. How fast does the
# error fall?


# %%
walkers, true_values = 200, np.arange(-9, 10) / 10  # of the states 1 to 19
table_dtype = transition_dtype(gym.spaces.MultiDiscrete([walkers, 21]), two)  # obs: walker, state


def learn_walk(n: int, seed: int, steps: int = 600, rate: float = 0.2) -> np.ndarray:
    """Return the mean error of the tables after each step of all walkers."""
    rng, who = np.random.default_rng(seed), np.arange(walkers)
    accumulator = NStepAccumulator(n, 1.0, walkers, table_dtype)
    values, state, errors = np.zeros((walkers, 21)), np.full(walkers, 10), []
    for _ in range(steps):
        next_state = state + rng.choice([-1, 1], size=walkers)
        ended = (next_state == 0) | (next_state == 20)
        step = make_transitions(
            table_dtype,
            obs=np.stack([who, state], axis=1),
            action=np.zeros(walkers),
            reward=np.where(ended, np.sign(next_state - 10), 0),
            next_obs=np.stack([who, next_state], axis=1),
            terminated=ended,
            discount=1.0,
        )
        complete = accumulator.add(step, truncated=np.zeros(walkers, dtype=bool))
        at, to = tuple(complete["obs"].T), tuple(complete["next_obs"].T)  # (walker, state), an index
        target = complete["reward"] + complete["discount"] * ~complete["terminated"] * values[to]
        np.add.at(values, at, rate * (target - values[at]))  # counts an index that stands there twice
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
# Each curve is the mean over 200 walkers. With $n = 1$ the reward at an end moves inwards by one
# state per visit. With $n = 8$ it reaches every state of the walker's last eight steps at once. But a
# long window also collects the noise of many steps: $n = 16$ falls as fast at first, but its error
# stays higher. Which n is good depends on the task, so it is a setting of each agent (`n_step` in
# DQN).
#
# ## When to learn
#
# Every agent that learns from replay has the following settings. The first `learning_starts`
# environment steps only fill the buffer. Then, every `train_frequency` environment steps, the agent
# makes `gradient_steps` updates, each with a batch of its own. (Despite its name, which most libraries
# use, `train_frequency` is a period: a larger number means fewer updates.) An environment step is one
# step of one copy of the environment: five copies that step once make five. `Config`
# ([Settings](settings.ipynb)) adds what all agents share, such as `num_envs` and `seed`; a `Field` has
# a default, bounds and a description.

# %%
#| export
class ReplayConfig(Config):
    """The settings that all agents with a replay buffer share."""

    gamma: float = Field(
        default=0.99, ge=0, le=1, description="Discount of a reward one step later."
    )
    batch_size: int = Field(default=64, ge=1, description="Transitions of one update.")
    buffer_size: int = Field(
        default=50_000, ge=1, description="Transitions that the replay buffer holds."
    )
    learning_starts: int = Field(
        default=1_000, ge=0, description="Environment steps before the first update."
    )
    train_frequency: int = Field(
        default=4, ge=1, description="Environment steps from one update to the next."
    )
    gradient_steps: int = Field(default=1, ge=1, description="Updates made each time.")

    @model_validator(mode="after")
    def check_batch_fits(self) -> Self:
        """Raise unless the buffer has room for one batch."""
        if self.batch_size > self.buffer_size:
            raise ValueError(
                f"Setting 'batch_size' ({self.batch_size}) must not exceed 'buffer_size' "
                f"({self.buffer_size})."
            )
        return self


# %% [markdown]
# When several environments step at once, the step count jumps, and one jump can pass several multiples
# of `train_frequency`, or none. By hand: with 3 environments and an update every 2 steps, the steps 3,
# 6, 9, 12 have passed 1, 3, 4, 6 multiples of two, so 1, 2, 1, 2 updates are due.

# %%
#| export
def updates_due(config: ReplayConfig, step: int) -> int:
    """Return how many updates are due once all environments have stepped, up to `step`."""
    if step <= config.learning_starts:
        return 0
    before = (step - config.num_envs) // config.train_frequency
    return (step // config.train_frequency - before) * config.gradient_steps


# %%
three = ReplayConfig(num_envs=3, train_frequency=2, learning_starts=0)
assert [updates_due(three, step) for step in (3, 6, 9, 12)] == [1, 2, 1, 2]
assert updates_due(ReplayConfig(learning_starts=100), 100) == 0

# %% [markdown]
# ## Stop and go on
#
# A run that is stopped and resumed must sample the same batches as one that was not. So the state of
# a buffer is its storage, its position and its generator. `state_dict` returns a view of the storage and
# not a copy, since a copy of a large buffer may not fit into memory. So write it to a file
# ([Checkpoints](checkpoint.ipynb)) before you add another transition.

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
print("1,200 batches are the same, number by number")

# %% [markdown]
# The state of the accumulator is its open windows. It continues in the same way.

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
# - An observation is stored twice, as `next_obs` of one transition and as `obs` of the next. Mnih et al.
#   store each frame once and put stacks together when they sample. For vectors the second copy is
#   cheap, and it keeps the true last observation of every episode without a special case. For
#   images it doubles the memory.
# - n-step rewards in the buffer were earned by an older policy, and nothing corrects for that.
#   With small n this works well in practice, and Fedus et al. (2020) find that n-step returns are
#   what makes larger buffers help. But the theory of Q-learning covers $n = 1$ only.
# - Sampling is uniform. [R2D2](r2d2.ipynb) builds a buffer that samples pieces of episodes with large
#   TD errors more often.
# - 64-bit observations are rounded to 32 bits when they are stored.
# - A stored buffer can be loaded only into one of the same capacity.
#
# ## Exercises
#
# **Exercise 1.** Sampling is with replacement, so a batch can hold a transition twice. How likely is
# that for a batch of 64 from 50,000 transitions? Find a formula and check it by sampling.

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# All 64 differ with probability
# $\prod_{i=0}^{63} (1 - i / 50000) \approx e^{-64 \cdot 63 / (2 \cdot 50000)} \approx 0.96$, so
# about 4 % of the batches hold a transition twice. It counts double in that gradient. This is no
# bias: over many batches every transition still counts the same.
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
# its buffer is full. How often is a transition used before it is overwritten, and how likely is it
# never to be used at all? Does the size of the buffer matter?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# A transition stays for `capacity` steps, in which `capacity / 4` batches are drawn, each hitting it
# $64 / \text{capacity}$ times on average: 16 uses, whatever the capacity. The number of uses is
# nearly Poisson, so the chance of none is $e^{-16} \approx 10^{-7}$. The size of the buffer decides
# over how many steps these 16 uses are spread, that is how old a transition can be when it is used.
#
# ```python
# rng, uses = np.random.default_rng(0), np.zeros(1_000, int)
# for _ in range(1_000 // 4):  # the updates while a transition is in a buffer of 1,000
#     np.add.at(uses, rng.integers(1_000, size=64), 1)
# assert uses.mean() == 16
# assert abs(np.mean(uses < 10) - 0.0433) < 0.03  # what Poisson's law says of fewer than ten uses
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** Remove `align=True` from `transition_dtype` and run the chapter. Which cell fails
# first, and why? How many bytes does the alignment cost per CartPole transition?

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# First the asserts on the sizes. Take those away, and `to_batch` fails: *given numpy array strides not
# a multiple of the element byte size*. A packed CartPole transition has 16 + 16 + 8 + 4 + 4 + 1 = 49
# bytes, so from one to the next it is 12¼ floats, and a tensor counts its strides in whole elements.
# Alignment makes it 56 bytes long: 7 bytes more.
#
# ```python
# import gymnasium as gym
#
# cartpole = transition_dtype(gym.spaces.Box(-1, 1, (4,), np.float32), gym.spaces.Discrete(2))
# packed = np.dtype([(name, cartpole[name]) for name in cartpole.names])
# assert (packed.itemsize, cartpole.itemsize) == (49, 56)
# ```
#
# </details>

# %% [markdown]
# **Exercise 4, a planted bug.** Somebody wrote a shorter `load_state_dict`. Every reward in this
# environment is 1. The buffer is saved when it is half full and loaded again, 400 more transitions
# come in, and then the mean reward of a large sample is not 1. Nothing crashed. What went wrong, and
# would you have seen it in a run?


# %%
class ShortBuffer(ReplayBuffer):
    """A replay buffer with a bug."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a stored buffer."""
        stored = state["storage"].numpy().view(self.storage.dtype)
        self.size = len(stored)
        self.storage[: self.size] = stored
        self.generator.bit_generator.state = state["generator"]


before = ShortBuffer(1_000, dtype, seed=0)
before.add(numbered(np.ones(500)))
after = ShortBuffer(1_000, dtype, seed=0)
after.load_state_dict(before.state_dict())
after.add(numbered(np.ones(400)))
print(f"{len(after)} transitions, mean reward {after.sample(100_000)['reward'].mean():.2f}")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The position is not restored. It is 0 again, so the 400 new transitions overwrite the first 400, while
# the size grows from 500 to 900: the indices 500 to 899 were never written and hold zeros. Four ninths
# of all samples are zeros, observation, action and reward alike, and the agent trains on zeros that no
# step ever produced. In a run you would see a dip after each resume, and blame the learning rate. A
# test that compares the batches of a resumed buffer with those of one that was never stopped finds it
# at once, if it goes on to **add** transitions after loading.
#
# ```python
# class ShortBuffer(ReplayBuffer):
#     """A replay buffer without the bug."""
#
#     def load_state_dict(self, state: dict[str, Any]) -> None:
#         """Take over a stored buffer."""
#         stored = state["storage"].numpy().view(self.storage.dtype)
#         self.size, self.position = len(stored), state["position"]
#         self.storage[: self.size] = stored
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
# **Exercise 5.** A careless accumulator stores the discount $\gamma^n$ in every transition, also in
# those that a truncation cut short. Take the reward 1 in every step for ever, $\gamma = 0.9$, $n = 5$,
# and an episode that is truncated. What target does the second-to-last step get, with the true value of
# every state as $V$? What should it be?

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
# import gymnasium as gym
# import torch
# from rlbook.replay import ReplayBuffer, make_transitions, to_batch, transition_dtype
#
# envs = gym.make_vec("CartPole-v1", num_envs=2)
# dtype = transition_dtype(envs.single_observation_space, envs.single_action_space)
# replay = ReplayBuffer(100_000, dtype, seed=0)
# obs, _ = envs.reset(seed=0)
# action = envs.action_space.sample()
# next_obs, reward, terminated, truncated, _ = envs.step(action)
# replay.add(make_transitions(dtype, obs=obs, action=action, reward=reward,
#                             next_obs=next_obs, terminated=terminated, discount=0.99))
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
