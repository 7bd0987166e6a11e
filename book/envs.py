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
# # Environments
#
# An agent learns from what an environment gives it, and from nothing else. So this chapter comes
# before any algorithm. At its end you have environments that you can name, seed, step side by side
# and measure; five tiny ones whose right answer you know before you start; and two in which an
# agent must remember what it no longer sees. On the way you meet three mistakes that raise no error
# and only make an agent worse: a seed that is used twice, a time limit that is taken for an end,
# and an evaluation that counts the short episodes first. You will measure what each of them costs.
#
# | | |
# |---|---|
# | You need | Python, NumPy, and the idea of a discounted return |
# | You build | seeds, vector environments, an evaluation, seven environments |
# | Same as everywhere | the interface of [Gymnasium](https://gymnasium.farama.org) |
# | Different from most code | where episodes restart, and which ones an evaluation counts |

# %%
#| export
import copy
import difflib
import hashlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from scipy.special import stdtrit

# %% [markdown]
# These are the imports of the module that this chapter exports. The cells that only show something
# need a few more. `finished` is the module itself, as you will have it at the end.

# %%
import itertools
import os
import timeit

import matplotlib.pyplot as plt
import torch
from torch import nn

import rlbook.envs as finished
from rlbook.figures import COLORS, PALETTE, filmstrip, use_style

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame shall draw without a screen
torch.set_num_threads(1)
use_style()

# %% tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(9, 2.5), width_ratios=[1, 1.75])
shown = {
    "CartPole-v1: keep the pole up": finished.make_env("CartPole-v1", render_mode="rgb_array"),
    "rlbook/TMaze-v0: remember the orange cue, turn to the green side": finished.make_env(
        "rlbook/TMaze-v0", render_mode="rgb_array"
    ),
}
for ax, (title, env) in zip(axes, shown.items(), strict=True):
    env.reset(seed=3)
    ax.imshow(env.render())
    ax.set(xticks=[], yticks=[], title=title)
    ax.grid(False)
    ax.spines[:].set(visible=True, color="#BBBBBB")
    env.close()
plt.show()

# %% [markdown]
# ## The loop by hand
#
# An environment has two verbs. `reset` starts an episode and returns the first observation. `step`
# takes an action and returns five things: the next observation, a reward, two flags that say
# whether and how the episode ended, and a dictionary with anything else.
#
# CartPole shows four numbers: the cart's position and velocity, the pole's angle and angular
# velocity. Action 0 pushes the cart to the left, 1 to the right, and each step pays 1. Here is a
# policy of one line: push towards the side to which the pole leans.

# %%
env = gym.make("CartPole-v1")
obs, info = env.reset(seed=0)
episode_return, length, ended = 0.0, 0, False
while not ended:
    action = int(obs[2] > 0)
    obs, reward, terminated, truncated, info = env.step(action)
    episode_return, length = episode_return + float(reward), length + 1
    ended = terminated or truncated
print(f"return {episode_return:.0f} in {length} steps, {terminated = }, {truncated = }")
assert terminated and not truncated and episode_return == length

# %% [markdown]
# The two flags are not two words for one thing.
#
# * `terminated`: the episode is over, because of what happened. The pole fell. No reward can
#   follow, so the value of what comes after is 0.
# * `truncated`: you stopped watching. CartPole does so after 500 steps. The pole still stands, and
#   reward would go on.
#
# The section on truncation shows what it costs to mix them up. Until then, keep them apart.

# %% [markdown]
# ## Making an environment
#
# Gymnasium finds an environment by its id, such as `CartPole-v1`. Ids are typed by people, in a
# shell or in a settings file, so they will be misspelled. Then you want one sentence with the
# nearest name. By hand: of `CartPole-v1` and `Acrobot-v1`, the misspelled `CartPool-v1` is nearest
# to the first, and `Pong` is near to neither.

# %%
#| export
def nearest(name: str, known: Sequence[str]) -> str:
    """Return a blank and a hint like `Did you mean 'CartPole-v1'?`, or nothing if none is close."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""

# %%
assert nearest("CartPool-v1", ["CartPole-v1", "Acrobot-v1"]) == " Did you mean 'CartPole-v1'?"
assert nearest("Pong", ["CartPole-v1", "Acrobot-v1"]) == ""

# %% [markdown]
# `make_env` makes one environment from an id and its keywords. An id may start with a module, as in
# `my_envs:Grid-v0`: that module is imported first, and registers its environments while it is. What
# goes wrong on the way is turned into a `ValueError` that says what to do.

# %%
#| export
def make_env(
    env_id: str, env_kwargs: dict[str, Any] | None = None, render_mode: str | None = None
) -> gym.Env:
    """Make one environment from a Gymnasium id (`module:Name-v0` imports the module first)."""
    module, _, name = env_id.rpartition(":")
    kwargs = dict(env_kwargs or {})
    if render_mode is not None:  # an environment without rendering need not know the keyword
        kwargs["render_mode"] = render_mode
    try:
        if module:
            importlib.import_module(module)
        return gym.make(name, **kwargs)
    except ModuleNotFoundError as error:
        what = f"needs the module {error.name!r}, which is not installed or not on the path"
        raise ValueError(f"Environment {env_id!r} {what}.") from error
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise ValueError(f"Environment {env_id!r} cannot be made here: {error}") from error
    except gym.error.Error as error:
        listed = " `gymnasium.pprint_registry()` lists the known ones."
        hint = nearest(name, list(gym.registry)) or listed
        raise ValueError(f"There is no environment {env_id!r}.{hint}") from error
    except ValueError:
        raise  # the environment's own words
    except Exception as error:
        reason = str(error).partition(" was raised from the environment creator")[0]
        what = f"cannot be made: {type(error).__name__}: {reason}"
        if env_kwargs:
            what = f"does not take the env_kwargs {env_kwargs}: {reason}"
        raise ValueError(f"Environment {env_id!r} {what}.") from error

# %%
assert make_env("CartPole-v1").observation_space.shape == (4,)
assert make_env("CartPole-v1", {"max_episode_steps": 7}).spec.max_episode_steps == 7
for wrong in ("CartPool-v1", "my_envs:Grid-v0"):
    try:
        make_env(wrong)
    except ValueError as error:
        print(error)
try:
    make_env("CartPole-v1", {"lenght": 3})
except ValueError as error:
    print(error)

# %% [markdown]
# ## Seeding
#
# An environment owns a random generator, and `reset(seed=…)` sets it. The same seed and the same
# actions give the same episode; a `reset` without a seed goes on with the generator as it is.

# %%
env = make_env("CartPole-v1")
first, _ = env.reset(seed=5)
following, _ = env.reset()
again, _ = env.reset(seed=5)
assert (first == again).all() and (first != following).any()

# %% [markdown]
# A run needs many seeds: one for each environment, one for the networks, one for each evaluation.
# The usual recipe is to count: environment $i$ of run $s$ gets the seed $s + i$. That is also what
# a vector environment of Gymnasium does with one integer. Look at what it does to five runs of four
# environments. Each square is the pole's angle at the start of an episode.

# %%
def first_angles(seed_of: Callable[[int, int], int]) -> np.ndarray:
    """Return the pole's first angle (runs, environments), in degrees."""
    env = make_env("CartPole-v1")
    return np.degrees([[env.reset(seed=seed_of(s, i))[0][2] for i in range(4)] for s in range(5)])


counted = first_angles(lambda s, i: s + i)
derived = first_angles(lambda s, i: finished.derive_seed(s, "envs", i))
figure, axes = plt.subplots(1, 2, figsize=(7, 2.9), sharey=True)
for ax, angles, title in zip(axes, (counted, derived), ("seed s + i", "derived seed"), strict=True):
    image = ax.imshow(angles, cmap="coolwarm", vmin=-3, vmax=3)
    ax.set(xlabel="environment i", ylabel="seed s of the run", title=title)
    ax.set(xticks=range(4), yticks=range(5))
    ax.grid(False)
figure.colorbar(image, ax=axes, label="first angle (degrees)")
plt.show()
print("different episodes out of 20:", len(np.unique(counted)), "and", len(np.unique(derived)))
assert len(np.unique(counted)) == 8 and len(np.unique(derived)) == 20

# %% [markdown]
# On the left, equal colours run along the diagonals: run 1 repeats three of the four episodes of
# run 0. Five such seeds are not five independent runs, and an interval over them is too narrow.
#
# So seeds are derived, not counted. A seed is a name, such as `0/envs/3`, and the hash of that name
# is the number. A hash gives unrelated numbers for names that differ in one character, it is the
# same on every machine, and a new purpose gets a new name without moving the others. By hand, with
# the shell: `printf 0 | sha256sum` prints `5feceb66…`. The first four bytes, the lowest first, are
# the number 0x66ebec5f.

# %%
#| export
def derive_seed(seed: int, *path: int | str) -> int:
    """Return an independent 32-bit seed for each purpose and step of a run."""
    name = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")

# %%
assert derive_seed(0) == 0x66EBEC5F
assert derive_seed(0, "envs", 1) != derive_seed(1, "envs", 0)
assert derive_seed(0) != derive_seed(0, 0)  # a longer name is another name

# %% [markdown]
# ## Environments whose answer is known
#
# When an agent does not learn CartPole, the reason can be anywhere. When it does not learn that a
# single step pays 1, there are few places to look. Each of these five probes isolates one part of a
# learner, and each has values that you can compute in your head. $Q(o, a)$ is the discounted return
# after action $a$ at observation $o$, with discount $\gamma$.
#
# | `rlbook/…-v0` | what happens | right $Q$ | if wrong, look at |
# |---|---|---|---|
# | `OneStep` | one step, reward 1 | $1$ | loss, learning rate |
# | `TwoStep` | two steps, reward 1 at the end | $\gamma$, then $1$ | target, discount |
# | `ObservationReward` | one step, reward = observation = ±1 | $o$ | observations |
# | `ActionReward` | one step, reward ±1: does $a$ fit $o$? | $\pm 1$ | actions |
# | `ConstantReward` | reward 1 for ever, cut after `limit` steps | $1/(1-\gamma)$ | truncation |
#
# Gymnasium must know them by their ids. An entry point that is a text, such as
# `rlbook.envs:TwoStep`, is looked up when the environment is made. So the id means the class of the
# library also in this notebook, which is just defining a class of the same name, and registering
# twice is harmless.

# %%
#| export
def register_env(name: str, max_episode_steps: int | None = None) -> None:
    """Make the class `name` of this module known to Gymnasium as `rlbook/name-v0`, once."""
    env_id = f"rlbook/{name}-v0"
    if env_id not in gym.registry:
        gym.register(env_id, f"rlbook.envs:{name}", max_episode_steps=max_episode_steps)

# %%
register_env("TwoStep")  # again: the library has done so when it was imported
assert gym.registry["rlbook/TwoStep-v0"].entry_point == "rlbook.envs:TwoStep"

# %% [markdown]
# All probes show one number and have two actions. With `continuous=True` the action is one number
# from −1 to 1 instead, for the agents of later chapters. What they share stands in one class;
# `sign` is a coin that some of them show.

# %%
#| export
class Probe(gym.Env[np.ndarray, Any]):
    """One number to see, one choice, and values that are known; the probes below fill it in."""

    horizon: float = 1  # steps until the episode terminates
    limit: float = np.inf  # steps until it is truncated

    def __init__(self, continuous: bool = False) -> None:
        self.observation_space = Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = Box(-1.0, 1.0, (1,), np.float32) if continuous else Discrete(2)

    def observe(self) -> float:
        """Return what the agent sees."""
        return 1.0

    def reward(self, action: Any) -> float:
        """Return what this step pays."""
        return 1.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode and draw its sign, -1 or 1."""
        super().reset(seed=seed)
        self.steps, self.sign = 0, float(self.np_random.choice([-1.0, 1.0]))
        return np.array([self.observe()], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Pay the reward and count the step."""
        reward = self.reward(action)
        self.steps += 1
        obs = np.array([self.observe()], np.float32)
        return obs, reward, self.steps >= self.horizon, self.steps >= self.limit, {}

# %% [markdown]
# The first two are about time alone: all that can go wrong in them is the loss and the discount.

# %%
#| export
class OneStep(Probe):
    """One step that pays 1: Q = 1."""


class TwoStep(Probe):
    """The observation is -1, then 0, and only the second step pays 1: Q = gamma, then 1."""

    horizon = 2

    def observe(self) -> float:
        return self.steps - 1.0  # 1 at the end

    def reward(self, action: Any) -> float:
        return float(self.steps == 1)

# %% [markdown]
# Two more need eyes and hands. `ActionReward` shows the same coin as `ObservationReward`, and pays for an
# action that fits it.

# %%
#| export
class ObservationReward(Probe):
    """The observation is -1 or 1, and one step pays just that: Q = observation."""

    def observe(self) -> float:
        return self.sign

    def reward(self, action: Any) -> float:
        return self.sign


class ActionReward(ObservationReward):
    """Action 0 is right at -1, and 1 at 1: Q = 1 if right, else -1.

    A continuous action a pays 1 - (a - observation / 2)², so observation / 2 is best and pays 1.
    """

    def reward(self, action: Any) -> float:
        if isinstance(self.action_space, Discrete):
            return 1.0 if (action == 1) == (self.sign > 0) else -1.0
        return 1.0 - (float(action[0]) - self.sign / 2) ** 2

# %% [markdown]
# The last never terminates; you only stop watching. Then all five get their ids.

# %%
#| export
class ConstantReward(Probe):
    """Each step pays 1 for ever, but you watch only `limit` steps: Q = 1 / (1 - gamma)."""

    horizon = np.inf

    def __init__(self, limit: int = 10, continuous: bool = False) -> None:
        super().__init__(continuous)
        self.limit = limit


for _probe in (OneStep, TwoStep, ObservationReward, ActionReward, ConstantReward):
    register_env(_probe.__name__)

# %% [markdown]
# Now play them and compute each $Q$ from the rewards, with $\gamma = 0.9$.

# %%
def play(env: gym.Env, action: Any, seed: int) -> tuple[float, list[float]]:
    """Play an episode with one action; return the first observation and the rewards."""
    obs, _ = env.reset(seed=seed)
    rewards, ended = [], False
    while not ended:
        _, reward, terminated, truncated, _ = env.step(action)
        rewards.append(float(reward))
        ended = terminated or truncated
    return float(obs[0]), rewards


gamma = 0.9
assert play(make_env("rlbook/OneStep-v0"), 0, seed=0) == (1.0, [1.0])
assert play(make_env("rlbook/TwoStep-v0"), 0, seed=0) == (-1.0, [0.0, 1.0])  # Q = 0 + gamma * 1
for seed in range(10):
    shown_sign, (reward,) = play(make_env("rlbook/ObservationReward-v0"), 0, seed)
    assert reward == shown_sign
    shown_sign, (reward,) = play(make_env("rlbook/ActionReward-v0"), 1, seed)
    assert reward == shown_sign  # action 1 fits the observation 1
    probe = make_env("rlbook/ActionReward-v0", {"continuous": True})
    shown_sign, (reward,) = play(probe, np.array([0.5], np.float32), seed)
    assert reward == (1.0 if shown_sign > 0 else 0.0)  # 1 - (0.5 + 0.5)² = 0
assert play(make_env("rlbook/ConstantReward-v0", {"limit": 4}), 0, seed=0) == (1.0, [1.0] * 4)

# %% [markdown]
# ## Vector environments
#
# What does it cost to ask a small network for the actions of eight observations, rather than one?

# %%
network = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
costs = {}
with torch.inference_mode():
    for size in (1, 8, 64):
        names = {"network": network, "batch": torch.zeros(size, 4)}
        costs[size] = min(timeit.repeat("network(batch)", globals=names, number=50, repeat=20))
for size, seconds in costs.items():
    print(f"{size:2d} observations: {seconds / costs[1]:.1f} times the cost of one")
assert costs[8] < 4 * costs[1]

# %% [markdown]
# Little more than for one. So agents in this book step several copies of an environment side by
# side, as one *vector environment*: actions go in as an array (environments,), observations come
# out as an array (environments, …). The copies end their episodes at different times, so each must
# restart by itself. That is where the trouble starts.
#
# By default Gymnasium restarts a copy in the **next step**: the step after the last one ignores its
# action, pays 0 and returns the first observation of a new episode. A loop that stores what it sees
# stores this as if it were a transition. Here is such a loop on `TwoStep`, whose true transitions
# are only two: −1 → 0 with reward 0, and 0 → 1 with reward 1, terminated.

# %%
Row = tuple[float, float, float, bool]  # observation, reward, next observation, terminated


def naive_rows(envs: gym.vector.VectorEnv, steps: int) -> list[Row]:
    """Store each step of one environment just as it comes."""
    obs, _ = envs.reset(seed=0)
    rows = []
    for _ in range(steps):
        action = np.zeros(envs.num_envs, dtype=np.int64)
        next_obs, reward, terminated, _, _ = envs.step(action)
        rows.append((obs.item(), reward.item(), next_obs.item(), terminated.item()))
        obs = next_obs
    return rows


def show(rows: list[Row]) -> None:
    """Print rows, and mark those that cannot happen in `TwoStep`."""
    print("obs -> next obs          terminated")
    possible = {(-1.0, 0.0, 0.0, False), (0.0, 1.0, 1.0, True)}
    for obs, reward, next_obs, terminated in rows:
        wrong = "" if (obs, reward, next_obs, terminated) in possible else "   <- never happened"
        print(f"{obs:4.0f} ->{next_obs:3.0f}   reward {reward:.0f}   {terminated!s:5}{wrong}")


makers = [lambda: make_env("rlbook/TwoStep-v0")]
next_step = naive_rows(SyncVectorEnv(makers), 6)  # AutoresetMode.NEXT_STEP is the default
show(next_step)
assert next_step.count((1.0, 0.0, -1.0, False)) == 2

# %% [markdown]
# Every third row never happened. It says that the last observation of one episode leads to the
# first of the next, for no reward and whatever the action. In general one row in $T + 1$ is false,
# where $T$ is the length of an episode, and the false rows join episodes that have nothing to do
# with each other. For an agent with a memory, or with returns over several steps, that is worse
# than noise.
#
# In the mode `SAME_STEP` a copy restarts **within the step** that ends its episode. No action is
# lost, and every row is a real step. But now the observation that `step` returns is already the
# first of the new episode:

# %%
same_step = naive_rows(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP), 4)
show(same_step)
assert same_step.count((0.0, 1.0, -1.0, True)) == 2

# %% [markdown]
# The true last observation is not lost: it is in `infos["final_obs"]`, with the mask
# `infos["_final_obs"]` beside it. When the episode terminated, nobody needs it, because its value
# counts 0. When it was truncated, its value counts fully, and the first observation of another
# episode in its place is wrong. So two small functions, used by every agent in the book: one makes
# the vector environment in this mode, the other puts the last observations back.
#
# One trap is left. Gymnasium keeps the last observation as it is and then resets the environment. One
# that hands out the same array at each step, and many do, writes the first observation of the next
# episode over it. `KeepLast` takes a copy in time.

# %%
#| export
class KeepLast(gym.Wrapper[Any, Any, Any, Any]):
    """Copies the last observation of an episode, which a reset might write over."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            obs = copy.deepcopy(obs)
        return obs, reward, terminated, truncated, info


def make_vector_env(
    env_id: str, num_envs: int, env_kwargs: dict[str, Any] | None = None
) -> SyncVectorEnv:
    """Make `num_envs` copies that step together and reset within the step that ends an episode."""
    makers = [lambda: KeepLast(make_env(env_id, env_kwargs))] * num_envs
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)

# %%
envs = make_vector_env("rlbook/TwoStep-v0", num_envs=3)
obs, _ = envs.reset(seed=[0, 1, 2])
assert obs.shape == (3, 1) and envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP

# %% [markdown]
# By hand: two environments return the observations (5, 6). The episode of the second one has just
# ended with the observation 9, and 6 is the first of its next one. So the true successors are
# (5, 9).

# %%
#| export
def true_next_obs(next_obs: np.ndarray, infos: dict[str, Any]) -> np.ndarray:
    """Put the last observation of each ended episode back where the next first one stands."""
    if "final_obs" not in infos:
        return next_obs
    restored = next_obs.copy()
    for i in np.flatnonzero(infos["_final_obs"]):
        restored[i] = infos["final_obs"][i]
    return restored

# %%
by_hand = {"final_obs": np.array([None, [9.0]], object), "_final_obs": np.array([False, True])}
assert true_next_obs(np.array([[5.0], [6.0]]), by_hand).tolist() == [[5.0], [9.0]]

envs = make_vector_env("rlbook/TwoStep-v0", num_envs=1)
obs, _ = envs.reset(seed=[0])
stored = []
for _ in range(4):
    after, reward, terminated, _, infos = envs.step(np.array([0]))
    last = true_next_obs(after, infos)
    stored.append((obs.item(), reward.item(), last.item(), terminated.item()))
    obs = after  # what the agent acts on next is the first observation of the new episode
show(stored)
assert stored == [(-1.0, 0.0, 0.0, False), (0.0, 1.0, 1.0, True)] * 2

# %% [markdown]
# ## What truncation does to a value
#
# `ConstantReward` pays 1 at every step and never terminates, so its value is a geometric series:
#
# $$V = 1 + \gamma + \gamma^2 + \dots = \frac{1}{1 - \gamma}$$
#
# With $\gamma = 0.9$ that is 10. Nobody can wait for ever, so you watch $T = 10$ steps at a time.
# TD(0) moves its estimate a little towards a target after every step:
#
# $$V \leftarrow V + \alpha\,(y - V), \qquad
# y = \begin{cases} r & \text{at the end} \\ r + \gamma V & \text{otherwise} \end{cases}$$
#
# What is "the end"? If it is `terminated`, each target is $1 + \gamma V$, and $V$ settles where
# $V = 1 + \gamma V$, at $1/(1-\gamma)$. If it is `terminated or truncated`, called *done* in much
# code, then one target in $T$ is 1 alone, and $V$ settles where its *mean* target is:
#
# $$V = 1 + \gamma \Bigl(1 - \frac{1}{T}\Bigr) V
# \quad\Rightarrow\quad V_\text{done} = \frac{1}{1 - \gamma (1 - 1/T)}$$
#
# By hand for $T = 10$: $1 / (1 - 0.9 \cdot 0.9) = 1 / 0.19 \approx 5.26$, a little more than half
# of the truth. Averaging the returns that you saw is no way out: an episode of ten rewards has the
# return $(1 - \gamma^T) / (1 - \gamma) \approx 6.51$.

# %%
def done_value(gamma: float, limit: int) -> float:
    """Return where TD(0) settles when a truncated step counts as an end."""
    return 1 / (1 - gamma * (1 - 1 / limit))


def seen_return(gamma: float, limit: int) -> float:
    """Return the discounted sum of `limit` rewards of 1."""
    return (1 - gamma**limit) / (1 - gamma)


assert abs(done_value(0.9, 10) - 1 / 0.19) < 1e-12
assert abs(seen_return(0.9, 10) - sum(0.9**k for k in range(10))) < 1e-12

# %%
alpha, steps = 0.02, 4_000  # the learning rate, the environment steps


def td0(limit: int, stop_when_truncated: bool) -> np.ndarray:
    """Learn the value of `ConstantReward` by TD(0) and return the estimate after each step."""
    env = make_env("rlbook/ConstantReward-v0", {"limit": limit})
    env.reset(seed=0)
    value, history = 0.0, np.zeros(steps)
    for t in range(steps):
        _, reward, terminated, truncated, _ = env.step(0)
        stop = terminated or (truncated and stop_when_truncated)
        target = float(reward) + gamma * value * (not stop)
        value += alpha * (target - value)
        history[t] = value
        if terminated or truncated:
            env.reset()
    return history


right, wrong = td0(10, stop_when_truncated=False), td0(10, stop_when_truncated=True)
limits = [1, 2, 5, 10, 20, 50, 100, 200]
settled = [td0(limit, stop_when_truncated=True)[-400:].mean() for limit in limits]

# %%
figure, (left, ax) = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
left.plot(right, color=PALETTE[0], label="stops when terminated")
left.plot(wrong, color=PALETTE[3], label="stops when done")
left.axhline(10, color=COLORS["reference"], linestyle="--", label="1/(1−γ)")
left.axhline(done_value(gamma, 10), color=COLORS["reference"], linestyle=":")
left.lines[-1].set_label("1/(1−γ(1−1/T))")
left.set(xlabel="environment steps", ylabel="estimated value", title="time limit T = 10")
left.legend(loc="center right", bbox_to_anchor=(1.0, 0.74))
grid = np.geomspace(1, 200, 100)
ax.plot(grid, 1 / (1 - gamma * (1 - 1 / grid)), ":", color=COLORS["reference"])
ax.plot(limits, settled, "o", color=PALETTE[3], label="TD(0) that stops when done")
ax.plot(limits, [seen_return(gamma, n) for n in limits], "s-", color=PALETTE[1], markersize=4)
ax.lines[-1].set_label("mean return seen, (1−γᵀ)/(1−γ)")
ax.axhline(10, color=COLORS["reference"], linestyle="--")
ax.set(xscale="log", xlabel="time limit T (steps)", title="where they settle", ylim=(0, 11))
ax.legend(loc="lower right")
plt.show()
print(f"stops when terminated: {right[-1]:.2f}, stops when done: {wrong[-400:].mean():.2f}")
assert abs(right[-1] - 1 / (1 - gamma)) < 0.01
assert all(abs(v - done_value(gamma, n)) < 0.1 for v, n in zip(settled, limits, strict=True))

# %% [markdown]
# The curve that stops when done is not slow: it has settled, on a wrong number. No network,
# learning rate or amount of data repairs that. (It is a hair below 5.26, because $\alpha$ is not
# quite 0: $V$ is highest just before each cut.) Hence the rule of this book: **bootstrap on
# `terminated` alone**. Buffers store `terminated`, and `truncated` only says where an episode was
# cut.

# %% [markdown]
# ## A mean and its interval
#
# A policy is judged by its return, and returns differ between episodes. Two numbers with a "±" are
# in use, and they answer different questions. The standard deviation $s$ says how much *episodes*
# differ: it stays as it is however many you play. The interval says how well you know the *mean*,
# and it shrinks with the number $n$ of episodes:
#
# $$\bar{x} \pm t_{n-1} \frac{s}{\sqrt{n}}$$
#
# $t_{n-1}$ is the quantile of Student's distribution: 1.96 for many episodes, more for few, because
# $s$ itself is only an estimate. (The band around a learning curve is the same interval, over seeds
# instead of episodes: [figures](figures.ipynb) draws it.) By hand: the returns 1, 2 and 3 have the
# mean 2, $s = 1$ and $t_2 = 4.303$, so the interval is $2 \pm 4.303 / \sqrt{3} = 2 \pm 2.484$.

# %%
#| export
def mean_interval(
    values: np.ndarray, axis: int = 0, confidence: float = 0.95
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean and the two ends of its Student-t interval along `axis`."""
    values = np.asarray(values, dtype=np.float64)
    count = values.shape[axis]
    mean = values.mean(axis)
    if count < 2:  # one value has no spread to estimate
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    half = stdtrit(count - 1, 0.5 + confidence / 2) * values.std(axis, ddof=1) / np.sqrt(count)
    return mean, mean - half, mean + half

# %%
mean, low, high = mean_interval(np.array([1.0, 2.0, 3.0]))
assert mean == 2 and abs(high - mean - 2.484) < 1e-3 and abs(mean - low - 2.484) < 1e-3
assert np.isnan(mean_interval(np.array([1.0]))[1])  # one episode says nothing about the others

# %% [markdown]
# `Evaluation` is what an evaluation returns. Its `std` describes episodes, its `interval` the mean.

# %%
#| export
@dataclass(frozen=True)
class Evaluation:
    """The undiscounted returns and the lengths of some episodes."""

    returns: np.ndarray  # (episodes,)
    lengths: np.ndarray  # (episodes,)

    @property
    def mean(self) -> float:
        """The mean return."""
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        """The standard deviation of the returns between episodes."""
        return float(self.returns.std())

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Student-t interval of the mean."""
        _, low, high = mean_interval(self.returns)
        return float(low), float(high)

# %%
three = Evaluation(returns=np.array([1.0, 2.0, 3.0]), lengths=np.array([1, 2, 3]))
assert three.mean == 2 and abs(three.std - np.sqrt(2 / 3)) < 1e-12
assert np.allclose(three.interval, (2 - 2.484, 2 + 2.484), atol=1e-3)

# %% [markdown]
# ## Which episodes count
#
# How do you play twenty episodes in ten environments? The obvious way is to let all of them run and
# to take the first twenty episodes that finish. It is wrong, because **short episodes finish
# first**.
#
# By hand: an episode lasts 1 step or 100, each with probability ½, and pays 1 a step. The true mean
# is 50.5. Take two environments and the first two episodes to finish.
#
# | first episodes | probability | the first two to finish | their mean |
# |---|---|---|---|
# | short, short | ¼ | 1, 1 | 1 |
# | one short, one long; the next one short | ¼ | 1, 1 | 1 |
# | one short, one long; the next one long | ¼ | 1, 100 | 50.5 |
# | long, long | ¼ | 100, 100 | 100 |
#
# The mean over the four rows is 38.125, a quarter below the truth.

# %%
def first_finished(lengths: np.ndarray, count: int) -> np.ndarray:
    """Return the lengths of the first `count` episodes to finish, of (environments, episodes)."""
    finish = lengths.cumsum(axis=1)  # the step at which each episode finishes
    order = finish.ravel().argsort(kind="stable")
    return lengths.ravel()[order[:count]]


coins = itertools.product([1, 100], repeat=4)  # two environments, two episodes each
means = [first_finished(np.array(coin).reshape(2, 2), 2).mean() for coin in coins]
print(f"mean of the first two to finish: {np.mean(means)}, truth: {(1 + 100) / 2}")
assert np.mean(means) == 38.125

# %% [markdown]
# The way out: fix *which* episodes count before any of them starts. `evaluate` plays exactly one
# episode in each of its environments, and waits for all. The observations of all environments go
# through the policy in one batch. A policy takes the observations, its memory (`None` at first) and
# a flag for the first step of an episode, and returns actions and memory: the same call that agents
# with and without memory answer in later chapters.

# %%
#| export
Policy = Callable[[np.ndarray, Any, np.ndarray], tuple[np.ndarray, Any]]


def evaluate(policy: Policy, envs: Sequence[gym.Env], seed: int) -> Evaluation:
    """Play one episode in each environment, with one call of the policy for all at each step."""
    if not envs:
        raise ValueError("An evaluation needs at least one episode.")
    count, space = len(envs), envs[0].observation_space
    obs = np.zeros((count, *(space.shape or ())), space.dtype)  # as a vector environment has it
    for i, env in enumerate(envs):
        obs[i], _ = env.reset(seed=derive_seed(seed, i))
    returns, lengths = np.zeros(count), np.zeros(count, dtype=np.int64)
    running, episode_start, state = np.ones(count, dtype=bool), np.ones(count, dtype=bool), None
    while running.any():
        actions, state = policy(obs, state, episode_start)
        obs, episode_start = obs.copy(), np.zeros(count, dtype=bool)  # the policy may keep its own
        for i in np.flatnonzero(running).tolist():
            obs[i], reward, terminated, truncated, _ = envs[i].step(actions[i])
            returns[i] += float(reward)
            lengths[i] += 1
            running[i] = not (terminated or truncated)
    return Evaluation(returns, lengths)

# %% [markdown]
# By hand: in `TwoStep` each episode has the return 1 and the length 2. Environments may differ: two
# copies of `ConstantReward` with the limits 3 and 5 return 3 and 5.

# %%
def always_0(obs: np.ndarray, state: Any, episode_start: np.ndarray) -> tuple[np.ndarray, Any]:
    """Play action 0 in all environments."""
    return np.zeros(len(obs), dtype=np.int64), state


result = evaluate(always_0, [make_env("rlbook/TwoStep-v0") for _ in range(3)], seed=0)
assert result.returns.tolist() == [1, 1, 1] and result.lengths.tolist() == [2, 2, 2]
pair = [make_env("rlbook/ConstantReward-v0", {"limit": limit}) for limit in (3, 5)]
assert evaluate(always_0, pair, seed=0).returns.tolist() == [3, 5]

# %% [markdown]
# Now in earnest. Play 2,000 episodes of a random policy on CartPole, one after the other in one
# environment, where nobody can overtake. Their mean is the truth, as far as we will know it. Then
# evaluate again and again, with twenty episodes at a time drawn from these, and count how often
# "mean ± something" contains the truth.

# %%
generator = np.random.default_rng(0)
env = make_env("CartPole-v1")
env.reset(seed=0)
pool = []
while len(pool) < 2_000:
    length, ended = 0, False
    while not ended:
        _, _, terminated, truncated, _ = env.step(generator.integers(2))
        length, ended = length + 1, terminated or truncated
    pool.append(length)  # in CartPole the return is the length
    env.reset()
truth = np.mean(pool)
print(f"true mean {truth:.1f}, standard deviation of the episodes {np.std(pool):.1f}")

# %%
samples = generator.choice(pool, size=(5_000, 20))  # (evaluations, episodes)
mean, low, high = mean_interval(samples, axis=1)
spread = samples.std(axis=1, ddof=1)
covered = {
    "standard deviation": (abs(mean - truth) < spread).mean(),
    "standard error": (abs(mean - truth) < spread / np.sqrt(20)).mean(),
    "95 % interval": ((low < truth) & (truth < high)).mean(),
}
for name, share in covered.items():
    print(f"mean ± {name}: contains the truth in {share:.0%} of the evaluations")
below, above = (high < truth).mean(), (low > truth).mean()
print(f"the 95 % interval lies below the truth in {below:.1%}, above it in {above:.1%}")
assert covered["standard deviation"] > 0.97 and 0.55 < covered["standard error"] < 0.75
assert 0.88 < covered["95 % interval"] < 0.98 and below > 2 * above

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(8, 3))
for i in range(40):
    color = PALETTE[0] if low[i] < truth < high[i] else PALETTE[3]
    ax.plot([i, i], [low[i], high[i]], color=color, linewidth=3, alpha=0.5)
    ax.plot(i, mean[i], "o", color=color, markersize=4)
ax.axhline(truth, color=COLORS["reference"], linestyle="--", label="mean of all 2,000 episodes")
ax.set(xlabel="evaluation", ylabel="undiscounted return", ylim=(8, 42))
ax.set_title("40 evaluations of 20 episodes: mean and 95 % interval (red: misses the truth)")
ax.legend(loc="upper right")
plt.show()

# %% [markdown]
# The returns of a random policy are skewed: a few episodes are long. An evaluation that met none of
# them has a mean that is too low *and* a spread that is too small, so the interval holds a little
# less than it promises, and nearly always misses on the low side. It is still the honest one of the
# three: a "± standard deviation" is no statement about the mean, and a standard error misses it
# about every third time.
#
# And the order of finishing? First the two ways on real environments, ten of them and ten episodes,
# sixty times each.

# %%
def at_random(obs: np.ndarray, state: Any, episode_start: np.ndarray) -> tuple[np.ndarray, Any]:
    """Push to a random side."""
    return generator.integers(2, size=len(obs)), state


def naive_evaluation(envs: SyncVectorEnv, count: int, seed: int) -> float:
    """Return the mean return of the first `count` random episodes that finish."""
    envs.reset(seed=[derive_seed(seed, i) for i in range(envs.num_envs)])
    returns, done = np.zeros(envs.num_envs), []
    while len(done) < count:
        _, reward, terminated, truncated, _ = envs.step(generator.integers(2, size=envs.num_envs))
        returns += reward
        done += returns[terminated | truncated].tolist()
        returns[terminated | truncated] = 0
    return float(np.mean(done[:count]))


vector, ten = make_vector_env("CartPole-v1", 10), [make_env("CartPole-v1") for _ in range(10)]
naive = mean_interval(np.array([naive_evaluation(vector, 10, seed) for seed in range(60)]))
fair = mean_interval(np.array([evaluate(at_random, ten, seed).mean for seed in range(60)]))
for name, (centre, low_end, high_end) in (("first 10 to finish", naive), ("evaluate", fair)):
    print(f"{name:18}  {centre:.1f}, interval {low_end:.1f} to {high_end:.1f}")
assert naive[2] < 0.9 * truth and abs(fair[0] / truth - 1) < 0.1

# %% [markdown]
# Does it help to ask for more episodes? Draw streams of episodes from the pool, let ten
# environments play them, and take the first $n$ that finish.

# %%
counts = [10, 20, 40, 80, 160]
streams = generator.choice(pool, size=(1_000, 10, 100))  # (repeats, environments, episodes)
early = [np.mean([first_finished(stream, n).mean() for stream in streams]) for n in counts]
print(", ".join(f"n = {n}: {m / truth - 1:+.0%}" for n, m in zip(counts, early, strict=True)))
assert early[0] < 0.85 * truth and all(np.diff(early) > 0)

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(7, 3))
ax.plot(counts, early, "o-", color=PALETTE[3], label="first n to finish, drawn from the pool")
for x, (centre, low_end, high_end), marker, color, label in (
    (9.5, naive, "s", PALETTE[1], "first 10 to finish, real"),
    (10.5, fair, "D", PALETTE[0], "evaluate, real"),
):
    ax.plot([x, x], [low_end, high_end], color=color, linewidth=4, alpha=0.5)
    ax.plot(x, centre, marker, color=color, label=label)
ax.axhline(truth, color=COLORS["reference"], linestyle="--", label="mean of all 2,000 episodes")
ax.set(xlabel="episodes n", ylabel="undiscounted return", ylim=(10, 26))
ax.set(xscale="log", xticks=counts, xticklabels=counts)
ax.set_title("CartPole-v1, random policy, 10 environments; bars: 95 % interval of 60 evaluations")
ax.minorticks_off()
ax.legend(loc="lower right")
plt.show()

# %% [markdown]
# The bias halves when the episodes double, and is gone when you wait for all.

# %% [markdown]
# ## Seeing less: masked CartPole
#
# So far an observation told all that matters. Often it does not: a picture shows where things are
# and not how fast they move. `rlbook/MaskedCartPole-v0` is CartPole with both velocities hidden.
# Physics, rewards and the limit of 500 steps are the same; only the observation has two numbers
# instead of four.

# %%
#| export
class MaskedCartPole(CartPoleEnv):
    """CartPole-v1 that shows where cart and pole are, but not how fast they move."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        assert isinstance(self.observation_space, Box)
        high = self.observation_space.high[[0, 2]]  # position and angle
        self.observation_space = Box(-high, high, dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode."""
        obs, info = super().reset(seed=seed, options=options)
        return obs[[0, 2]], info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Push the cart to the left (0) or right (1)."""
        obs, reward, terminated, truncated, info = super().step(action)
        return obs[[0, 2]], reward, terminated, truncated, info


register_env("MaskedCartPole", max_episode_steps=500)

# %% [markdown]
# Why is that hard? Set the cart in the middle and the pole upright, once moving to the left and
# once to the right, and push to the right both times. The observation (0, 0) is the same, what
# follows is not. By hand: a step lasts 0.02 s, so at an angular velocity of ±1 rad/s the angle
# changes by ±0.02 rad.

# %%
env = make_env("rlbook/MaskedCartPole-v0")
seen = []
for speed in (-1.0, 1.0):
    env.reset(seed=0)
    env.unwrapped.state = np.array([0.0, speed, 0.0, speed])  # position, velocity, angle, velocity
    obs, *_ = env.step(1)
    seen.append(obs)
    print(f"from (0, 0) with hidden velocities {speed:+.0f}: next observation {obs.round(3)}")
assert np.allclose(seen, [[-0.02, -0.02], [0.02, 0.02]])

# %% [markdown]
# A policy that sees the velocity keeps the pole up, and the best that the same rule can do without
# it is to push towards the side of the lean.

# %%
def lean_and_speed(obs: np.ndarray, state: Any, start: np.ndarray) -> tuple[np.ndarray, Any]:
    """Push to where the pole will lean in a tenth of a second; needs all four numbers."""
    return (obs[:, 2] + 0.1 * obs[:, 3] > 0).astype(np.int64), state


def lean(obs: np.ndarray, state: Any, start: np.ndarray) -> tuple[np.ndarray, Any]:
    """Push to where the pole leans; the second of two numbers is the angle."""
    return (obs[:, 1] > 0).astype(np.int64), state


def lean_and_memory(obs: np.ndarray, state: Any, start: np.ndarray) -> tuple[np.ndarray, Any]:
    """Remember the last angle, and get the speed from the difference (a step is 0.02 s)."""
    angle = obs[:, 1]
    speed = np.where(start, 0.0, (angle - (angle if state is None else state)) / 0.02)
    return (angle + 0.1 * speed > 0).astype(np.int64), angle


full = [make_env("CartPole-v1") for _ in range(10)]
masked = [make_env("rlbook/MaskedCartPole-v0") for _ in range(10)]
scores = {
    "all four numbers": evaluate(lean_and_speed, full, seed=0),
    "masked, no memory": evaluate(lean, masked, seed=0),
    "masked, remembers one angle": evaluate(lean_and_memory, masked, seed=0),
}
for name, score in scores.items():
    low_end, high_end = score.interval
    print(f"{name:28} {score.mean:5.1f}   95 % interval {low_end:.1f} to {high_end:.1f}")
assert scores["masked, no memory"].mean < 100
assert scores["masked, remembers one angle"].mean > 400

# %% [markdown]
# Nothing was learned here, but you see what a memory is worth: one remembered number brings back
# what the mask took away. The chapters on recurrent agents learn to remember it.

# %% [markdown]
# ## Remembering longer: the T-maze
#
# One step back is short. In `rlbook/TMaze-v0` the agent sees a cue at the start of a corridor,
# walks `length` steps that all look the same, and at the junction must turn to the side that the
# cue named. The right turn pays 1 and the wrong one 0, so the mean return *is* the rate of success.
#
# An observation has two numbers: the cue (−1 for left, 1 for right, 0 once you have left the
# start), and 1 at the junction. By hand for `length=2` and the cue "right": (1, 0), (0, 0), (0, 1),
# and then the turn.
#
# First its picture, for people: a map of five rows, with the corridor in the third, where a cell is 16
# pixels wide. You walk east, so left is up. By hand for `length=2` and the cue "right": five columns, a
# wall on each side; the start is in column 1, the junction in column 3, and the goal below it, in row 3.

# %%
#| export
def draw_maze(length: int, cue: int, position: int, turn: int) -> np.ndarray:
    """Draw a T-maze from above: agent blue, goal green, cue orange while seen."""
    cells = np.full((5, length + 3, 3), 200, np.uint8)  # walls
    cells[2, 1:-1] = cells[1:4, -2] = 255  # corridor and arms
    cells[2 + cue, -2] = (0, 158, 115)  # facing east, left is up
    if position == 0:
        cells[2 + cue, 1] = (230, 159, 0)
    image = cells.repeat(16, axis=0).repeat(16, axis=1)
    y, x = 16 * (2 + turn) + 3, 16 * (1 + position) + 3
    image[y : y + 10, x : x + 10] = (0, 114, 178)
    return image

# %%
drawn = draw_maze(length=2, cue=1, position=0, turn=0)
middles = drawn[8::16, 8::16]  # one pixel of each cell
assert middles.shape == (5, 5, 3)
assert middles[3, 3].tolist() == [0, 158, 115] and middles[3, 1].tolist() == [230, 159, 0]
assert middles[2, 1].tolist() == [0, 114, 178] and middles[2, 2].tolist() == [255, 255, 255]
left_behind = draw_maze(length=2, cue=1, position=1, turn=0)[8::16, 8::16]
assert left_behind[3, 1].tolist() == [200, 200, 200]  # once you have left the start, no cue

# %% [markdown]
# And the maze itself. It knows how far you are, the cue, and, in the end, your turn.

# %%
#| export
class TMaze(gym.Env[np.ndarray, Any]):
    """A corridor of `length` steps; the cue at its start says which turn at its end pays 1.

    Action 0 turns left and 1 turns right at the junction; in the corridor both lead on. With `walk`
    action 2, and no other, leads on. Observation: the cue (at the start), and whether you may turn.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}  # noqa: RUF012 (as in gym.Env)

    def __init__(
        self, length: int = 10, walk: bool = False, render_mode: str | None = None
    ) -> None:
        if not isinstance(length, int | np.integer) or length < 1:
            raise ValueError(f"TMaze needs a whole length of at least 1, not {length!r}.")
        self.length, self.walk, self.render_mode = length, walk, render_mode
        self.limit = 6 * length + 10  # for who never turns; a random walk takes 3 * length + 1.5
        self.observation_space = Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = Discrete(3 if walk else 2)

    def observe(self) -> np.ndarray:
        """Return the cue, -1 for left and 1 for right, at the start alone; 1 at the junction."""
        cue = self.cue if self.position == 0 else 0
        return np.array([cue, self.position == self.length], np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Go to the start and draw a cue."""
        super().reset(seed=seed)
        self.cue = int(self.np_random.choice([-1, 1]))
        self.position = self.steps = self.turn = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Go on in the corridor, or turn at the junction."""
        self.steps += 1
        if self.position < self.length:
            self.position += int(action == 2 or not self.walk)
        else:
            self.turn = (-1, 1, 0)[action]
        reward = float(self.turn == self.cue)
        return self.observe(), reward, self.turn != 0, self.steps >= self.limit, {}

    def render(self) -> np.ndarray:
        """Draw the maze, for people."""
        return draw_maze(self.length, self.cue, self.position, self.turn)


register_env("TMaze")

# %%
maze = TMaze(length=2)
obs, _ = maze.reset(seed=0)
maze.cue = 1  # right, whatever the seed drew
trail = [maze.observe().tolist()]
for action in (0, 0, 1):  # two steps along the corridor, then right
    obs, reward, terminated, truncated, _ = maze.step(action)
    trail.append(obs.tolist())
assert trail[:3] == [[1, 0], [0, 0], [0, 1]] and reward == 1 and terminated and not truncated

# %% [markdown]
# A policy that keeps the cue in its `state` always succeeds. Here it is in a corridor of 4.

# %%
def remember(obs: np.ndarray, state: Any, episode_start: np.ndarray) -> tuple[np.ndarray, Any]:
    """Keep the first cue and turn to its side."""
    cue = np.where(episode_start, obs[:, 0], obs[:, 0] if state is None else state)
    return (cue > 0).astype(np.int64), cue


env = make_env("rlbook/TMaze-v0", {"length": 4}, render_mode="rgb_array")
obs, _ = env.reset(seed=derive_seed(0, 0))
frames, titles, state, ended = [env.render()], [f"sees {obs.astype(int).tolist()}"], None, False
while not ended:
    start = np.array([state is None])
    actions, state = remember(obs[None], state, start)
    obs, reward, terminated, truncated, _ = env.step(actions[0])
    ended = terminated or truncated
    frames.append(env.render())
    titles.append(f"reward {reward:.0f}" if ended else f"sees {obs.astype(int).tolist()}")
assert reward == 1
filmstrip(frames, titles, columns=6)

# %% [markdown]
# And without memory? There are four observations and two actions, so sixteen policies without
# memory and without chance. Try them all, against both cues.

# %%
def score(policy: dict[tuple[float, ...], int]) -> float:
    """Return the mean success of a memoryless policy over both cues."""
    total = 0.0
    for cue in (-1, 1):
        maze = TMaze(length=3)
        obs, _ = maze.reset(seed=0)
        maze.cue, ended = cue, False
        obs = maze.observe()
        while not ended:
            obs, reward, terminated, truncated, _ = maze.step(policy[tuple(obs.tolist())])
            total, ended = total + reward, terminated or truncated
    return total / 2


observations = [(-1.0, 0.0), (1.0, 0.0), (0.0, 0.0), (0.0, 1.0)]
choices = itertools.product([0, 1], repeat=4)
successes = [score(dict(zip(observations, choice, strict=True))) for choice in choices]
mazes = [make_env("rlbook/TMaze-v0") for _ in range(100)]
print(f"16 policies without memory: {min(successes)} to {max(successes)}")
print(f"with memory, 100 episodes:  {evaluate(remember, mazes, seed=0).mean}")
assert set(successes) == {0.5} and evaluate(remember, mazes, seed=0).mean == 1

# %% [markdown]
# All of them succeed at exactly one half, and chance mixes them, so it cannot do better. A mean that is
# clearly above one half needs memory: in the agent or, as exercise 4 shows, in the world.

# %% [markdown]
# ## Honest edges
#
# The T-maze comes from Bakker (2001). Ours differs from it:
#
# | | Bakker | here |
# |---|---|---|
# | actions | four directions | left, right; the corridor leads on by itself |
# | start | 011 or 110 | (−1, 0) or (1, 0) |
# | corridor, junction | 101, 010 | (0, 0), (0, 1) |
# | right turn, wrong turn | 4, −0.1 | 1, 0 |
# | standing still | −0.1 | not possible |
#
# With our rewards the mean return is the rate of success, and with our actions only memory is left
# to learn. `walk=True` adds the action "forward", which alone leads on; standing still then pays 0,
# and the episode is truncated after $6 \cdot \text{length} + 10$ steps, more than twice what a random
# walk needs on average.
#
# The environments of a vector step one after the other in one process, which is simple and the same
# on every machine; a slow simulator would gain from processes of its own, which this book does not
# use. `evaluate` waits for its longest episode, and asks the policy about ended environments too:
# simple, and a little wasteful. Its Student interval assumes returns that are roughly normal; you
# saw above what skew does to it. And a seed fixes an episode only if the environment draws from its
# own generator: one that uses the clock or a global generator breaks the promise.

# %% [markdown]
# ## Exercises
#
# **Exercise 1.** Let an agent of `ConstantReward` see the number $t$ of steps so far, and give each
# $t$ its own estimate $V_t$, 0 at first. It bootstraps on `terminated` alone, as it should. What
# does it learn for $V_0$, with $T = 10$ and $\gamma = 0.9$?
#
# <details>
# <summary>Solution</summary>
#
# The observation $t = T$ is only ever a successor: no step starts there, so $V_T$ stays at 0. Then
# $V_{T-1} = 1$, $V_{T-2} = 1 + \gamma$, and $V_0 = (1 - \gamma^T)/(1 - \gamma) \approx 6.51$, as if
# the cut were an end. Bootstrapping at a cut helps only where the agent has learned something about
# the successor, from other episodes or by generalising. With the real value of 10 in its place it is
# exact:
#
# ```python
# for last, expected in ((0.0, seen_return(0.9, 10)), (10.0, 10.0)):
#     V = np.zeros(11)
#     V[10] = last
#     for t in reversed(range(10)):
#         V[t] = 1 + 0.9 * V[t + 1]
#     assert abs(V[0] - expected) < 1e-9
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** How long must the limit of `ConstantReward` be for an agent that stops when done
# to be at most 1 % below the true value, at $\gamma = 0.9$? And at 0.99?
#
# <details>
# <summary>Solution</summary>
#
# $V_\text{done} / V = (1 - \gamma) / (1 - \gamma + \gamma / T) \ge 0.99$ gives
# $T \ge 99\,\gamma/(1-\gamma)$: 891 steps, and 9,801. The limit must be about a hundred times
# longer than the horizon $1/(1-\gamma)$.
#
# ```python
# assert abs(done_value(0.9, 891) - 9.9) < 1e-9
# assert abs(done_value(0.99, 9801) - 99) < 1e-9
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** A loop stores every row of `ConstantReward` with $T = 10$ from a vector
# environment in the mode `NEXT_STEP`, the false rows too, and bootstraps on `terminated` alone.
# Which value does TD(0) learn? Compute it first, then run it.
#
# <details>
# <summary>Solution</summary>
#
# One row in 11 pays 0 and all bootstrap, so $V = \tfrac{10}{11} + \gamma V$ and $V = 9.09$ instead
# of 10.
#
# ```python
# envs = SyncVectorEnv([lambda: make_env("rlbook/ConstantReward-v0")])
# rewards = np.array([row[1] for row in naive_rows(envs, 1_100)])
# assert abs(rewards.mean() / (1 - 0.9) - 100 / 11) < 1e-9
# ```
#
# </details>

# %% [markdown]
# **Exercise 4.** In the T-maze, let a policy without memory see its own previous action beside the
# observation. It now succeeds always. How? And why does `walk=True` stop it?
#
# <details>
# <summary>Solution</summary>
#
# In the corridor the action does not matter, so it is free to carry the cue: at the start play the
# side of the cue, and then always repeat the previous action. The memory is in the world, not in
# the agent. With `walk=True` only "forward" leads on, and after the first such step the previous
# action is "forward", whatever the cue was.
#
# ```python
# def repeat(obs, previous, start):
#     cue = (obs[:, 0] > 0).astype(int)
#     action = cue if previous is None else np.where(obs[:, 0] != 0, cue, previous)
#     return action, action
#
# assert evaluate(repeat, mazes, seed=1).mean == 1
# ```
#
# </details>

# %% [markdown]
# **Exercise 5: find the bug.** This evaluation plays twenty episodes in one environment, and its
# interval is suspiciously good.

# %%
def suspicious(policy: Callable[[np.ndarray], int], env_id: str, seed: int) -> Evaluation:
    """Play 20 episodes, one after the other."""
    env = make_env(env_id)
    returns, lengths = [], []
    for _ in range(20):
        obs, _ = env.reset(seed=seed)
        rewards, ended = [], False
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(policy(obs))
            rewards.append(float(reward))
            ended = terminated or truncated
        returns.append(sum(rewards))
        lengths.append(len(rewards))
    return Evaluation(np.array(returns), np.array(lengths))


strange = [suspicious(lambda obs: int(obs[2] > 0), "CartPole-v1", seed) for seed in range(3)]
for seed, each in enumerate(strange):
    print(f"seed {seed}: mean {each.mean}, interval {each.interval}")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# `reset(seed=seed)` stands inside the loop over episodes, so all twenty start from the same state,
# and a policy without chance plays the same episode twenty times. It is one episode, counted twenty
# times. Seed the first reset alone, or derive a seed for each episode:
#
# ```python
# def suspicious(policy: Callable[[np.ndarray], int], env_id: str, seed: int) -> Evaluation:
#     """Play 20 episodes, one after the other."""
#     env = make_env(env_id)
#     returns, lengths = [], []
#     for episode in range(20):
#         obs, _ = env.reset(seed=derive_seed(seed, episode))
#         rewards, ended = [], False
#         while not ended:
#             obs, reward, terminated, truncated, _ = env.step(policy(obs))
#             rewards.append(float(reward))
#             ended = terminated or truncated
#         returns.append(sum(rewards))
#         lengths.append(len(rewards))
#     return Evaluation(np.array(returns), np.array(lengths))
#
# repaired = suspicious(lambda obs: int(obs[2] > 0), "CartPole-v1", seed=0)
# assert len(set(repaired.returns)) > 1
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# From a script, with `rlbook` installed:
#
# ```python
# from rlbook.envs import evaluate, make_env
#
# envs = [make_env("CartPole-v1") for _ in range(20)]
# result = evaluate(lambda obs, state, start: ((obs[:, 2] > 0).astype(int), state), envs, seed=0)
# print(result.mean, result.interval)
# ```
#
# In the shell, every environment of this chapter is an `--env-id` like any other:
#
# ```
# rlbook train dqn --env-id rlbook/TMaze-v0 --env-kwargs "{length: 5}" --total-steps 5000
# ```

# %% [markdown]
# ## References
#
# * M. Towers et al., *Gymnasium: A Standard Interface for Reinforcement Learning Environments*,
#   2024, [arXiv:2407.17032](https://arxiv.org/abs/2407.17032).
# * F. Pardo, A. Tavakoli, V. Levdik, P. Kormushev, *Time Limits in Reinforcement Learning*, ICML
#   2018, [arXiv:1712.00378](https://arxiv.org/abs/1712.00378). Why a cut is not an end.
# * B. Bakker, *Reinforcement Learning with Long Short-Term Memory*, NIPS 2001. The T-maze.
# * A. G. Barto, R. S. Sutton, C. W. Anderson, *Neuronlike Adaptive Elements That Can Solve
#   Difficult Learning Control Problems*, 1983. The cart and the pole.
# * A. L. Jones, [*Debugging RL, Without the Agonizing
#   Pain*](https://andyljones.com/posts/rl-debugging.html), 2021. Probe environments.
