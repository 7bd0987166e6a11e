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
# In [Basics](basics.ipynb) the world was one short function. Larger worlds come as *environments* that
# all work in the same way: a pole on a cart, a robot, a game. In this chapter you learn how to use one,
# how to use several at once, and how to measure how well a policy does. You also build seven small
# environments of your own: five with Q-values that you know in advance, and two in which an agent must
# remember what it no longer sees. The figure shows two environments of this chapter.
#
# On the way you meet three mistakes that raise no error, and yet spoil what an agent learns or what you
# measure: a seed that is used twice, a time limit that is taken for the end, and an evaluation that
# counts the short episodes first. Cells that start with `#| export` are copied into the package
# `rlbook`; the others only test or draw.
#
# | | |
# |---|---|
# | You need | [Basics](basics.ipynb), and NumPy |
# | You build | seeds, vector environments, an evaluation, seven environments |
# | The interface | that of [Gymnasium](https://gymnasium.farama.org), which most libraries use |
# | Next | [Replay](replay.ipynb) stores what environments return |

# %% tags=["hide-input"]
#| export
import copy
import difflib
import functools
import hashlib
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

# %% tags=["hide-input"]
import itertools
import time

import matplotlib.pyplot as plt

import rlbook.envs as finished  # the module that this chapter exports
from rlbook.figures import COLORS, PALETTE, filmstrip, use_style

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame needs no screen then
use_style()

figure, axes = plt.subplots(1, 2, figsize=(9, 2.5), width_ratios=[1, 1.75])
shown = {
    "CartPole: keep the pole up": finished.make_env("CartPole-v1", render_mode="rgb_array"),
    "T-maze: remember the orange cue, turn to the green side": finished.make_env(
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
# ## One episode
#
# You use an environment through two methods. `reset` starts an episode and returns the first
# observation. `step` takes an action and returns the next observation, the reward, the two flags
# `terminated` and `truncated`, and a dictionary with anything else. (`reset` returns such a
# dictionary, too.) Two *spaces* say which values are possible: `Discrete(2)` is the action 0 or 1,
# and `Box(-1, 1, (4,))` is four real numbers between −1 and 1.
#
# In CartPole, an observation is four numbers: the position and the velocity of the cart, and the angle and the
# angular velocity of the pole. Action 0 pushes the cart to the left and action 1 to the right. Each step pays
# 1. The episode terminates when the pole falls or the cart leaves the track.
#
# Here are two policies of one line. The first pushes to the side to which the pole leans. The second pushes to
# the side to which the pole will lean in a tenth of a second. (`gym` is Gymnasium.)


# %%
def play_cartpole(policy: Callable[[np.ndarray], bool]) -> tuple[float, bool, bool]:
    """Play one episode; return its return and the two flags of its last step."""
    env = gym.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    episode_return, terminated, truncated = 0.0, False, False
    while not (terminated or truncated):
        action = int(policy(obs))
        obs, reward, terminated, truncated, _ = env.step(action)
        episode_return += float(reward)
    return episode_return, terminated, truncated


lean = play_cartpole(lambda obs: obs[2] > 0)
look_ahead = play_cartpole(lambda obs: obs[2] + 0.1 * obs[3] > 0)
for name, (episode_return, terminated, truncated) in (("lean", lean), ("look ahead", look_ahead)):
    print(f"{name:10}  return {episode_return:3.0f}   terminated {terminated}   truncated {truncated}")
assert lean[1:] == (True, False) and look_ahead == (500, False, True)

# %% [markdown]
# The first policy drops the pole: its episode is terminated. The second keeps the pole up, and after 500 steps
# CartPole stops the episode: it is truncated. You know from Basics that this difference matters for learning.

# %% [markdown]
# ## Making an environment
#
# Gymnasium finds an environment by its id, such as `CartPole-v1`. Ids are easy to mistype, so the error
# names the nearest one. By hand: of `CartPole-v1` and `Acrobot-v1`, the mistyped `CartPool-v1` is
# nearest to the first, and `Pong` is near to neither.

# %%
#| export
def nearest(name: str, known: Sequence[str], before: str = "") -> str:
    """Return a space and a hint like `Did you mean 'CartPole-v1'?`, or nothing if none is close."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {before + close[0]!r}?" if close else ""

# %%
assert nearest("CartPool-v1", ["CartPole-v1", "Acrobot-v1"]) == " Did you mean 'CartPole-v1'?"
assert nearest("Pong", ["CartPole-v1", "Acrobot-v1"]) == ""

# %% [markdown]
# `make_env` makes an environment from an id and its keywords. An id may start with a module, as
# in `my_envs:Grid-v0`. Then that module is imported first, so that Gymnasium gets to know its
# environments. What follows the colon may also be a class or a function of the module:
# `my_envs:make_grid` is called to make one. It may put *wrappers* around it: a wrapper is an
# environment that contains another one, and changes what goes in or comes out. Whatever goes
# wrong becomes a `ValueError` that says what to do; you can skip the branches, which only choose
# the message.

# %%
#| export
MAKERS: dict[str, Callable[..., gym.Env]] = {}  # those of this process that nobody can import


def find_maker(env_id: str) -> Callable[..., gym.Env]:
    """Return what makes an environment: a function or class of a module, or Gymnasium's `make`."""
    if env_id in MAKERS:
        return MAKERS[env_id]
    module, _, name = env_id.rpartition(":")
    if module and module != "local":
        found = getattr(importlib.import_module(module), name, None)
        if callable(found):
            return found
    if module in ("local", "__main__"):
        raise ValueError(
            f"Environment {env_id!r} was defined inside another program: move what makes it to a "
            f"module of its own, and name it `module:{name}`."
        )
    return functools.partial(gym.make, name)


def what_is_meant(env_id: str) -> str:
    """Say what is missing for an id that nobody knows, and name the nearest one."""
    module, colon, name = env_id.rpartition(":")
    if module and name.isidentifier():  # a function or a class: an id ends in a version
        inside = vars(importlib.import_module(module))
        hint = nearest(name, [key for key in inside if callable(inside[key])], module + colon)
        return f" The module {module!r} has no function {name!r}.{hint}"
    listed = " `gymnasium.pprint_registry()` lists the known ones."
    return nearest(name, list(gym.registry), module + colon) or listed


def missing_module(error: ModuleNotFoundError) -> str:
    """Say which module is missing, and how to make it known."""
    return (
        f"needs the module {error.name!r}, which is not installed or not on the path: install it, "
        "or start from the folder that holds it, or add that folder to PYTHONPATH."
    )


def make_env(
    env_id: str, env_kwargs: dict[str, Any] | None = None, render_mode: str | None = None
) -> gym.Env:
    """Make one environment: `Name-v0`, `module:Name-v0`, or `module:function` that makes it."""
    kwargs = dict(env_kwargs or {})
    if render_mode is not None:  # an environment without rendering need not know the keyword
        kwargs["render_mode"] = render_mode
    try:
        env = find_maker(env_id)(**kwargs)
    except ModuleNotFoundError as error:
        raise ValueError(f"Environment {env_id!r} {missing_module(error)}") from error
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise ValueError(f"Environment {env_id!r} cannot be made here: {error}") from error
    except gym.error.Error as error:
        raise ValueError(f"There is no environment {env_id!r}.{what_is_meant(env_id)}") from error
    except ValueError:
        raise  # the environment explains its own mistake
    except Exception as error:
        reason = str(error).partition(" was raised from the environment creator")[0]
        what = f"cannot be made: {type(error).__name__}: {reason}"
        if kwargs:
            what = f"does not take the env_kwargs {kwargs}: {reason}"
        raise ValueError(f"Environment {env_id!r} {what}.") from error
    if not isinstance(env, gym.Env):
        raise ValueError(f"{env_id!r} made a {type(env).__name__}, which is no gymnasium.Env.")
    for space in ("observation_space", "action_space"):
        if not isinstance(getattr(env, space, None), gym.Space):
            raise ValueError(f"{env_id!r} has no {space}: set self.{space} in its __init__.")
    return env

# %%
assert make_env("CartPole-v1").observation_space.shape == (4,)
assert make_env("CartPole-v1", {"max_episode_steps": 7}).spec.max_episode_steps == 7
for wrong, kwargs in (
    ("CartPool-v1", {}),
    ("my_envs:Grid-v0", {}),
    ("rlbook.envs:TMase", {}),
    ("CartPole-v1", {"lenght": 3}),
):
    try:
        make_env(wrong, kwargs)
    except ValueError as error:
        print(error)

# %% [markdown]
# In Python you need no id. An agent of this book, such as `DQN` of [a later chapter](dqn.ipynb),
# takes a function, a class or an instance as well: `DQN(make_grid)`, `DQN(Grid)`, `DQN(env)`.
# `name_env` finds the id that the agent stores in its settings. A class or a function of a module
# gets an id that other processes can import. An instance that `gym.make` made without keywords
# keeps its own id, unless you have changed its constants, as in `env.unwrapped.gravity = 3.7`. (That
# compares numbers, texts and arrays; what else you change needs a function that makes it.)
# Anything else gets an id that only this process knows: a lambda, a function inside a function, an
# instance that was changed or has wrappers around it. An agent needs several copies of its
# environment, at least one to learn in and one to be evaluated in, so it must be possible to copy
# an instance.

# %%
#| export
def name_env(env: Any) -> str:
    """Return the `env_id` of an environment that is given as a class, a function or an instance."""
    if isinstance(env, gym.Env):
        spec = env.spec
        if spec is not None and spec.id in gym.registry and spec == gym.spec(spec.id):
            fresh = gym.make(spec.id)
            fresh.close()
            if same_constants(env, fresh):
                return spec.id
        return keep_maker(type(env.unwrapped).__name__, copier(env))
    if not callable(env):
        raise ValueError(
            "An environment is a Gymnasium id, an instance, or a class or function that makes one, "
            f"not {env!r}."
        )
    module, name = getattr(env, "__module__", ""), getattr(env, "__qualname__", "maker")
    if getattr(sys.modules.get(module), name, None) is env:
        return f"{module}:{name}"
    return keep_maker(name, env)


def same_constants(env: gym.Env, fresh: gym.Env) -> bool:
    """Say whether numbers, texts and arrays in an environment are still those of a new one."""
    found, made, kinds = vars(env.unwrapped), vars(fresh.unwrapped), int | float | str | np.ndarray
    constants = [name for name, value in made.items() if isinstance(value, kinds)]
    return all(k in found and np.array_equal(found[k], made[k]) for k in constants)


def keep_maker(name: str, maker: Callable[..., gym.Env]) -> str:
    """Keep a maker that nobody can import under a name that is free in this process."""
    same = (f"local:{name}" + (f"-{i}" if i else "") for i in range(len(MAKERS) + 1))
    env_id = next(free for free in same if MAKERS.get(free, maker) is maker)
    MAKERS[env_id] = maker
    return env_id


def copier(env: gym.Env) -> Callable[[], gym.Env]:
    """Return a function that makes environments like this one, by copying or from its spec."""
    makers: list[Callable[[], gym.Env]] = []
    with suppress(Exception):  # what a simulator raises when it is copied is anybody's guess
        kept = copy.deepcopy(env)  # as it is now: its owner may change it later
        makers.append(functools.partial(copy.deepcopy, kept))
    if env.spec is not None:
        makers.append(functools.partial(gym.make, env.spec))
    for maker in makers:
        with suppress(Exception):
            made = maker()
            made.close()
            if not same_constants(env, made):
                what = f"Copies of {env} are without what was changed in it"
                warnings.warn(f"{what}: give a function that makes one.", stacklevel=2)
            return maker
    raise ValueError(
        f"{env} cannot be copied, and an agent needs several: give a function that makes one."
    )

# %%
def make_short(limit: int = 7) -> gym.Env:
    """Make a CartPole with a time limit of its own."""
    return gym.wrappers.TimeLimit(CartPoleEnv(), limit)


for given in (make_short, CartPoleEnv, gym.make("CartPole-v1"), make_short(), lambda: make_short(3)):
    env_id = name_env(given)
    print(f"{env_id:55} {make_env(env_id).action_space}")
assert make_env(name_env(make_short), {"limit": 3}) is not make_env(name_env(make_short), {"limit": 3})
try:
    make_env("local:make_long")  # as another process sees it
except ValueError as error:
    print(error)

# %% [markdown]
# ## Seeds
#
# An environment has its own random generator, and `reset(seed=…)` sets it. The same seed and the same
# actions give the same episode. A `reset` without a seed continues with the generator as it is.

# %%
env = make_env("CartPole-v1")
first, _ = env.reset(seed=5)
following, _ = env.reset()
again, _ = env.reset(seed=5)
assert (first == again).all() and (first != following).any()

# %% [markdown]
# A training run needs many seeds: one for each environment, one for the networks, one for each
# evaluation. The usual recipe is to count: environment $i$ of run $s$ gets the seed $s + i$. Look at
# what this does to five runs with four environments each. The colour of a square is the angle of the
# pole at the start of an episode.

# %% tags=["hide-input"]
def first_angles(seed_of: Callable[[int, int], int]) -> np.ndarray:
    """Return the first angle of the pole (runs, environments), in degrees."""
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
# On the left, the same colours run along the diagonals: run 1 repeats three of the four episodes of run 0. Five
# such runs are not independent, and their mean looks more certain than it is.
#
# So this book derives seeds. A seed starts as a name, such as `0/envs/3`, and the hash of that name is the
# number. Names that differ in one character have unrelated hashes, and the hash is the same on every machine.
# By hand, with the shell: `printf 0 | sha256sum` prints `5feceb66…`. The first four bytes are 5f, ec, eb and 66.
# Read from the last to the first, they are the number 0x66ebec5f.

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
# ## Environments with known values
#
# When an agent does not learn CartPole, the reason can be anywhere. When it does not learn that a single step
# pays 1, there are few places to look. Each of the five *probes* below tests one part of an agent, and you can
# compute its Q-values in your head:
#
# | `rlbook/…-v0` | what happens | right $Q$ | if wrong, look at |
# |---|---|---|---|
# | `OneStep` | one step, reward 1 | $1$ | loss, learning rate |
# | `TwoStep` | two steps, reward 1 at the end | $\gamma$, then $1$ | target, discount |
# | `ObservationReward` | one step, the reward is the observation $o = \pm 1$ | $o$ | observations |
# | `ActionReward` | one step, reward 1 if the action fits the observation, else −1 | $\pm 1$ | actions |
# | `ConstantReward` | reward 1 for ever, truncated after `limit` steps | $1/(1-\gamma)$ | truncation |
#
# Gymnasium must know them by their ids. The class is given as text, `rlbook.envs:TwoStep`, and is looked up
# when an environment is made. So the id always means the class in the library, even in this notebook, which
# defines a class of the same name.

# %%
#| export
def register_env(name: str, max_episode_steps: int | None = None) -> None:
    """Make the class `name` of this module known to Gymnasium as `rlbook/name-v0`, once."""
    env_id = f"rlbook/{name}-v0"
    if env_id not in gym.registry:
        gym.register(env_id, f"rlbook.envs:{name}", max_episode_steps=max_episode_steps)

# %%
register_env("TwoStep")  # a second time does nothing: the library has registered it already
assert gym.registry["rlbook/TwoStep-v0"].entry_point == "rlbook.envs:TwoStep"

# %% [markdown]
# All probes show one number and have two actions. With `continuous=True` the action is a number from −1 to 1
# instead, for the agents of later chapters. One class holds what they share. Its `sign`, −1 or 1 at random, is
# what some of them show.

# %%
#| export
class Probe(gym.Env[np.ndarray, Any]):
    """One number to see, one choice, and known values; the probes below fill it in."""

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
        """Start an episode and sample its sign, -1 or 1."""
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
# In the first two, the action does not matter.

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
# In the next two, the reward depends on the observation, and then on the action as well.

# %%
#| export
class ObservationReward(Probe):
    """The observation is -1 or 1, and one step pays just that: Q = observation."""

    def observe(self) -> float:
        return self.sign

    def reward(self, action: Any) -> float:
        return self.sign


class ActionReward(Probe):
    """At the observation -1 action 0 is correct, at 1 action 1: Q = 1 if correct, else -1.

    A continuous action a pays 1 - (a - observation / 2)², so observation / 2 is best and pays 1.
    """

    def observe(self) -> float:
        return self.sign

    def reward(self, action: Any) -> float:
        if isinstance(self.action_space, Discrete):
            return 1.0 if (action == 1) == (self.sign > 0) else -1.0
        return 1.0 - (float(action[0]) - self.sign / 2) ** 2

# %% [markdown]
# The last never terminates. It is only truncated.

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
# Play them and check each row of the table.

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


assert play(make_env("rlbook/OneStep-v0"), 0, seed=0) == (1.0, [1.0])
assert play(make_env("rlbook/TwoStep-v0"), 0, seed=0) == (-1.0, [0.0, 1.0])  # Q = 0 + gamma * 1
for seed in range(10):
    o, (reward,) = play(make_env("rlbook/ObservationReward-v0"), 0, seed)
    assert reward == o
    o, (reward,) = play(make_env("rlbook/ActionReward-v0"), 1, seed)
    assert reward == o  # action 1 fits the observation 1
    probe = make_env("rlbook/ActionReward-v0", {"continuous": True})
    o, (reward,) = play(probe, np.array([0.5], np.float32), seed)
    assert reward == (1.0 if o > 0 else 0.0)  # 1 - (0.5 + 0.5)² = 0
assert play(make_env("rlbook/ConstantReward-v0", {"limit": 4}), 0, seed=0) == (1.0, [1.0] * 4)

# %% [markdown]
# ## Vector environments
#
# A small network takes about as long for eight observations as for one, because they go through it as
# one batch. So the agents of this book step several copies of an environment side by side, as one
# *vector environment*. It takes an array with one action for each copy and returns an array with one
# observation for each copy. The copies end their episodes at different steps, so each must restart by
# itself. When exactly?
#
# What an agent learns from is a *transition*: an observation, the action, the reward, the next observation and
# the flag `terminated`. Here is a loop that stores transitions. It runs one copy of `TwoStep`, in which only
# two transitions are possible: −1 → 0 with reward 0, and 0 → 1 with reward 1, terminated.

# %%
# Observation, reward, next observation, terminated. The action is left out: it is always 0 here.
Transition = tuple[float, float, float, bool]


def naive_transitions(envs: gym.vector.VectorEnv, steps: int) -> list[Transition]:
    """Store each step of one environment just as it comes."""
    obs, _ = envs.reset(seed=0)
    transitions = []
    for _ in range(steps):
        action = np.zeros(envs.num_envs, dtype=np.int64)
        next_obs, reward, terminated, _, _ = envs.step(action)
        transitions.append((obs.item(), reward.item(), next_obs.item(), terminated.item()))
        obs = next_obs
    return transitions


def show(transitions: list[Transition]) -> None:
    """Print transitions, and mark those that are impossible in `TwoStep`."""
    print("obs -> next obs          terminated")
    possible = {(-1.0, 0.0, 0.0, False), (0.0, 1.0, 1.0, True)}
    for obs, reward, next_obs, terminated in transitions:
        wrong = "" if (obs, reward, next_obs, terminated) in possible else "   <- impossible"
        print(f"{obs:4.0f} ->{next_obs:3.0f}   reward {reward:.0f}   {terminated!s:5}{wrong}")


makers = [lambda: make_env("rlbook/TwoStep-v0")]  # functions: each is called to make one copy
next_step = naive_transitions(SyncVectorEnv(makers), 6)
show(next_step)
assert next_step.count((1.0, 0.0, -1.0, False)) == 2

# %% [markdown]
# By default, Gymnasium restarts a copy in the **next step**. That step ignores its action, pays 0 and returns
# the first observation of the new episode. So every third transition here says that the end of one episode
# leads to the start of the next. If episodes have $T$ steps, one transition in $T + 1$ is false.
#
# With `AutoresetMode.SAME_STEP`, a copy restarts **within the step** that ends its episode. Now every
# transition is a real step. But the next observation of the last step is already the first one of the new
# episode:

# %%
same_step = naive_transitions(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP), 4)
show(same_step)
assert same_step.count((0.0, 1.0, -1.0, True)) == 2

# %% [markdown]
# The true last observation is not lost. It is in `infos["final_obs"]`, and the mask `infos["_final_obs"]` says
# which copies have one. At a terminated step nobody needs it, because nothing follows. At a truncated step the
# target bootstraps from its value, so it must be the right one.
#
# So every agent of this book uses two functions. `make_vector_env` makes the vector environment in
# this mode, and `true_next_obs` puts the true last observations back. Each copy gets two wrappers.
# `KeepLast` copies the last observation, because some environments return the same array at each
# step, and the reset would overwrite it. `CheckShapes` raises a `Mistake` if an environment of your
# own returns a wrong shape. Without it, NumPy might broadcast one number over a whole observation.
# A `Mistake` is a `ValueError` that says in a sentence what is wrong and needs no traceback.

# %%
#| export
class KeepLast(gym.Wrapper[Any, Any, Any, Any]):
    """Copies the last observation of an episode, which the reset might overwrite."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            obs = copy.deepcopy(obs)
        return obs, reward, terminated, truncated, info


class Mistake(ValueError):
    """What an environment or an algorithm of one's own does wrong, in a sentence."""


def one_number(reward: Any) -> float:
    """Return a reward as a float, or say that it is none."""
    value = np.asarray(reward)
    if value.size != 1 or value.dtype.kind not in "fiub":
        what = f"the reward {reward!r}, which is not one number"
        raise Mistake(f"The environment returned {what}.")
    return float(value.item())


class CheckShapes(gym.Wrapper[Any, Any, Any, Any]):
    """Raises a `Mistake` when an environment does not return what Gymnasium asks for."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.space = env.observation_space
        self.shape = self.space.shape  # looked up once: each step is checked

    def check(self, returned: Any, what: str) -> None:
        """Compare what a method returned with `what` it should return, and with the space."""
        if not isinstance(returned, tuple) or len(returned) != len(what.split(", ")):
            raise Mistake(
                f"The environment returned something else than `{what}`, which Gymnasium asks for."
            )
        found = np.shape(returned[0])
        if self.shape is not None and found != self.shape:
            raise Mistake(
                f"The environment returned an observation of the shape {found}, but its space says "
                f"{self.shape}."
            )
        if isinstance(self.space, Discrete) and not self.space.contains(returned[0]):
            raise Mistake(
                f"The environment returned the observation {returned[0]}, but its space is "
                f"{self.space}."
            )

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        try:
            returned = self.env.reset(**options)
        except TypeError as error:
            if "unexpected keyword argument 'seed'" not in str(error):
                raise
            how = "write `def reset(self, *, seed=None, options=None)`"
            raise Mistake(f"The environment's `reset` takes no seed: {how}.") from error
        self.check(returned, "obs, info")
        return returned

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        returned = self.env.step(action)
        self.check(returned, "obs, reward, terminated, truncated, info")
        obs, reward, terminated, truncated, info = returned
        return obs, one_number(reward), terminated, truncated, info


def try_env(env: gym.Env) -> None:
    """Reset an environment and take a step, so that a mistake is told before a run begins."""
    space = copy.deepcopy(env.action_space)  # which has a generator of its own
    space.seed(0)
    checked = CheckShapes(env)
    try:
        checked.reset(seed=0)
        checked.step(space.sample())
    except Mistake:
        raise
    except Exception as error:
        if env.unwrapped is not env:
            try_env(env.unwrapped)  # a wrapper may have stumbled over what this one returns
        error.add_note("The environment raised this when it was tried.")
        raise


def make_vector_env(
    env_id: str,
    num_envs: int,
    env_kwargs: dict[str, Any] | None = None,
    vectorize: Literal["sync", "async"] = "sync",
) -> SyncVectorEnv | AsyncVectorEnv:
    """Make `num_envs` copies that step together and reset within the step that ends an episode."""
    learner, maker = os.getpid(), MAKERS.get(env_id)

    def make() -> gym.Env:
        if os.getpid() != learner:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that learns decides
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            MAKERS.update({env_id: maker} if maker else {})
        return KeepLast(CheckShapes(make_env(env_id, env_kwargs)))

    kind: Any = SyncVectorEnv if vectorize == "sync" else AsyncVectorEnv
    return kind([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def close_vector_env(envs: SyncVectorEnv | AsyncVectorEnv) -> None:
    """Close all environments, and end their processes if one of them is gone already."""
    try:
        envs.close(timeout=5)  # an answer that was read already never comes again
    except (EOFError, ConnectionError):
        assert isinstance(envs, AsyncVectorEnv)
        envs.closed = True
        for process in envs.processes:
            process.terminate()
            process.join()


def true_next_obs(next_obs: np.ndarray, infos: dict[str, Any]) -> np.ndarray:
    """Replace the first observation of a new episode by the last one of the episode before it."""
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
    next_obs = true_next_obs(after, infos)
    stored.append((obs.item(), reward.item(), next_obs.item(), terminated.item()))
    obs = after  # the agent acts next on the first observation of the new episode
show(stored)
assert stored == [(-1.0, 0.0, 0.0, False), (0.0, 1.0, 1.0, True)] * 2

# %% [markdown]
# ### Processes for slow simulators
#
# The copies of a `SyncVectorEnv` step one after the other, so the agent waits for the sum of their
# times. With `vectorize="async"` (`vectorize: async` in the settings) each copy has a process of
# its own, and the agent waits for the slowest. Sending observations between processes costs a
# fraction of a millisecond. So this does not pay for CartPole, but with a simulator that takes
# milliseconds for a step it is almost `num_envs` times as fast, if there are enough cores:


# %%
class Slow(CartPoleEnv):
    """CartPole whose step takes five milliseconds."""

    def step(self, action: int) -> Any:
        """Take a nap and a step."""
        time.sleep(0.005)
        return super().step(action)


def speed(num_envs: int, vectorize: str) -> float:
    """Measure environment steps per second."""
    envs = make_vector_env(name_env(Slow), num_envs, vectorize=vectorize)
    envs.reset(seed=0)
    moments = [time.perf_counter()]
    for _ in range(100):
        envs.step(np.zeros(num_envs, dtype=np.int64))
        moments.append(time.perf_counter())
    envs.close()
    return num_envs / np.quantile(np.diff(moments), 0.1)  # others may use the machine, too


speeds = {(n, kind): speed(n, kind) for n, kind in ((1, "sync"), (4, "sync"), (4, "async"))}
for (number, kind), found in speeds.items():
    print(f"{number} {kind:5}  {found:4.0f} steps per second")
assert speeds[4, "async"] > 2 * speeds[1, "sync"]

# %% [markdown]
# ## Only `terminated` stops bootstrapping
#
# `ConstantReward` is the warm shelf of [Basics](basics.ipynb) as an environment: it pays 1 at every step for
# ever, and you watch $T$ steps at a time. With $\gamma = 0.9$ its true value is $1/(1-\gamma) = 10$. Much code
# joins the two flags into one, `done = terminated or truncated`, and bootstraps only if `done` is false. Then one
# target in $T$ is 1, all others are $1 + \gamma V$, and the learned value is their mean:
#
# $$V = 1 + \gamma \Bigl(1 - \frac{1}{T}\Bigr) V
# \quad\Rightarrow\quad V_\text{done} = \frac{1}{1 - \gamma (1 - 1/T)}$$
#
# By hand for $T = 10$: $1 / (1 - 0.9 \cdot 0.9) = 1 / 0.19 \approx 5.26$, about half of the true value. The
# figure shows what temporal-difference learning finds for other limits $T$.

# %%
gamma, alpha = 0.9, 0.02


def done_value(gamma: float, limit: int) -> float:
    """Return the value that is learned when a truncated step counts as the end."""
    return 1 / (1 - gamma * (1 - 1 / limit))


def learned_value(limit: int, stop_when_truncated: bool, steps: int = 4_000) -> float:
    """Learn the value of `ConstantReward` step by step; return the mean over the last 400 steps."""
    env = make_env("rlbook/ConstantReward-v0", {"limit": limit})
    env.reset(seed=0)
    value, history = 0.0, []
    for _ in range(steps):
        _, reward, terminated, truncated, _ = env.step(0)
        stop = terminated or (truncated and stop_when_truncated)
        target = float(reward) + gamma * value * (not stop)
        value += alpha * (target - value)
        history.append(value)
        if terminated or truncated:
            env.reset()
    return float(np.mean(history[-400:]))


limits = [1, 2, 5, 10, 20, 50, 100, 200]
right = [learned_value(limit, stop_when_truncated=False) for limit in limits]
wrong = [learned_value(limit, stop_when_truncated=True) for limit in limits]
assert abs(done_value(0.9, 10) - 1 / 0.19) < 1e-12
assert all(abs(value - 10) < 0.01 for value in right)
assert all(abs(v - done_value(gamma, limit)) < 0.1 for v, limit in zip(wrong, limits, strict=True))

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(7, 3.2))
grid = np.geomspace(1, 200, 100)
ax.axhline(10, color=COLORS["reference"], linestyle="--", label="true value, 1/(1−γ)")
ax.plot(limits, right, "s", color=PALETTE[0], label="learned, ends at terminated")
ax.plot(grid, 1 / (1 - gamma * (1 - 1 / grid)), ":", color=COLORS["reference"], label="1/(1−γ(1−1/T))")
ax.plot(limits, wrong, "o", color=PALETTE[3], label="learned, ends at terminated or truncated")
ax.set(xscale="log", xlabel="time limit T (steps)", ylabel="value", ylim=(0, 11), xticks=limits)
ax.set_xticklabels(limits)
ax.minorticks_off()
ax.legend(loc="lower right")
plt.show()

# %% [markdown]
# The wrong values are not a matter of learning longer: they have settled on a wrong number. No network,
# learning rate or amount of data repairs that. So the rule of this book is: **only `terminated` stops
# bootstrapping; `truncated` never does.** Agents store `terminated` with each transition. `truncated`
# only tells them where an episode was cut.

# %% [markdown]
# ## A mean and its interval
#
# A policy is judged by its return, and returns differ from episode to episode. After a "±"
# people write one of two things. The standard deviation $s$ says how much *episodes* differ. It does not shrink
# when you play more of them. Half the width of an interval says how well you know the *mean*, and it shrinks
# with the number of episodes.
#
# How would the mean differ if you evaluated again? You have only these $n$ returns, so you pretend
# that they are all there is: sample $n$ of them with replacement, take the mean, and repeat. The
# middle 95 % of these means are the **bootstrap interval**. (It has nothing to do with
# bootstrapping from a value estimate.) It never reaches beyond the smallest and the largest
# return, so it never contains an impossible return, as a mean ± an error can.
#
# By hand: the returns 1, 2 and 3 can be sampled in $3^3 = 27$ ways. One of them is 1, 1, 1, with the mean 1.
# That is 3.7 % of all, more than the 2.5 % that are cut off at this end, so the interval starts at 1. In the
# same way it ends at 3. ([Figures](figures.ipynb) checks how often the interval is right, and draws it around
# learning curves.)
#
# The code computes all resampled means at once: it samples how often each return is picked, and
# multiplies these counts by the returns. Its generator always starts from the same seed, so the
# same returns always have the same interval.

# %%
#| export
def mean_interval(
    values: np.ndarray, axis: int = 0, confidence: float = 0.95
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean and the two ends of its bootstrap interval along `axis`."""
    values = np.moveaxis(np.asarray(values, dtype=np.float64), axis, 0)
    count, mean = len(values), values.mean(axis=0)
    if count < 2:  # one value has no spread to estimate
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    counts = np.random.default_rng(0).multinomial(count, [1 / count] * count, size=2_000)
    means = np.tensordot(counts / count, values, axes=1)  # (resamples, ...)
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2], axis=0)
    return mean, low, high

# %%
mean, low, high = mean_interval(np.array([1.0, 2.0, 3.0]))
assert np.allclose([mean, low, high], [2, 1, 3])
assert np.isnan(mean_interval(np.array([1.0]))[1])  # one episode says nothing about the spread

# %% [markdown]
# An evaluation returns an `Evaluation`. Its `std` describes the episodes, its `interval` the mean.

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
        """The 95 % bootstrap interval of the mean."""
        _, low, high = mean_interval(self.returns)
        return float(low), float(high)

# %%
three = Evaluation(returns=np.array([1.0, 2.0, 3.0]), lengths=np.array([1, 2, 3]))
assert three.mean == 2 and abs(three.std - np.sqrt(2 / 3)) < 1e-12
assert np.allclose(three.interval, (1, 3))

# %% [markdown]
# ## Which episodes count
#
# How do you play twenty episodes in ten environments? The obvious way is to let all of them run and to take the
# first twenty episodes that finish. It is wrong, because **short episodes finish first**.
#
# By hand: an episode lasts 1 step or 100 steps, each with probability ½, and pays 1 a step. The true mean
# is 50.5. Take two environments and the first two episodes to finish.
#
# | first episodes | probability | the first two to finish | their mean |
# |---|---|---|---|
# | short, short | ¼ | 1, 1 | 1 |
# | one short, one long; the next one short | ¼ | 1, 1 | 1 |
# | one short, one long; the next one long | ¼ | 1, 100 | 50.5 |
# | long, long | ¼ | 100, 100 | 100 |
#
# On average this gives $(1 + 1 + 50.5 + 100) / 4 = 38.125$, a quarter below the truth.

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
# The solution is to fix *which* episodes count before any of them starts. `evaluate` numbers its
# episodes, seeds each by its number, and plays all of them to the end: an environment that has
# finished one takes the next. So a few environments are enough for many episodes. If they are copies
# of one, and the policy is not random, the result does not depend on how many there are. Without
# `episodes` each environment plays one. A run lets up to twenty play side by side: a small network
# needs about as long for twenty observations as for one, so this is several times as fast as one
# episode after another.
#
# Some environments never end. With `max_steps` an episode is cut after that many steps, with a
# warning, because its return is then only what was earned so far. `stop` is called at each step,
# and if it returns true, `evaluate` raises `KeyboardInterrupt`. A run uses this to react to a
# signal.
#
# At each step `evaluate` calls the policy once, with the observations of all environments. Some
# policies carry something from step to step, for example the last observation. This is called
# their *hidden state*. So a policy takes three things: the observations, its hidden state (`None`
# at first) and a flag for the first step of an episode. It returns the actions and its new hidden
# state; without a hidden state it returns `None`. In the code the argument `state` is this hidden
# state, not the state of the environment. Every agent of this book has a policy of this form.

# %%
#| export
Policy = Callable[[np.ndarray, Any, np.ndarray], tuple[np.ndarray, Any]]


EVALUATION_ENVS = 20  # no more than so many play at once, however many episodes there are


def evaluate(
    policy: Policy,
    envs: Sequence[gym.Env],
    seed: int,
    episodes: int | None = None,
    max_steps: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Play episodes side by side, with one call of the policy for all environments at each step."""
    episodes = len(envs) if episodes is None else episodes
    if not envs or episodes < 1:
        raise ValueError("An evaluation needs at least one episode.")
    count, space = min(len(envs), episodes), envs[0].observation_space
    envs = [CheckShapes(env) for env in envs]  # as in training
    obs = np.zeros((count, *(space.shape or ())), space.dtype)
    for i in range(count):
        obs[i], _ = envs[i].reset(seed=derive_seed(seed, i))
    returns, lengths, cut = np.zeros(episodes), np.zeros(episodes, dtype=np.int64), 0
    playing = list(range(count))  # the episode in each environment
    waiting = iter(range(count, episodes))
    running, episode_start, state = np.ones(count, dtype=bool), np.ones(count, dtype=bool), None
    while running.any():
        if stop():
            raise KeyboardInterrupt
        actions, state = policy(obs, state, episode_start)
        obs, episode_start = obs.copy(), np.zeros(count, dtype=bool)  # the policy may keep the old
        for i in np.flatnonzero(running).tolist():
            episode = playing[i]
            obs[i], reward, terminated, truncated, _ = envs[i].step(actions[i])
            returns[episode] += float(reward)
            lengths[episode] += 1
            too_long = lengths[episode] == max_steps and not (terminated or truncated)
            cut += too_long
            if terminated or truncated or too_long:
                playing[i] = next(waiting, episodes)
                running[i] = episode_start[i] = playing[i] < episodes
                if running[i]:
                    obs[i], _ = envs[i].reset(seed=derive_seed(seed, playing[i]))
    if cut:
        warnings.warn(
            f"{cut} of {episodes} episodes of an evaluation had not ended after {max_steps:,} "
            "steps and were cut there: 'eval_max_steps' is the limit.",
            stacklevel=2,
        )
    return Evaluation(returns, lengths)

# %% [markdown]
# By hand: in `TwoStep` each episode has the return 1 and the length 2. Two copies of
# `ConstantReward` with the limits 3 and 5 return 3 and 5. If three episodes are asked for, the
# first copy plays the third one while the second copy goes on.

# %%
def always_0(obs: np.ndarray, state: Any, episode_start: np.ndarray) -> tuple[np.ndarray, Any]:
    """Play action 0 in all environments."""
    return np.zeros(len(obs), dtype=np.int64), None


result = evaluate(always_0, [make_env("rlbook/TwoStep-v0") for _ in range(3)], seed=0)
assert result.returns.tolist() == [1, 1, 1] and result.lengths.tolist() == [2, 2, 2]
pair = [make_env("rlbook/ConstantReward-v0", {"limit": limit}) for limit in (3, 5)]
assert evaluate(always_0, pair, seed=0).returns.tolist() == [3, 5]
# Three episodes in two environments: the first to end plays one more.
assert evaluate(always_0, pair, seed=0, episodes=3).returns.tolist() == [3, 5, 3]

# %% [markdown]
# How wrong is the obvious way in practice? Take a random policy on CartPole. Play 2,000 episodes one
# after the other, so that none can finish early; we take their mean as the truth. Then evaluate both
# ways with ten environments and ten episodes, 300 times each.

# %%
generator = np.random.default_rng(0)


def at_random(obs: np.ndarray, state: Any, episode_start: np.ndarray) -> tuple[np.ndarray, Any]:
    """Push to a random side."""
    return generator.integers(2, size=len(obs)), None


def first_to_finish(envs: SyncVectorEnv, count: int, seed: int) -> float:
    """Return the mean return of the first `count` random episodes that finish."""
    envs.reset(seed=[derive_seed(seed, i) for i in range(envs.num_envs)])
    returns, done = np.zeros(envs.num_envs), []
    while len(done) < count:
        _, reward, terminated, truncated, _ = envs.step(generator.integers(2, size=envs.num_envs))
        returns += reward
        done += returns[terminated | truncated].tolist()
        returns[terminated | truncated] = 0
    return float(np.mean(done[:count]))


one = [make_env("CartPole-v1")]
lengths = np.array([evaluate(at_random, one, seed).lengths[0] for seed in range(2_000)])
truth = lengths.mean()  # in CartPole the return is the length
vector, ten = make_vector_env("CartPole-v1", 10), [make_env("CartPole-v1") for _ in range(10)]
naive = mean_interval(np.array([first_to_finish(vector, 10, seed) for seed in range(300)]))
fair = mean_interval(np.array([evaluate(at_random, ten, seed).mean for seed in range(300)]))
print(f"{'2,000 episodes':18}  {truth:.1f}")
for name, (centre, low_end, high_end) in (("first 10 to finish", naive), ("evaluate", fair)):
    print(f"{name:18}  {centre:.1f}, 95 % interval {low_end:.1f} to {high_end:.1f}")
assert naive[2] < 0.9 * truth and abs(fair[0] / truth - 1) < 0.1

# %% [markdown]
# Does it help to ask for more episodes? To find out quickly, sample lengths from the 2,000 episodes, let ten
# environments play them, and take the first $n$ that finish.

# %% tags=["hide-input"]
counts = [10, 20, 40, 80, 160]
streams = generator.choice(lengths, size=(1_000, 10, 100))  # (repeats, environments, episodes)
early = [np.mean([first_finished(stream, n).mean() for stream in streams]) for n in counts]
assert early[0] < 0.85 * truth and all(np.diff(early) > 0)
figure, ax = plt.subplots(figsize=(7, 3))
ax.plot(counts, early, "o-", color=PALETTE[3], label="first n to finish")
for x, (centre, low_end, high_end), marker, color, label in (
    (9.5, naive, "s", PALETTE[1], "first 10 to finish, as played above"),
    (10.5, fair, "D", PALETTE[0], "evaluate, as played above"),
):
    ax.plot([x, x], [low_end, high_end], color=color, linewidth=4, alpha=0.5)
    ax.plot(x, centre, marker, color=color, label=label)
ax.axhline(truth, color=COLORS["reference"], linestyle="--", label="mean of 2,000 episodes")
ax.set(xlabel="episodes n", ylabel="undiscounted return", ylim=(10, 26))
ax.set(xscale="log", xticks=counts, xticklabels=counts)
ax.set_title("CartPole, random policy, 10 environments; bars: 95 % interval of 300 evaluations")
ax.minorticks_off()
ax.legend(loc="lower right")
plt.show()
print(", ".join(f"n = {n}: {m / truth - 1:+.0%}" for n, m in zip(counts, early, strict=True)))

# %% [markdown]
# The error is about halved when the number of episodes doubles. `evaluate` does not have this bias:
# what is left is chance.

# %% [markdown]
# ## Seeing less: masked CartPole
#
# In CartPole an observation holds all that matters: it is the state. Often it holds less. A picture shows where
# things are and not how fast they move. Such a problem is called *partially observable*.
# `rlbook/MaskedCartPole-v0` is CartPole with both velocities hidden. Everything else is the same.

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
# Why is that hard? Set the cart in the middle and the pole upright, once moving to the left and once to the
# right, and push to the right both times. The observation (0, 0) is the same, but not what follows. By hand: a
# step lasts 0.02 s, so at an angular velocity of ±1 rad/s the angle changes by ±0.02 rad.

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
# Compare three policies. The first sees all four numbers and looks ahead, as at the start of the chapter. The
# second sees two, so it can only push to the side of the lean. The third sees two as well, but it keeps the last
# angle as its hidden state and computes the velocity from the difference.

# %%
def with_velocity(obs: np.ndarray, state: Any, start: np.ndarray) -> tuple[np.ndarray, Any]:
    """Push to where the pole will lean in a tenth of a second; needs all four numbers."""
    return (obs[:, 2] + 0.1 * obs[:, 3] > 0).astype(np.int64), None


def without_velocity(obs: np.ndarray, state: Any, start: np.ndarray) -> tuple[np.ndarray, Any]:
    """Push to where the pole leans; the second of two numbers is the angle."""
    return (obs[:, 1] > 0).astype(np.int64), None


def with_hidden_state(obs: np.ndarray, state: Any, start: np.ndarray) -> tuple[np.ndarray, Any]:
    """Keep the last angle, and compute the velocity from the difference (a step is 0.02 s)."""
    angle = obs[:, 1]
    velocity = np.where(start, 0.0, (angle - (angle if state is None else state)) / 0.02)
    return (angle + 0.1 * velocity > 0).astype(np.int64), angle


full = [make_env("CartPole-v1") for _ in range(10)]
masked = [make_env("rlbook/MaskedCartPole-v0") for _ in range(10)]
scores = {
    "CartPole": evaluate(with_velocity, full, seed=0),
    "masked": evaluate(without_velocity, masked, seed=0),
    "masked, with a hidden state": evaluate(with_hidden_state, masked, seed=0),
}
for name, score in scores.items():
    low_end, high_end = score.interval
    print(f"{name:28} {score.mean:5.1f}   95 % interval {low_end:.1f} to {high_end:.1f}")
assert scores["masked"].mean < 100
assert scores["masked, with a hidden state"].mean > 400

# %% [markdown]
# One number in the hidden state is enough to balance the pole. Here you wrote by hand what to
# keep. [DRQN](drqn.ipynb) learns it.

# %% [markdown]
# ## Remembering longer: the T-maze
#
# In `rlbook/TMaze-v0` the agent sees a cue at the start of a corridor, walks `length` steps that all
# look the same, and at the junction must turn to the side that the cue named. The correct turn pays 1
# and the wrong one 0, so the mean return is the rate of success.
#
# An observation has two numbers: the cue (−1 for left, 1 for right, 0 after the start), and 1 at the junction.
# By hand for `length=2` and the cue "right": the agent sees (1, 0), (0, 0), (0, 1), and then turns.
#
# First the picture, which the agent does not see: a map of cells, 16 pixels wide each, with the
# corridor in the third of five rows. The agent walks to the right, so its left is up. By hand for
# `length=2` and the cue "right", counting from 0: there are five columns. The start is in column
# 1, the junction in column 3, and the goal below the junction, in row 3.

# %%
#| export
def draw_maze(length: int, cue: int, position: int, turn: int) -> np.ndarray:
    """Draw a T-maze from above: agent blue, goal green, cue orange while it is seen."""
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

# %% [markdown]
# And the maze itself:

# %%
#| export
class TMaze(gym.Env[np.ndarray, Any]):
    """A corridor of `length` steps; the cue at its start says which turn at its end pays 1.

    Action 0 turns left and 1 turns right at the junction; in the corridor both move forward. With
    `walk` only action 2 does. Observation: the cue (at the start), and whether you may turn.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}  # noqa: RUF012 (as in gym.Env)

    def __init__(
        self, length: int = 10, walk: bool = False, render_mode: str | None = None
    ) -> None:
        if not isinstance(length, int | np.integer) or length < 1:
            raise ValueError(f"TMaze needs a whole length of at least 1, not {length!r}.")
        self.length, self.walk, self.render_mode = length, walk, render_mode
        self.limit = 6 * length + 10  # with `walk`, a random policy takes 3 * length + 1.5
        self.observation_space = Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = Discrete(3 if walk else 2)

    def observe(self) -> np.ndarray:
        """Return the cue, -1 for left and 1 for right, at the start alone; 1 at the junction."""
        cue = self.cue if self.position == 0 else 0
        return np.array([cue, self.position == self.length], np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Go to the start and sample a cue."""
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
maze.reset(seed=0)
maze.cue = 1  # right, whatever the seed sampled
observations = [maze.observe().tolist()]
for action in (0, 0, 1):  # two steps along the corridor, then right
    obs, reward, terminated, truncated, _ = maze.step(action)
    observations.append(obs.tolist())
assert observations[:3] == [[1, 0], [0, 0], [0, 1]]
assert reward == 1 and terminated and not truncated

# %% [markdown]
# A policy that keeps the cue in its hidden state always succeeds. Here it is in a corridor of length 4.

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
# And a policy that only looks at the current observation? There are four observations and two actions, so there
# are $2^4 = 16$ such policies, apart from random ones. Try them all, with both cues.

# %%
def success(policy: dict[tuple[float, ...], int]) -> float:
    """Return the mean success over both cues of a policy that sees the current observation."""
    total = 0.0
    for cue in (-1, 1):
        maze = TMaze(length=3)
        maze.reset(seed=0)
        maze.cue, ended = cue, False
        obs = maze.observe()
        while not ended:
            obs, reward, terminated, truncated, _ = maze.step(policy[tuple(obs.tolist())])
            total, ended = total + reward, terminated or truncated
    return total / 2


inputs = [(-1.0, 0.0), (1.0, 0.0), (0.0, 0.0), (0.0, 1.0)]
choices = itertools.product([0, 1], repeat=4)
successes = [success(dict(zip(inputs, choice, strict=True))) for choice in choices]
mazes = [make_env("rlbook/TMaze-v0") for _ in range(100)]
print(f"16 policies without a hidden state: {min(successes)} to {max(successes)}")
print(f"with a hidden state, 100 episodes:  {evaluate(remember, mazes, seed=0).mean}")
assert set(successes) == {0.5} and evaluate(remember, mazes, seed=0).mean == 1

# %% [markdown]
# Each of them succeeds in exactly half of the episodes. A random policy is a mixture of the sixteen, so it
# cannot do better. A mean clearly above one half needs a hidden state, or another way to carry the cue: see
# exercise 4.

# %% [markdown]
# ## Honest edges
#
# The T-maze comes from Bakker (2001). Ours is simpler, so that remembering is the only difficulty:
#
# | | Bakker | here |
# |---|---|---|
# | actions | four directions | left, right; in the corridor both move forward |
# | start (Bakker's observations are three bits) | 011 or 110 | (−1, 0) or (1, 0) |
# | corridor, junction | 101, 010 | (0, 0), (0, 1) |
# | correct turn, wrong turn | 4, −0.1 | 1, 0 |
# | standing still | −0.1 | not possible |
#
# With `walk=True` there is a third action, "forward", and only this one moves. Then an agent can stand
# still. That pays 0, and the episode is truncated after $6 \cdot \text{length} + 10$ steps, more than
# twice what a random policy needs on average.
#
# - Evaluations step their environments one after the other in one process, with `vectorize: async` too.
# - `evaluate` waits for its longest episode, and calls the policy for ended episodes too.
# - A seed fixes an episode only if the environment uses its own generator and nothing else, such as the clock.

# %% [markdown]
# ## Exercises
#
# **Exercise 1.** Let an agent in `ConstantReward` see the number $t$ of steps so far, and give each $t$
# its own value $V_t$, 0 at first. Only `terminated` stops its bootstrapping, as it should. What does it
# learn for $V_0$, with $T = 10$ and $\gamma = 0.9$?
#
# <details>
# <summary>Solution</summary>
#
# No step starts at $t = T$, so $V_T$ is never updated and stays at 0. Then $V_{T-1} = 1$, $V_{T-2} = 1 + \gamma$,
# and $V_0 = 1 + \gamma + \dots + \gamma^9 \approx 6.51$, as if the cut were the end. Bootstrapping at a cut helps
# only if the agent knows something about the next observation, from other episodes or from similar observations.
# With the true value of 10 in place of $V_T$, it is exact:
#
# ```python
# for last, expected in ((0.0, (1 - 0.9**10) / (1 - 0.9)), (10.0, 10.0)):
#     V = np.zeros(11)
#     V[10] = last
#     for t in reversed(range(10)):
#         V[t] = 1 + 0.9 * V[t + 1]
#     assert abs(V[0] - expected) < 1e-9
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** How long must the limit of `ConstantReward` be, so that an agent that stops at `done` learns a
# value at most 1 % too low, at $\gamma = 0.9$? And at 0.99?
#
# <details>
# <summary>Solution</summary>
#
# $V_\text{done} / V = (1 - \gamma) / (1 - \gamma + \gamma / T) \ge 0.99$ gives
# $T \ge 99\,\gamma/(1-\gamma)$: 891 steps, and 9,801.
#
# ```python
# assert abs(done_value(0.9, 891) - 9.9) < 1e-9
# assert abs(done_value(0.99, 9801) - 99) < 1e-9
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** A loop stores every transition of `ConstantReward` with $T = 10$ from a vector
# environment that restarts in the next step, the false ones too. Only `terminated` stops its
# bootstrapping. Which value does it learn? Compute it first, then run it.
#
# <details>
# <summary>Solution</summary>
#
# One transition in 11 pays 0 and all of them bootstrap, so $V = \tfrac{10}{11} + \gamma V$ and $V = 9.09$ instead
# of 10.
#
# ```python
# envs = SyncVectorEnv([lambda: make_env("rlbook/ConstantReward-v0")])
# rewards = np.array([reward for _, reward, _, _ in naive_transitions(envs, 1_100)])
# assert abs(rewards.mean() / (1 - 0.9) - 100 / 11) < 1e-9
# ```
#
# </details>

# %% [markdown]
# **Exercise 4.** In the T-maze, let a policy see its own previous action beside the observation, and nothing
# else. It can now succeed always. How? And why does `walk=True` prevent this?
#
# <details>
# <summary>Solution</summary>
#
# In the corridor the action does not matter, so it can carry the cue: at the start take the action of the
# cue, and then always repeat the previous action. With `walk=True` only "forward" leads on, and after the first
# such step the previous action is "forward", whatever the cue was.
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
# **Exercise 5: find the bug.** This evaluation plays twenty episodes in one environment. Look at its intervals.

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
    low, high = each.interval
    print(f"seed {seed}: mean {each.mean:.1f}, interval {low:.1f} to {high:.1f}")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# `reset(seed=seed)` is inside the loop over episodes, so all twenty start from the same state, and a policy that
# is not random plays the same episode twenty times. The interval has no width, and yet you know the return of
# one episode only. Derive a seed for each episode:
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
# result = evaluate(lambda obs, state, start: ((obs[:, 2] > 0).astype(int), None), envs, seed=0)
# print(result.mean, result.interval)
# ```
#
# In the shell, every environment of this chapter is an `--env-id` like any other:
#
# ```
# rlbook train drqn --env-id rlbook/TMaze-v0 --env-kwargs "{length: 5}" --total-steps 5000
# ```

# %% [markdown]
# ## References
#
# * M. Towers et al., *Gymnasium: A Standard Interface for Reinforcement Learning Environments*,
#   2024, [arXiv:2407.17032](https://arxiv.org/abs/2407.17032).
# * F. Pardo, A. Tavakoli, V. Levdik, P. Kormushev, *Time Limits in Reinforcement Learning*, ICML
#   2018, [arXiv:1712.00378](https://arxiv.org/abs/1712.00378). Why a time limit is not an end.
# * B. Bakker, *Reinforcement Learning with Long Short-Term Memory*, NIPS 2001. The T-maze.
# * A. G. Barto, R. S. Sutton, C. W. Anderson, *Neuronlike Adaptive Elements That Can Solve
#   Difficult Learning Control Problems*, 1983. The cart and the pole.
# * A. L. Jones, [*Debugging RL, Without the Agonizing
#   Pain*](https://andyljones.com/posts/rl-debugging.html), 2021. Probe environments.
