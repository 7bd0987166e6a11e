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
# # The agent
#
# Every algorithm of this book is one class. Its own ideas (a network, a loss, a way to explore)
# are in its own chapter; what all algorithms share is here. At the end of this chapter you have
# the base class `Agent`. A new algorithm adds a few short methods and inherits everything that a
# user calls:
#
# ```python
# agent = DQN("CartPole-v1", seed=1)
# agent.learn(20_000)
# agent.evaluate(episodes=10).mean
# action, state = agent.predict(observation)
# agent.save("agent.pt")
# ```
#
# | | |
# |---|---|
# | Builds on | [Environments](envs.ipynb), [Replay](replay.ipynb), [Settings](settings.ipynb), [Checkpoints](checkpoint.ipynb) |
# | New here | what passes between agent and loop, the registry, an agent's own random numbers, `compile` |
# | Used by | [The run](run.ipynb), which holds the loop that calls all this |

# %% tags=["hide-input"]
#| export
import copy
import functools
import importlib
import importlib.resources
import os
import pickle
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from rlbook.checkpoint import (
    CheckpointDirectory,
    CheckpointError,
    plain_space,
    read_checkpoint,
    space_from_plain,
    write_checkpoint,
)
from rlbook.envs import (
    EVALUATION_ENVS,
    Evaluation,
    derive_seed,
    evaluate,
    make_env,
    missing_module,
    nearest,
)
from rlbook.preprocess import Preprocessing, prepared_space
from rlbook.replay import ReplayConfig, updates_due
from rlbook.settings import Config, gather_settings, make_config

if TYPE_CHECKING:  # a later chapter has the loop, which imports this module
    from rlbook.callbacks import Callbacks
    from rlbook.run import RunDirectory, RunResult

# %% [markdown]
# ## The smallest agent
#
# What is an agent, before any base class? Something that acts, observes the result, and learns.
# The smallest one plays a *multi-armed bandit*: there are no observations, and each action (an
# *arm*) pays a random reward. The agent keeps the mean reward of each action, which is the
# sample-average method. After the $n$-th reward $r$ of the action $a$,
#
# $$Q_{n+1}(a) = Q_n(a) + \tfrac{1}{n}\bigl(r - Q_n(a)\bigr).$$
#
# By hand: rewards 1, 0 and 2 for the same action give $Q = 1$, then $0.5$, then $1$.


# %%
class Averages:
    """The mean reward of each action so far."""

    def __init__(self, actions: int) -> None:
        self.q, self.n = torch.zeros(actions), torch.zeros(actions)

    def update(self, action: int, reward: float) -> None:
        """Move the mean of one action."""
        self.n[action] += 1
        self.q[action] += (reward - self.q[action]) / self.n[action]


averages = Averages(1)
for reward, q in ((1, 1.0), (0, 0.5), (2, 1.0)):
    averages.update(0, reward)
    assert averages.q[0] == q

# %% [markdown]
# And the loop around it. The first arm pays 1 with probability 0.3, the second with probability
# 0.7. One time in ten the agent explores: it plays an arm at random.

# %%
rng, averages = np.random.default_rng(0), Averages(2)
for _ in range(2_000):
    explores = rng.random() < 0.1
    action = int(rng.integers(2)) if explores else int(averages.q.argmax())  # act
    reward = float(rng.random() < (0.3, 0.7)[action])  # observe
    averages.update(action, reward)  # update
print("mean rewards:", averages.q.round(decimals=2).tolist(), "tries:", averages.n.int().tolist())
assert averages.q.argmax() == 1 and averages.n[1] > 1_500

# %% [markdown]
# Every algorithm of the book does these three things, in three methods: `act`, `observe` and
# `update`. A fourth, `build`, makes its networks and its buffer. Everything else that a user needs
# (settings, seeds, evaluation, files, a run that survives a kill) is the same for all. This
# chapter and [The run](run.ipynb) build it once. This is how its pieces work together:

# %% tags=["hide-input"]
import math

from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch

from rlbook.figures import COLORS, use_style

use_style()
figure, ax = plt.subplots(figsize=(7.5, 3.4))
boxes = {
    "environments": (0.1, 1.1, COLORS["reference"]),
    "loop": (2.6, 1.1, COLORS["reference"]),
    "agent": (5.1, 1.1, COLORS["dqn"]),
    "buffer": (7.6, 2.1, COLORS["drqn"]),
    "networks": (7.6, 0.1, COLORS["sac"]),
}
for text, (x, y, color) in boxes.items():
    ax.add_patch(
        FancyBboxPatch((x, y), 1.4, 0.8, boxstyle="round,pad=0.08", facecolor="white", edgecolor=color)
    )
    ax.text(x + 0.7, y + 0.4, text, ha="center", va="center", color=color)
arrows = [
    ((2.5, 1.75), (1.6, 1.75), "actions"),
    ((1.6, 1.25), (2.5, 1.25), "steps"),
    ((5.0, 1.75), (4.1, 1.75), "act"),
    ((4.1, 1.25), (5.0, 1.25), "observe"),
    ((6.6, 1.8), (7.5, 2.4), "transitions"),
    ((7.5, 0.6), (6.6, 1.2), "values"),
    ((8.3, 2.0), (8.3, 1.0), "sample, update"),
]
for start, end, text in arrows:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "black", "lw": 1})
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    above = 0.18 if start[1] == end[1] else 0
    ax.text(middle[0], middle[1] + above, text, ha="center", va="center", fontsize=8, bbox=box)
ax.set(xlim=(-0.1, 9.3), ylim=(-0.2, 3.2))
ax.axis("off")
plt.show()

# %% [markdown]
# From left to right: the training loop steps the environments and calls the agent; the agent has
# networks and (if it learns from replay) a buffer. All that is learned is in the agent. The loop
# keeps only the episodes under way and the metrics that it has not written yet.
#
# ## What passes between loop and agent
#
# There are two small records. The loop gives the agent a **transition**: one step of all
# environments, as arrays whose first axis is the environment. Three of its fields prevent classic
# mistakes:
#
# - `next_obs` is the true successor, also at the end of an episode, where a vector environment
#   has already overwritten it with the first observation of the next episode;
# - `terminated` and `truncated` stay apart, because only `terminated` means that nothing follows;
# - `state` is the hidden state of a recurrent agent *before* the step, so that a sequence can be
#   replayed from the state in which it began.
#
# The agent returns an **update result**: the metrics of one gradient step by name, `loss` among
# them. The loop checks that the loss is finite. The others stay tensors until it writes a line,
# because reading a number from a GPU means waiting for it.

# %%
#| export
@dataclass(slots=True)
class Transition:
    """One step of all environments, as the loop gives it to the agent."""

    obs: np.ndarray  # (num_envs, ...)
    action: np.ndarray  # (num_envs, ...)
    reward: np.ndarray  # (num_envs,)
    next_obs: np.ndarray  # (num_envs, ...), the true successor, at an episode's end too
    terminated: np.ndarray  # (num_envs,)
    truncated: np.ndarray  # (num_envs,)
    episode_start: np.ndarray  # (num_envs,), whether obs is the first of its episode
    state: Any  # the hidden state of a recurrent agent before this step


Metrics = dict[str, Tensor]  # scalars by name, without gradient


@dataclass(slots=True)
class UpdateResult:
    """What one gradient step reports."""

    metrics: Metrics  # "loss" is among them


# %% [markdown]
# ## Which algorithms there are
#
# The command line, the loader and the error messages need to know all algorithms. Nobody should
# have to remember to edit a list, so a class with a `name` of its own puts itself into the
# registry when Python defines it (`__init_subclass__` in `Agent` does that).
#
# Under which name? An algorithm of the book goes by its `name`. An algorithm of your own is in a
# module of yours. It is named `module:name`, as an environment is named `module:Name-v0`. Runs and
# checkpoints store this name, so that another process finds the class. A subclass in a module that
# has no `name` of its own, such as DQN with another network, goes by the name of its class. A class
# that is defined in a notebook or inside a function cannot be imported, so it keeps its plain
# `name`. Give it one of its own: with the name that it inherits, `rlbook.load` would make its parent.

# %%
#| export
REGISTRY: dict[str, type["Agent"]] = {}  # an agent class puts itself here when it is defined


def algorithm_name(agent_class: type["Agent"]) -> str:
    """Name an algorithm so that another process finds it: one that is not ours as `module:name`."""
    module, own = agent_class.__module__, "name" in vars(agent_class)
    if module.startswith(("rlbook.", "__")) or "<locals>" in agent_class.__qualname__:
        return agent_class.name
    return f"{module}:{agent_class.name if own else agent_class.__name__}"

# %% [markdown]
# By hand: a class with the name `mine` is `mine` in this notebook and `my_things:mine` in the
# module `my_things`.


# %%
class Mine:
    """Stands for an algorithm."""

    name = "mine"


assert algorithm_name(Mine) == "mine"
Mine.__module__ = "my_things"  # as if it had been written there
assert algorithm_name(Mine) == "my_things:mine"

# %% [markdown]
# To find an algorithm by its name, we import the module that defines it: the chapter of that name,
# or the module before the colon. To list all algorithms, we import the chapters in the order of
# the book. If a name is unknown, the error names the nearest one. An algorithm of your own is
# checked when it is found: `check_algorithm` comes [below](#nothing-is-forgotten).
#
# The book comes with files of settings for its algorithms, the [shipped configs](settings.ipynb).
# An algorithm that extends one of the book, as DQN with another network does, uses these too. That
# is what `family` is for, which lists an algorithm and those that it extends, the nearest first.

# %%
#| export
@functools.cache
def chapter_modules() -> list[str]:
    """The modules of the book in its order, as the exporter wrote them down."""
    return (importlib.resources.files("rlbook") / "chapters.txt").read_text().split()


def family(agent_class: type["Agent"]) -> list[str]:
    """Name an algorithm and those that it extends, the nearest first."""
    named = [c for c in agent_class.__mro__ if issubclass(c, Agent) and hasattr(c, "name")]
    return [algorithm_name(each) for each in named]


def import_module(module: str, wanted: str) -> Any:
    """Import a user's module, or say why `wanted` cannot be found."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{wanted} {missing_module(error)}") from error
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{wanted} cannot be imported, since {module!r} raises {why}") from error


def own_algorithms(module: str) -> dict[str, type["Agent"]]:
    """The algorithms in a user's module, as `module:name`."""
    found = vars(import_module(module, f"An algorithm in {module!r}")).values()
    classes = [v for v in found if isinstance(v, type) and issubclass(v, Agent) and v is not Agent]
    names = {agent_class: algorithm_name(agent_class) for agent_class in classes}
    return {f"{module}:{name.rpartition(':')[2]}": c for c, name in names.items() if ":" in name}


def algorithms() -> dict[str, type["Agent"]]:
    """All algorithms by name: those of the book in its order, then a user's own."""
    for module in chapter_modules():
        importlib.import_module(f"rlbook.{module}")
    order = {f"rlbook.{module}": i for i, module in enumerate(chapter_modules())}
    return dict(sorted(REGISTRY.items(), key=lambda kv: order.get(kv[1].__module__, len(order))))


def find_algorithm(name: str) -> type["Agent"]:
    """Find an algorithm by its name or as `module:name`, or say which name is nearest."""
    own = own_algorithms(name.rpartition(":")[0]) if ":" in name else {}
    if name in chapter_modules():  # most often: then no other chapter need be imported
        importlib.import_module(f"rlbook.{name}")
    known = REGISTRY if name in REGISTRY else own if ":" in name else algorithms()
    if name not in known:
        hint = nearest(name, list(known)) or f" There are: {', '.join(known) or 'none'}."
        advice = "" if ":" in name else " One of your own is named `module:name`."
        raise ValueError(f"There is no algorithm {name!r}.{hint}{advice}")
    if ":" in name:
        check_algorithm(known[name])
    return known[name]

# %% [markdown]
# (The algorithms have registered in the library's `REGISTRY`. This notebook has just made a new,
# empty one, so the cell copies them.)

# %%
import rlbook.agent

REGISTRY.update(rlbook.agent.algorithms())  # this notebook's own is still empty
print("chapters with code:", *chapter_modules())
print("algorithms:", *algorithms())
assert find_algorithm("dqn").__name__ == "DQN"

# %% [markdown]
# ## Does the algorithm fit the environment?
#
# DQN takes the maximum over a list of actions; it cannot control a motor whose torque is any
# number between −2 and 2. A user who tries should get a sentence that names an algorithm that
# fits, and not a traceback from inside a network. So each kind of space has a word (such as
# `discrete`), and each algorithm declares the words for its observations and its actions. An
# algorithm for both kinds of actions, such as [A2C](policy_gradient.ipynb), declares
# `"discrete or continuous"`. Any other space, such as a dictionary of observations, is `other`,
# and the sentence names the Gymnasium wrapper that makes it fit. (A `Discrete` observation is
# `other`, too, but [preprocessing](preprocess.ipynb) has made it a vector before this check.)

# %%
#| export
def observation_kind(space: gym.Space) -> str:
    """Say what the observations are, in one word: vector, image or other."""
    if isinstance(space, gym.spaces.Box) and len(space.shape) == 1:
        return "vector"
    if isinstance(space, gym.spaces.Box) and len(space.shape) == 3:
        return "image"
    return "other"


def action_kind(space: gym.Space) -> str:
    """Say what the actions are, in one word: discrete, continuous or other."""
    if isinstance(space, gym.spaces.Discrete):
        return "discrete"
    return "continuous" if isinstance(space, gym.spaces.Box) and len(space.shape) == 1 else "other"


def fits(agent_class: type["Agent"], found: tuple[str, str]) -> bool:
    """Say whether an algorithm can handle these kinds of observations and actions."""
    observations, actions = found
    return observations == agent_class.observations and actions in agent_class.actions.split(" or ")


WRAPPERS = (  # what turns other observations and other actions into those that agents take
    "wrap it in gymnasium.wrappers.FlattenObservation, which makes one vector of them",
    "wrap it in gymnasium.wrappers.TransformAction with a Discrete or one-dimensional Box space",
)


def check_spaces(agent: "Agent") -> None:
    """Raise unless the agent can handle its environment; name an algorithm that can."""
    spaces = agent.observation_space, agent.action_space
    found = observation_kind(spaces[0]), action_kind(spaces[1])
    if fits(type(agent), found):
        return
    fitting = [name for name, agent_class in algorithms().items() if fits(agent_class, found)]
    hint = f"try {' or '.join(fitting)}" if fitting else "no algorithm of this book fits it yet"
    hint = next((WRAPPERS[i] for i in range(2) if found[i] == "other"), hint)
    seen, done = (
        f"{kind.replace('other', type(space).__name__)} {what} ({' '.join(str(space).split())})"
        for kind, space, what in zip(found, spaces, ("observations", "actions"), strict=True)
    )
    raise ValueError(
        f"{agent.config.env_id!r} has {seen} and {done}, but {agent.name} needs "
        f"{agent.observations} observations and {agent.actions} actions: {hint}."
    )

# %%
assert observation_kind(gym.spaces.Box(-1, 1, (4,))) == "vector"
assert observation_kind(gym.spaces.Box(0, 255, (3, 64, 64), np.uint8)) == "image"
assert observation_kind(gym.spaces.Discrete(16)) == "other"
assert action_kind(gym.spaces.Discrete(2)) == "discrete"
assert action_kind(gym.spaces.Box(-2, 2, (1,))) == "continuous"

# %% [markdown]
# ## Randomness with an owner
#
# `torch.manual_seed(0)` at the top of a script makes it repeatable. But if you then draw one more
# random number somewhere, all later ones change. In this book every agent, buffer and run draws
# from a generator of its own, whose state is saved with it, and nothing changes a global one.
# There is one obstacle: PyTorch draws the initial weights of a layer from its global generator. So
# we make networks inside `fork_rng`, which restores the global generator afterwards.

# %%
#| export
@contextmanager
def seeded_torch(seed: int) -> Iterator[None]:
    """Draw initial weights from `seed` and leave the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed GPUs too
        yield

# %%
torch.manual_seed(5)
expected = torch.rand(1)
torch.manual_seed(5)
with seeded_torch(1):
    first = torch.nn.Linear(2, 1).weight
with seeded_torch(1):
    second = torch.nn.Linear(2, 1).weight
assert torch.equal(first, second)  # the same seed, the same weights
assert torch.equal(torch.rand(1), expected)  # and the global generator never noticed

# %% [markdown]
# ## Threads and devices
#
# Two settings say where and how torch computes. While an agent learns, `torch_for_learning` sets
# the number of `threads` and rounds numbers below $10^{-38}$ to zero. Adam makes many such
# *denormal* numbers when a gradient stays zero, and processors are slow with them. `find_device`
# turns the setting `device` into a device, or into a sentence if the machine has none of that
# name.

# %%
#| export
@contextmanager
def torch_for_learning(threads: int) -> Iterator[None]:
    """Use `threads` threads and round numbers below 1e-38 to zero inside, as before outside."""
    threads_before = torch.get_num_threads()
    flushed_before = bool(torch.tensor(1e-38) / 10 == 0)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # Adam's averages of idle weights decay there, and slow all down
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        torch.set_flush_denormal(flushed_before)


def find_device(name: str) -> torch.device:
    """Return the device of that name, or say that it is not there."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"There is no device {name!r} here: use 'cpu'.") from error
    return device

# %%
small = torch.full((1000,), 1e-38)
with torch_for_learning(1):
    assert torch.all(small / 10 == 0)
assert torch.all(small / 10 > 0)  # outside, as before
assert find_device("cpu").type == "cpu"

# %% [markdown]
# ## One observation or many
#
# `predict` is the method that somebody else's program calls, so it takes one observation or a
# batch, as a list or an array, and says in a sentence what is wrong with anything else.

# %%
#| export
def as_batch(obs: Any, space: gym.Space) -> tuple[np.ndarray, bool]:
    """Return observations as (batch, ...), and whether it was a single one."""
    shape = space.shape or ()
    if isinstance(obs, dict):
        how = "gymnasium.spaces.utils.flatten(env.unwrapped.observation_space, observation)"
        raise ValueError(f"An observation must be an array, not a dictionary: make one with {how}.")
    try:
        given = np.array(obs)
        batch = given.astype(space.dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"An observation must be numbers of the shape {shape}.") from error
    if batch.dtype.kind in "iub" and not np.array_equal(batch, given):
        raise ValueError(f"An observation must be whole numbers of the type {batch.dtype}.")
    if batch.shape not in (shape, (len(batch) if batch.ndim else 0, *shape)):
        raise ValueError(f"An observation must have the shape {shape}, not {batch.shape}.")
    if not np.isfinite(batch).all():
        raise ValueError("An observation must be finite, and this one is not.")
    if isinstance(space, gym.spaces.Discrete):
        first, last = int(space.start), int(space.start + space.n) - 1
        if ((batch < first) | (batch > last)).any():
            raise ValueError(f"An observation must be from {first} to {last}.")
    single = batch.shape == shape
    return (batch[None] if single else batch), single

# %%
flat = gym.spaces.Box(-1, 1, (2,))
one, was_single = as_batch([0.5, 0.0], flat)
assert one.shape == (1, 2) and was_single
assert as_batch([[0.5, 0.0]] * 3, flat)[0].shape == (3, 2)

# %% [markdown]
# A recurrent agent must also know where an episode starts, because its hidden state is reset
# there. If the caller passes no state, all episodes start. If the caller passes a state, none
# does, unless `episode_start` says so. With several environments the caller has to pass it, since
# their episodes end at different times.

# %%
#| export
def where_episodes_start(given: Any, state: Any, count: int) -> np.ndarray:
    """Return for each of `count` observations whether an episode starts there."""
    if given is None:
        return np.full(count, state is None)
    start = np.atleast_1d(np.asarray(given, dtype=bool))
    if start.shape != (count,):
        raise ValueError(f"episode_start needs one entry for each of {count} observations.")
    return start

# %%
assert where_episodes_start(None, None, count=2).tolist() == [True, True]
assert where_episodes_start(None, "a state", count=2).tolist() == [False, False]
assert where_episodes_start([False, True], "a state", count=2).tolist() == [False, True]

# %% [markdown]
# ## Nothing broken is kept
#
# A loss can be finite while its gradient is not, and then the weights are ruined without a
# message. A checkpoint of such weights would replace a good one. So before anything is written, we
# check every number that learning depends on. `Diverged` is what an agent and the loop raise then.

# %%
#| export
class Diverged(FloatingPointError):
    """A loss, a TD error or a weight is not finite any more."""


def not_finite(state: Any, name: str = "") -> str | None:
    """Return the name of the first tensor in a nested state that is not finite all over."""
    if isinstance(state, torch.Tensor):
        return name if state.is_floating_point() and not bool(state.isfinite().all()) else None
    items = state.items() if isinstance(state, dict) else enumerate(state)
    nested = [(k, v) for k, v in items if isinstance(v, dict | list | tuple | torch.Tensor)]
    return next(filter(None, (not_finite(v, f"{name}.{k}".strip(".")) for k, v in nested)), None)

# %%
sound = {"q_network": {"weight": torch.ones(2)}, "steps": 3}
assert not_finite(sound) is None
assert not_finite({**sound, "target": [torch.tensor([0.0, math.nan])]}) == "target.0"

# %% [markdown]
# ## Nothing is forgotten
#
# A network that no checkpoint holds is the most expensive mistake in an algorithm of your own: the
# agent trains and scores well, and the loaded one plays with fresh weights. So when an agent has been
# built, we look through its attributes. Every network, every optimiser and every tensor with a
# gradient must be one of the `parts`, or inside of one, and every part must be something that can be
# saved: it has the methods `state_dict` and `load_state_dict`, as networks, optimisers and the
# buffers of this book have. `check_algorithm` asks what a class must have before an agent can be
# made.

# %%
#| export
def is_learned(value: Any) -> bool:
    """Say whether this is a network, an optimiser or a tensor that has a gradient."""
    if isinstance(value, Tensor):
        return value.requires_grad
    return isinstance(value, torch.nn.Module | torch.optim.Optimizer)


def learned_in(value: Any) -> list[Any]:
    """List what is learned in an attribute, which may be a list or dict of networks."""
    inside = list(value.values()) if isinstance(value, dict) else value
    inside = inside if isinstance(inside, list | tuple) else [value]
    return [each for each in inside if is_learned(each)]


def tensors_of(network: torch.nn.Module) -> list[Tensor]:
    """List the parameters and buffers that a network saves."""
    return [v for v in network.state_dict(keep_vars=True).values() if isinstance(v, Tensor)]


def check_parts(agent: "Agent") -> None:
    """Raise unless the parts can be saved and hold all networks and optimisers of the agent."""
    owner, saved = type(agent).__name__, list[Any]()
    parts: Any = agent.parts
    if isinstance(parts, str):  # the comma that makes ("q_network",) a tuple is easily forgotten
        raise ValueError(f"`parts` of {owner} must be a tuple: write ({parts!r},).")
    for name in parts:
        if not hasattr(agent, name):
            raise ValueError(f"{owner} has the part {name!r}, but `build` makes no self.{name}.")
        part = getattr(agent, name)
        if not all(callable(getattr(part, f"{verb}state_dict", None)) for verb in ("", "load_")):
            what = f"a {type(part).__name__}, which has no state_dict and load_state_dict"
            cure = "put it into a class that has both, or into a network as its buffer"
            raise ValueError(f"The part {name!r} of {owner} is {what}: {cure}.")
        saved.append(part)
        if not isinstance(part, torch.optim.lr_scheduler.LRScheduler):  # it saves no optimiser
            saved += learned_in(getattr(part, "__dict__", {}))
    networks = [part for part in saved if isinstance(part, torch.nn.Module)]
    ids = {id(each) for each in saved} | {id(t) for part in networks for t in tensors_of(part)}
    for name, value in vars(agent).items():
        for each in learned_in(value):
            needed = tensors_of(each) if isinstance(each, torch.nn.Module) else [each]
            if not all(id(tensor) in ids for tensor in needed):
                alone = each is value and not isinstance(each, Tensor)
                cure = "add it to" if alone else "put it into an nn.Module, and that into"
                raise ValueError(
                    f"self.{name} of {owner} is in no part, so no checkpoint would hold what it "
                    f"learns: {cure} `parts`."
                )

# %% [markdown]
# An algorithm also has to say what its settings are and what it learns from. Both are checked before
# anything is built.

# %%
#| export
def check_algorithm(agent_class: type["Agent"]) -> None:
    """Raise unless a class has its methods, a name, settings, and a way to get its batches."""
    owner, config_class = agent_class.__name__, getattr(agent_class, "config_class", None)
    if missing := sorted(agent_class.__abstractmethods__):
        raise ValueError(f"{owner} does not define {', '.join(missing)}, as each algorithm must.")
    if not hasattr(agent_class, "name"):
        raise ValueError(f"{owner} needs a name, such as `name = {owner.lower()!r}`.")
    if not (isinstance(config_class, type) and issubclass(config_class, Config)):
        raise ValueError(f"{owner} needs a `config_class`: a subclass of rlbook.settings.Config.")
    if agent_class.batches is not Agent.batches:
        return
    if agent_class.sample is Agent.sample or not issubclass(config_class, ReplayConfig):
        raise ValueError(
            f"{owner} needs a method `batches`, which yields what to learn from; or, to learn from "
            "replay, a method `sample` and settings that extend ReplayConfig."
        )

# %% [markdown]
# ## Compiling
#
# With small networks most of an update's time goes into starting operations, not into arithmetic.
# `torch.compile` fuses them into a C++ program. It compiles the methods that an algorithm lists in
# `compiled`: those that compute gradients from a batch, with forward pass, loss and backward pass.
# `zero_grad`, the optimiser's step and the target update stay in `update`, as in any script. So
# there is no second version of the code, and the setting `compile` is the only switch.
#
# Three options are important. `trace_autograd_ops` allows a backward pass inside a compiled
# function. `fullgraph=True` makes PyTorch raise an error where it cannot compile everything.
# Without it, PyTorch leaves out what it cannot compile, and gradients can be lost with no message
# at all. PyTorch cannot compile a backward pass through an LSTM, so recurrent agents list no
# method, and the error says why. And a program is compiled for one set of settings and shapes:
# agents with the same ones share it, and `recompile_limit` is the number of programs that one
# process may have. [Speed](speed.ipynb) measures what compiling gains and costs.

# %%
#| export
def has_lstm(agent: "Agent") -> bool:
    """Say whether a network of the agent has an LSTM in it."""
    parts = [getattr(agent, name) for name in agent.parts]
    networks = [part for part in parts if isinstance(part, torch.nn.Module)]
    return any(isinstance(layer, torch.nn.LSTM) for part in networks for layer in part.modules())


def has_compiler() -> bool:
    """Say whether there is the C++ compiler that `torch.compile` would call."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def compile_methods(agent: "Agent") -> None:
    """Replace the methods that compute gradients by compiled ones."""
    if not agent.compiled:
        lstm = "PyTorch cannot compile a backward pass through an LSTM"
        why = lstm if has_lstm(agent) else "it lists no method in `compiled`"
        raise ValueError(f"Setting 'compile' is not for {agent.name}: {why}. Leave it out.")
    if not has_compiler():
        raise ValueError("Setting 'compile' needs a C++ compiler such as g++, and there is none.")
    if torch.__version__ < "2.13":  # compares as versions do
        raise ValueError(f"Setting 'compile' needs PyTorch 2.13, and this is {torch.__version__}.")
    torch._dynamo.config.trace_autograd_ops = True
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "recompile_limit": 256}
    for name in agent.compiled:
        setattr(agent, name, torch.compile(getattr(agent, name), **options))


# %% [markdown]
# ## The base class
#
# An agent is made from its settings. They name the environment, and from the environment the agent
# needs its **interface**: the spaces of observations and actions, and how many frames are stacked
# in one picture. The interface is part of a checkpoint, as [plain data](checkpoint.ipynb). So a
# trained agent can be loaded and asked for actions on a machine that does not have the simulator.
# Only `learn` and `evaluate` need that. If you name another environment for them, by
# `agent.config.env_id = ...`, `check_fits` makes sure that it has the same interface.

# %%
#| export
@dataclass(frozen=True)
class Interface:
    """What an agent needs to know of its environment."""

    observation_space: gym.Space
    action_space: gym.Space
    frame_stack: int = 1

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        spaces = {"observations": self.observation_space, "actions": self.action_space}
        return {name: plain_space(space) for name, space in spaces.items()} | {
            "frame_stack": self.frame_stack
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Interface":
        """Make it from plain data."""
        observations, actions = (space_from_plain(plain[n]) for n in ("observations", "actions"))
        return cls(observations, actions, plain["frame_stack"])


def find_interface(config: Config) -> Interface:
    """Return the interface of the environment that the settings name."""
    env = make_env(config.env_id, config.env_kwargs)
    stacked = env.get_wrapper_attr("frame_stack") if env.has_wrapper_attr("frame_stack") else 1
    env.close()
    channels, *_ = prepared_space(env.observation_space).shape or (1,)
    if not isinstance(stacked, int) or stacked < 1 or channels % stacked:
        stacked = 1  # an attribute of that name which means something else
    return Interface(env.observation_space, env.action_space, stacked)


def check_fits(agent: "Agent", observation_space: gym.Space, action_space: gym.Space) -> None:
    """Raise if an environment, which a setting names, is not what the agent was made for."""
    known = agent.interface
    seen, found = prepared_space(known.observation_space), prepared_space(observation_space)
    actions = [  # a checkpoint does not hold the dtype of a Discrete space
        (space.n, space.start) if isinstance(space, gym.spaces.Discrete) else space
        for space in (known.action_space, action_space)
    ]
    if (seen.shape, seen.dtype) != (found.shape, found.dtype) or actions[0] != actions[1]:
        raise ValueError(
            f"{agent.config.env_id!r} has the spaces {observation_space} and {action_space}, but "
            f"the agent was made for {known.observation_space} and {known.action_space}: "
            "make a new one."
        )

# %%
interface = find_interface(Config(env_id="CartPole-v1"))
assert interface.observation_space.shape == (4,)
assert interface.action_space == gym.spaces.Discrete(2)
assert Interface.from_plain(interface.plain()) == interface

# %% [markdown]
# Now the whole class. It has four groups of methods:
#
# - **what an algorithm fills in**: `build`, `act`, `observe` and `update`, and `sample` if it
#   learns from replay. `batches` says when it is time to learn and from what. Its default is for
#   replay; an on-policy algorithm, which learns from each rollout when it is complete, writes its
#   own;
# - **what a user calls**: `learn`, `evaluate`, `predict`, `save`, `load` and `from_config`;
# - **what is saved**: `parts` names the attributes that learning depends on, and `state_dict` and
#   `load_state_dict` walk over them, so that neither can forget one;
# - **what is copied**: `copy.deepcopy` and `pickle` give a second agent that goes on learning
#   exactly as the first would.
#
# Only two things are not copied. A compiled method belongs to the networks of one agent, so a copy
# compiles its own. And a run directory has one writer, so a copy writes nowhere, and keeps no best
# agent there. Pickling turns the tensors into bytes. Otherwise `multiprocessing` would share their
# memory with the other process, and learning there would change the original.

# %%
#| export
REPLAY = "replay"  # the one part that a checkpoint may leave out
BUILT_FROM = (  # settings that shape networks and buffers, which a later change would not reach
    *("num_envs", "device", "compile", "normalize_observations", "normalize_rewards"),
    *("hidden", "observation_scale", "lstm_units", "encoder", "features", "num_critics"),
    *("orthogonal_init", "initial_std", "forget_bias", "previous_action", "actor_trains_encoder"),
    *("initial_alpha", "target_entropy", "gamma", "n_step", "buffer_size", "num_steps"),
    *("chunk_length", "burn_in", "overlap", "alpha"),
)


def choose_config(
    config_class: type[Config], config: Config | None, settings: dict[str, Any]
) -> Config:
    """Return the config that was given whole, or make one from settings; both would contradict."""
    if config is None:
        return make_config(config_class, settings)
    if settings:
        named = ", ".join(map(repr, settings))
        raise ValueError(f"Give a `config` or settings, not both: config.replace() takes {named}.")
    if not isinstance(config, config_class):
        wanted, given = config_class.__name__, type(config).__name__
        raise ValueError(f"`config` must be a {wanted}, not a {given}.")
    return config


class Agent(ABC):
    """An algorithm with its networks: what the loop and a user call."""

    name: ClassVar[str]
    config_class: ClassVar[type[Config]]
    observations: ClassVar[str] = "vector"
    actions: ClassVar[str] = "discrete"
    parts: ClassVar[tuple[str, ...]] = ()  # attributes with a state_dict, saved and loaded by name
    compiled: ClassVar[tuple[str, ...]] = ()  # methods that the setting `compile` compiles
    config: Config
    replay: Any  # the buffer of an agent that learns from replay
    directory: "RunDirectory | None" = None  # made by the loop when `run_dir` is set
    training_state: dict[str, Any] | None = None  # where the loop stopped: `learn` goes on there
    replay_lost = False  # whether the state that was loaded came without its buffer

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            REGISTRY[algorithm_name(cls)] = cls

    def __init__(
        self,
        env_id: Any = None,
        *,
        config: Config | None = None,
        interface: Interface | None = None,
        **settings: Any,
    ) -> None:
        check_algorithm(type(self))
        given = settings if env_id is None else {"env_id": env_id, **settings}
        self.config = config = choose_config(self.config_class, config, given)
        self.device = find_device(config.device)
        self.interface = interface or find_interface(config)  # a checkpoint has one
        self.action_space = self.interface.action_space
        self.preprocessing = Preprocessing(self.interface.observation_space, config)
        self.observation_space = self.preprocessing.space  # of what `act` and `observe` get
        check_spaces(self)
        self.global_step = 0  # environment steps seen
        self.updates = 0  # gradient steps made
        self.generator = np.random.default_rng(derive_seed(config.seed, "agent"))
        with seeded_torch(derive_seed(config.seed, "networks")):
            self.build()
        check_parts(self)
        if config.compile:
            compile_methods(self)
        # Without a schedule the optimisers keep the learning rate that they were made with.
        rate = () if hasattr(config, "lr_now") else ("lr",)
        self.built_from = {name: getattr(config, name, None) for name in (*BUILT_FROM, *rate)}

    def __repr__(self) -> str:
        where = f"{self.config.env_id!r}, seed={self.config.seed}"
        learned = f"step {self.global_step:,}, {self.updates:,} updates"
        return f"{type(self).__name__}({where}: {learned})"

    # What an algorithm fills in

    @abstractmethod
    def build(self) -> None:
        """Make networks, optimisers and buffer."""

    @abstractmethod
    def act(
        self, obs: np.ndarray, state: Any, episode_start: np.ndarray, explore: bool
    ) -> tuple[np.ndarray, Any]:
        """Choose an action for each observation; return the next hidden state too."""

    @abstractmethod
    def observe(self, transition: Transition) -> None:
        """Store one step of all environments."""

    @abstractmethod
    def update(self, batch: Any) -> UpdateResult:
        """Make one gradient step; the caller counts it in `updates`, as the loop does."""

    def sample(self) -> Any:
        """Sample what one update learns from; an agent with a replay buffer fills this in."""
        raise TypeError(f"{self.name} does not learn from replay.")

    def batches(self) -> Iterator[Any]:
        """Yield what is to be learned from after the last step: samples, as many as are due."""
        assert isinstance(self.config, ReplayConfig)
        if len(self.replay) >= self.config.batch_size:
            for _ in range(updates_due(self.config, self.global_step)):
                yield self.sample()

    # What a user calls

    @classmethod
    def from_config(cls, name: str | os.PathLike[str], **settings: Any) -> Self:
        """Make an agent from a shipped config or a YAML file; keywords override it."""
        config = os.fspath(name)
        _, stored = gather_settings(config, algorithm_name(cls))
        return cls(config=make_config(cls.config_class, {**stored, **settings}))

    def learn(
        self, steps: int, progress: bool = True, callbacks: "Callbacks" = ()
    ) -> "RunResult":
        """Train for `steps` more environment steps."""
        if steps < 1:
            raise ValueError(f"learn needs at least one step, not {steps}.")
        from rlbook.run import train  # here, since that module imports this one

        if "total_steps" not in self.config.model_fields_set:  # nobody gave it: schedules need one
            self.config = self.config.replace(total_steps=self.global_step + steps)
        return train(self, progress, callbacks, until=self.global_step + steps)

    def evaluate(self, episodes: int = 10, seed: int = 0) -> Evaluation:
        """Play greedy episodes that were not learned from."""
        config, count = self.config, min(episodes, EVALUATION_ENVS)
        envs = [make_env(config.env_id, config.env_kwargs) for _ in range(count)]
        seed = derive_seed(config.seed, "evaluate", seed)
        try:
            for env in envs:
                check_fits(self, env.observation_space, env.action_space)
            with torch_for_learning(config.threads):
                return evaluate(self.greedy, envs, seed, episodes, config.eval_max_steps)
        finally:
            for env in envs:
                env.close()

    def greedy(self, obs: np.ndarray, state: Any, start: np.ndarray) -> tuple[np.ndarray, Any]:
        """Act without exploring, on observations as they come from the environment."""
        return self.act(self.preprocessing.prepare(obs), state, start, explore=False)

    def predict(
        self, obs: Any, state: Any = None, episode_start: Any = None, deterministic: bool = True
    ) -> tuple[Any, Any]:
        """Choose an action for one observation or a batch; without `state` an episode starts."""
        batch, single = as_batch(obs, self.preprocessing.env_space)
        start = where_episodes_start(episode_start, state, len(batch))
        prepared = self.preprocessing.prepare(batch)
        actions, state = self.act(prepared, state, start, explore=not deterministic)
        return (actions[0] if single else actions), state

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole agent to one file."""
        write_checkpoint(Path(path), self.checkpoint())

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str = "cpu") -> Self:
        """Read an agent from a file, or from the newest checkpoint of a run directory."""
        agent = load(path, device, cls)
        if not isinstance(agent, cls):
            raise ValueError(f"{path} holds a {agent.name} agent: use rlbook.load.")
        return agent

    # What is saved

    def state_dict(self) -> dict[str, Any]:
        """Return all that learning depends on: counters, generator, statistics and parts."""
        return {
            "global_step": self.global_step,
            "updates": self.updates,
            "generator": self.generator.bit_generator.state,
            "preprocessing": self.preprocessing.state_dict(),
            **{part: getattr(self, part).state_dict() for part in self.parts},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.global_step, self.updates = state["global_step"], state["updates"]
        self.generator.bit_generator.state = state["generator"]
        self.preprocessing.load_state_dict(state["preprocessing"])
        self.training_state = None  # it belongs to another step
        self.replay_lost = REPLAY in self.parts and REPLAY not in state
        for name in self.parts:
            if name == REPLAY and self.replay_lost:
                continue
            part, saved = getattr(self, name), state[name]
            if isinstance(part, torch.optim.Optimizer):
                saved = copy.deepcopy(saved)  # it would keep the tensors that it is given
            part.load_state_dict(saved)

    def checkpoint(self, replay: bool = True) -> dict[str, Any]:
        """Return what a checkpoint holds of the agent: name, settings, interface and state."""
        state = self.state_dict()
        if broken := not_finite(state):
            raise Diverged(f"{broken} is not finite any more, so nothing was saved")
        if not (replay and self.config.checkpoint_replay):
            state.pop(REPLAY, None)
        return {
            "algo": algorithm_name(type(self)),
            "config": self.config.model_dump(),
            "interface": self.interface.plain(),
            "agent": state,
            "run": self.training_state,  # so that a loaded agent can go on where this one is
        }

    # What is copied

    def copied(self) -> dict[str, Any]:
        """Return what a copy holds: all but compiled methods and the run directory."""
        own = {name: part for name, part in vars(self).items() if name not in self.compiled}
        config = self.config.replace(run_dir=None, keep_best=False)
        return own | {"directory": None, "config": config}

    def become(self, state: dict[str, Any]) -> None:
        """Take over what `copied` returned."""
        vars(self).update(state)
        if self.config.compile:
            compile_methods(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = twin = object.__new__(type(self))
        twin.become(copy.deepcopy(self.copied(), memo))
        return twin

    def __getstate__(self) -> bytes:
        return pickle.dumps(self.copied())  # tensors as bytes, never as shared memory

    def __setstate__(self, state: bytes) -> None:
        self.become(pickle.loads(state))

# %% [markdown]
# ## The bandit as an agent
#
# Here is the bandit again, now as an `Agent`. It has one part, the means, with `state_dict` and
# `load_state_dict`. It learns from each step at once, so it has no buffer, and `batches` always
# yields one batch.


# %%
class Means(Averages):
    """Averages that can be saved."""

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers."""
        return {"q": self.q, "n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them over."""
        self.q, self.n = state["q"].clone(), state["n"].clone()


class BanditConfig(Config):
    """The settings of the bandit: those that all share."""


class Bandit(Agent):
    """Plays the action with the best mean reward, and a random one in ten."""

    name = "bandit"
    config_class = BanditConfig
    parts = ("means",)

    def build(self) -> None:
        self.means = Means(int(self.action_space.n))

    def act(self, obs, state, episode_start, explore):
        actions = np.full(len(obs), int(self.means.q.argmax()))
        if explore and self.generator.random() < 0.1:
            actions = self.generator.integers(self.action_space.n, size=len(obs))
        return actions, state

    def observe(self, transition: Transition) -> None:
        self.last = list(zip(transition.action, transition.reward, strict=True))

    def batches(self):
        yield self.last

    def update(self, batch) -> UpdateResult:
        for action, reward in batch:
            self.means.update(int(action), float(reward))
        return UpdateResult({"loss": torch.zeros(()), "q_max": self.means.q.max()})


# %% [markdown]
# It is registered, it takes its settings as keywords, and it learns. In `rlbook/OneStep-v0` every
# episode is one step with reward 1, so the mean of each action that it has played is exactly 1:

# %%
agent = Bandit("rlbook/OneStep-v0", total_steps=1_000, seed=3, eval_every=0)
agent.learn(200, progress=False)
print(agent.means.q, "after", agent.global_step, "steps and", agent.updates, "updates")
assert agent.means.q.max() == 1
assert agent.evaluate(episodes=5).mean == 1

# %% [markdown]
# A single observation gives a single action, a batch gives a batch, and a mistake gives a
# sentence:

# %%
single, _ = agent.predict(np.zeros(agent.observation_space.shape))
batch, _ = agent.predict(np.zeros((7, *agent.observation_space.shape)))
print("one action:", single, " a batch:", batch)
assert np.ndim(single) == 0 and batch.shape == (7,)


# %%
def complain(call) -> None:
    """Print the sentence that a mistake gets."""
    try:
        call()
    except ValueError as error:
        print("-", error)
    else:
        raise AssertionError("no complaint")


complain(lambda: agent.predict([1.0, 2.0, 3.0]))
complain(lambda: agent.predict([float("nan")] * agent.observation_space.shape[0]))
complain(lambda: Bandit("CartPole-v2"))
complain(lambda: Bandit("CartPole-v1", sead=3))
complain(lambda: Bandit("Pendulum-v1"))
complain(lambda: Bandit("CartPole-v1", compile=True))
complain(lambda: agent.learn(0))
complain(lambda: find_algorithm("bandid"))

# %% [markdown]
# And a copy goes on exactly as the original does:

# %%
twin = copy.deepcopy(agent)
for each in (agent, twin):
    each.learn(50, progress=False)
assert torch.equal(twin.means.n, agent.means.n) and twin.means is not agent.means

# %% [markdown]
# ## Loading
#
# A checkpoint holds the name of its algorithm and its settings, so `load` needs only the file, or
# the directory of a run, where it takes the newest checkpoint that is not damaged. The class
# method `DQN.load` does the same and refuses checkpoints of other algorithms.

# %%
#| export
def load_state(agent: Agent, state: dict[str, Any], source: Path) -> None:
    """Let an agent take over a state from a file, or say that it does not fit."""
    try:
        agent.load_state_dict(state)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())  # torch writes one line per weight
        raise CheckpointError(f"{source} does not fit this {agent.name}: {why}") from error


def restore(
    content: dict[str, Any], source: Path, device: str, wanted: type[Agent] = Agent
) -> Agent:
    """Make the agent that a checkpoint holds, as a user's own subclass if that is `wanted`."""
    kinds = {"algo": str, "config": dict, "agent": dict}
    try:
        interface = Interface.from_plain(content["interface"])
        assert all(isinstance(content[name], kind) for name, kind in kinds.items())
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source} is not an rlbook checkpoint.") from error
    found = find_algorithm(content["algo"])
    agent_class = wanted if issubclass(wanted, found) and wanted.name == found.name else found
    settings = {**content["config"], "device": device, "run_dir": None, "keep_best": False}
    if not has_compiler():  # only learning would need it
        settings["compile"] = False
    config = make_config(agent_class.config_class, settings)
    agent = agent_class(config=config, interface=interface)
    load_state(agent, content["agent"], source)
    run = content.get("run")
    agent.training_state = run if isinstance(run, dict) else None
    return agent


def load(
    path: str | os.PathLike[str], device: str = "cpu", wanted: type[Agent] = Agent
) -> Agent:
    """Read an agent, whichever its algorithm, from a file or a run directory."""
    path = Path(path)
    if not path.is_dir():
        return restore(read_checkpoint(path), path, device, wanted)
    if not (path / "config.yaml").is_file():
        raise ValueError(f"{path} is not a run directory: it has no config.yaml.")
    newest = CheckpointDirectory(path / "checkpoints").newest()
    if newest is None:
        raise ValueError(f"{path} has no checkpoint yet: go on with `rlbook resume {path}`.")
    return restore(newest[1], newest[0], device, wanted)

# %%
import tempfile

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "bandit.pt"
    agent.save(path)
    twin = load(path)
    assert isinstance(twin, Bandit) and torch.equal(twin.means.q, agent.means.q)
    agent.learn(50, progress=False)
    twin.learn(50, progress=False)  # the loaded one goes on exactly as the original does
    assert torch.equal(twin.means.n, agent.means.n)
print("means after 50 more steps:", agent.means.q.tolist(), twin.means.q.tolist())

# %% [markdown]
# ## Exercises
#
# **Exercise 1.** `Bandit` explores with all environments or with none, since it draws one number
# per call. Give each environment its own decision.
#
# <details>
# <summary>Solution</summary>
#
# Draw as many numbers as there are observations and choose with `np.where`:
#
# ```python
# class EachAlone(Bandit):
#     """As `Bandit`, with a decision for each environment."""
#
#     name = "each_alone"
#
#     def act(self, obs, state, episode_start, explore):
#         actions = np.full(len(obs), int(self.means.q.argmax()))
#         if explore:
#             chance = self.generator.random(len(obs)) < 0.1
#             randoms = self.generator.integers(self.action_space.n, size=len(obs))
#             actions = np.where(chance, randoms, actions)
#         return actions, state
#
# each = EachAlone("CartPole-v1", seed=0)
# many = np.zeros((1_000, *each.observation_space.shape), np.float32)
# actions, _ = each.act(many, None, np.zeros(1_000, bool), explore=True)
# assert 0 < np.mean(actions != int(each.means.q.argmax())) < 0.1
# ```
#
# [DQN](dqn.ipynb) does it in this way.
#
# </details>

# %% [markdown]
# **Exercise 2.** Why is `check_spaces` called before `build`, and not by each algorithm in its own
# `build`?
#
# <details>
# <summary>Solution</summary>
#
# Because a network for the wrong space fails with a message about matrix sizes, or, worse, does
# not fail at all: code that asks only for the size of the action space would take one continuous
# action for one discrete action. And if every algorithm had to call it, one of them would forget
# to.
#
# ```python
# try:
#     Bandit("Pendulum-v1")
# except ValueError as error:
#     print(error)  # one sentence, before any network is built
# else:
#     raise AssertionError("a continuous action was taken for a discrete one")
# ```
#
# </details>

# %% [markdown]
# **Exercise 3, a planted bug.** This variant of `Bandit` learns as well as the original, and
# raises no error. Yet an agent that was saved and loaded behaves differently from one that was
# not. What is wrong? Find a way to see it.


# %%
class Forgetful(Bandit):
    """As `Bandit`, with a bug."""

    name = "forgetful"

    def build(self) -> None:
        super().build()
        self.dice = np.random.default_rng(self.config.seed)

    def act(self, obs, state, episode_start, explore):
        actions = np.full(len(obs), int(self.means.q.argmax()))
        if explore and self.dice.random() < 0.1:
            actions = self.dice.integers(self.action_space.n, size=len(obs))
        return actions, state


# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# `dice` is a second generator that is not among the `parts`, so it is not saved: after loading it
# starts again from its seed, and the agent repeats its first random actions. To see it,
# compare the actions of a loaded twin with those of the original, as the cell below does. The
# repair is to draw from `self.generator`, which is saved.
#
# ```python
# class Forgetful(Bandit):
#     """As `Bandit`; its only generator is the one that is saved."""
#
#     name = "forgetful"
#
#     def act(self, obs, state, episode_start, explore):
#         actions = np.full(len(obs), int(self.means.q.argmax()))
#         if explore and self.generator.random() < 0.1:
#             actions = self.generator.integers(self.action_space.n, size=len(obs))
#         return actions, state
#
# original = Forgetful("rlbook/OneStep-v0", seed=3, eval_every=0)
# original.learn(200, progress=False)
# with tempfile.TemporaryDirectory() as name:
#     original.save(Path(name) / "agent.pt")
#     loaded = load(Path(name) / "agent.pt")
# obs, start = np.zeros((1, *original.observation_space.shape), np.float32), np.zeros(1, bool)
# played = [
#     [int(each.act(obs, None, start, explore=True)[0][0]) for _ in range(200)]
#     for each in (original, loaded)
# ]
# assert played[0] == played[1]
# ```
#
# </details>


# %%
def explored(agent: Agent) -> list[int]:
    """The next 200 exploring actions."""
    obs, start = np.zeros((1, *agent.observation_space.shape), np.float32), np.zeros(1, bool)
    return [int(agent.act(obs, None, start, explore=True)[0][0]) for _ in range(200)]


def same_after_loading(agent: Agent) -> bool:
    """Whether a saved and loaded twin explores as the original does."""
    with tempfile.TemporaryDirectory() as folder:
        agent.save(Path(folder) / "agent.pt")
        return explored(load(Path(folder) / "agent.pt")) == explored(agent)


for kind in (Forgetful, Bandit):
    trained = kind("rlbook/OneStep-v0", seed=3, eval_every=0)
    trained.learn(200, progress=False)
    print(f"{kind.__name__}: same actions after loading: {same_after_loading(trained)}")

# %% [markdown]
# **Exercise 4.** Make an agent that plays at random, as a baseline for CartPole. What must
# `update` return if the agent has nothing to learn?
#
# <details>
# <summary>Solution</summary>
#
# Nothing: let `batches` yield nothing, and `update` is never called. Then `act` is one line,
# `self.generator.integers(self.action_space.n, size=len(obs))`, and `observe` does nothing. On
# CartPole the mean return is about 22.
#
# ```python
# class AtRandom(Bandit):
#     """Plays at random, and learns nothing."""
#
#     name = "at_random"
#
#     def act(self, obs, state, episode_start, explore):
#         return self.generator.integers(self.action_space.n, size=len(obs)), state
#
#     def observe(self, transition: Transition) -> None:
#         pass
#
#     def batches(self):
#         return iter(())
#
# floor = AtRandom("CartPole-v1", seed=0).evaluate(episodes=50).mean
# assert 15 < floor < 35
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# ```python
# import rlbook
#
# rlbook.ALGORITHMS  # name -> class
# agent = rlbook.load("runs/a")  # whichever algorithm it was
# agent.evaluate(episodes=20).interval
# ```
#
# ```
# rlbook list
# rlbook evaluate runs/a --episodes 20
# ```
#
# ## References
#
# - R. Sutton and A. Barto (2018). *Reinforcement Learning: An Introduction*, second edition,
#   sections 2.2 and 2.4: the sample-average method, and its update in steps.
# - A. Raffin et al. (2021). *Stable-Baselines3: Reliable Reinforcement Learning Implementations*,
#   JMLR 22: the verbs `learn`, `predict`, `save` and `load`, which users know from there.
