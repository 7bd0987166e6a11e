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
# # Export
#
# A trained agent is a small function: an observation goes in, an action comes out. The robot, the
# game or the browser that needs this function has no PyTorch and no rlbook.
# [ONNX](https://onnx.ai) is a file format for such functions, and programs in C++, C#, Java,
# JavaScript, Rust or Python can run the file with a small runtime. In this chapter you write the
# greedy policy of any agent to one file: the preprocessing of the observation, the network, the
# scaling of the action, and the hidden state of a recurrent agent.
#
# | | |
# |---|---|
# | Builds on | [the agent](agent.ipynb): its method `greedy` |
# | Same | the actions of `predict`, for every algorithm of the book and for your own |
# | Different | the file needs no Python to run |
# | Needs | `pip install 'rlbook[onnx]'` |

# %% tags=["hide-input"]
#| export
import contextlib
import copy
import importlib
import json
import logging
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

import rlbook
from rlbook.agent import Agent
from rlbook.settings import write_whole

# %% tags=["hide-input"]
import tempfile

import onnxruntime

from rlbook.cli import main
from rlbook.dqn import DQN
from rlbook.drqn import DRQN
from rlbook.sac import SAC

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A policy without Python
#
# Train an agent, and export it:

# %%
agent = DQN("CartPole-v1", eval_every=0, epsilon_decay_steps=3_000, n_step=3, seed=1)
agent.learn(8_000, progress=False)
agent.save(folder / "agent.pt")
with contextlib.chdir(folder):
    print("$ rlbook export agent.pt --out policy.onnx")
    assert main(["export", "agent.pt", "--out", "policy.onnx"]) == 0
print(f"{(folder / 'policy.onnx').stat().st_size:,} bytes, and the checkpoint has "
      f"{(folder / 'agent.pt').stat().st_size:,}")

# %% [markdown]
# This cell plays an episode with the file, without rlbook:

# %%
session = onnxruntime.InferenceSession(folder / "policy.onnx")
env = gym.make("CartPole-v1")
obs, _ = env.reset(seed=0)
total, ended = 0.0, False
while not ended:
    (actions,) = session.run(None, {"obs": obs[None]})  # a batch of one
    obs, reward, terminated, truncated, _ = env.step(actions[0])
    total, ended = total + float(reward), terminated or truncated
print(f"return {total:.0f}")

# %% [markdown]
# It is the same policy: a thousand observations get the same thousand actions, and they may come
# all at once, because the size of the batch is not part of the file.

# %%
many = np.random.default_rng(0).normal(0, 0.5, (1_000, 4)).astype(np.float32)
assert np.array_equal(session.run(None, {"obs": many})[0], agent.predict(many)[0])

# %% [markdown]
# ## Tracing
#
# The agent's `act` is ordinary Python. `torch.export` runs it once with placeholders instead of
# numbers, records each operation on them, and returns the list. This is called *tracing*, and it
# understands PyTorch *and NumPy*. Look for the multiplication and the clipping (`clamp`) between
# copies and checks:

# %%
class Example(nn.Module):
    """Two lines of NumPy as a module."""

    def forward(self, obs: Tensor) -> Tensor:
        """Double and clip."""
        doubled = 2 * obs.numpy()
        return torch.from_numpy(np.clip(doubled, -1, 1))


traced = torch.export.export(Example(), (torch.zeros(2, 3),), strict=True)
print(*[node.target for node in traced.graph.nodes if node.op == "call_function"], sep="\n")
assert traced.module()(torch.tensor([[0.2, 3.0, -1.0]] * 2)).tolist() == [[0.4000000059604645, 1, -1]] * 2

# %% [markdown]
# So nobody has to write a second version of `act`, which could drift from the first: what is
# exported *is* the `act` that plays. One problem is left. What `act` reads from the agent must
# become part of the file. PyTorch does this for the parameters of networks, but not for NumPy
# arrays such as the bounds of the actions. So the module below has a tensor (in PyTorch's words,
# a *buffer*) for each array that can be reached from the agent. Before it calls `greedy`, which is
# the preprocessing and then `act` without exploring, it puts the traced tensor in the place of the
# array. NumPy numbers become plain Python numbers. A buffer that nothing reads does not get into
# the file.

# %%
#| export
def numpy_values(owner: Any, seen: set[int]) -> Iterator[tuple[Any, Any, Any]]:
    """Find all NumPy arrays and numbers in an object and its parts: owner, name and value."""
    plain = type(owner).__setattr__ is object.__setattr__  # no network, no settings, no class
    items: list[tuple[Any, Any]] = []
    if isinstance(owner, dict):
        items = list(owner.items())
    elif isinstance(owner, list | tuple):
        items = list(enumerate(owner))
    elif plain and hasattr(owner, "__dict__") and not isinstance(owner, gym.Env | ModuleType):
        items = list(vars(owner).items())
    for name, value in items:
        if isinstance(value, np.ndarray | np.generic) and not isinstance(owner, tuple):
            yield owner, name, value
        elif id(value) not in seen:
            seen.add(id(value))
            yield from numpy_values(value, seen)


def replace_value(owner: Any, name: Any, value: Any) -> None:
    """Put a value where `numpy_values` found one."""
    if isinstance(owner, (dict, list)):  # `dict | list` cannot be traced
        owner[name] = value
    else:
        setattr(owner, name, value)


class GreedyPolicy(nn.Module):
    """The greedy actions of an agent as a function of tensors."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent = agent
        for name, part in vars(agent).items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
        self.arrays: list[tuple[Any, Any]] = []
        self.numbers: list[tuple[Any, Any, Any]] = []  # constants such as the number of actions
        for owner, name, value in numpy_values(agent, {id(agent)}):
            if isinstance(value, np.generic):
                self.numbers.append((owner, name, value.item()))
            elif value.dtype.kind in "fiub":  # real numbers and truth values
                self.register_buffer(f"array_{len(self.arrays)}", torch.tensor(value))
                self.arrays.append((owner, name))

    def forward(self, obs: Tensor, *recurrent: Tensor) -> tuple[Tensor, ...]:
        """Return actions, and the next state of a recurrent agent."""
        for i, (owner, name) in enumerate(self.arrays):
            replace_value(owner, name, getattr(self, f"array_{i}").numpy())
        for owner, name, number in self.numbers:
            replace_value(owner, name, number)
        if recurrent:
            start, *state = recurrent
            actions, next_state = self.agent.greedy(obs.numpy(), tuple(state), start.numpy())
            return torch.as_tensor(actions), *next_state
        start = torch.ones(len(obs), dtype=torch.bool)
        actions, _ = self.agent.greedy(obs.numpy(), None, start.numpy())
        return (torch.as_tensor(actions),)


# %%
def found(agent: Agent) -> list[str]:
    """Name the arrays and numbers that the tracer would forget."""
    policy = GreedyPolicy(agent)
    owners = [(owner, name) for owner, name, *_ in (*policy.arrays, *policy.numbers)]
    return sorted({f"{type(owner).__name__}.{name}" for owner, name in owners})


print(", ".join(found(agent)))
print(", ".join(found(SAC("Pendulum-v1"))))

# %% [markdown]
# ## The file
#
# Inputs and outputs have names, and the first dimension of each is the batch. Each file has
# metadata that the runtime can read: the algorithm, the environment, the training steps, and the
# shape and type of all inputs and outputs.

# %%
#| export
def import_onnx() -> None:
    """Import what the export needs, or say how to get it."""
    try:
        for name in ("onnx", "onnxscript", "onnxruntime"):
            importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"The export needs {error.name}, which is not installed: `pip install 'rlbook[onnx]'`."
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep PyTorch's exporter from reporting on its own internals."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def example_inputs(agent: Agent, batch: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random observations and, for a recurrent agent, the state where episodes start."""
    space = copy.deepcopy(agent.preprocessing.env_space)  # which has a generator of its own
    space.seed(seed)
    obs = np.stack([np.asarray(space.sample(), space.dtype) for _ in range(batch)])
    _, state = agent.greedy(obs, None, np.ones(batch, dtype=bool))
    if state is None:
        return {"obs": obs}
    if not isinstance(state, tuple) or not all(isinstance(part, Tensor) for part in state):
        raise ValueError(f"The state of {agent.name} must be a tuple of tensors to be exported.")
    parts = {f"state_{i}": np.zeros_like(part.numpy()) for i, part in enumerate(state)}
    return {"obs": obs, "episode_start": np.ones(batch, dtype=bool), **parts}


def describe(arrays: dict[str, np.ndarray]) -> dict[str, str]:
    """Say of each array what it holds, such as `float32 (batch, 4)`."""
    shapes = {name: ", ".join(["batch", *map(str, x.shape[1:])]) for name, x in arrays.items()}
    return {name: f"{x.dtype} ({shapes[name]})" for name, x in arrays.items()}


def trace(agent: Agent, inputs: dict[str, np.ndarray]) -> Any:
    """Return the greedy policy as an ONNX program."""
    tensors = tuple(torch.from_numpy(array) for array in inputs.values())
    batch = {0: torch.export.Dim("batch")}
    shapes = (batch, (batch,) * (len(tensors) - 1)) if len(tensors) > 1 else (batch,)
    outputs = ["action", *(f"next_{name}" for name in inputs if name.startswith("state"))]
    with quiet(), torch.no_grad():
        program = torch.export.export(
            GreedyPolicy(agent), tensors, dynamic_shapes=shapes, strict=True
        )
        if any(type(part) is not Tensor for part in program.constants.values()):
            raise ValueError("it reads an array that is not an attribute of the agent")
        return torch.onnx.export(
            program.run_decompositions(),  # to fewer operations, with their types made explicit
            tensors,
            dynamo=True,
            verbose=False,
            dynamic_shapes=shapes,
            input_names=list(inputs),
            output_names=outputs,
        )

# %% [markdown]
# Nothing may go wrong silently here. If an `act` of your own branches on a value of the
# observation, the tracer refuses it. But if it uses a random number, it is traced without an
# error. So before the file gets its name, its actions are compared with those of the agent. They
# may differ by rounding, and one action in a hundred may differ altogether, because rounding can
# decide between two equal Q-values.

# %%
#| export
def reason(error: Exception) -> str:
    """Return the first line of what PyTorch's tracer says, and the line of code that it means."""
    while error.__cause__:  # the exporter of ONNX wraps what went wrong
        error = error.__cause__  # type: ignore[assignment]
    said = str(error).strip().partition("\n")[0].rstrip(".")
    lines = re.findall(r'File "[^"]+", line \d+, in .*\n\s+(\S.*)', str(error))
    return f"{said}, at `{lines[-1]}`" if lines else said


def same_actions(agent: Agent, file: Path, batch: int = 100, steps: int = 3) -> bool:
    """Say whether a file gives the actions of the agent, over some steps of random observations."""
    onnxruntime = importlib.import_module("onnxruntime")
    try:
        session, state = onnxruntime.InferenceSession(file), None
    except Exception as error:  # the runtime has a dozen of its own
        raise ValueError(f"{agent.name} cannot be exported: {reason(error)}.") from error
    inputs, start = example_inputs(agent, batch), np.ones(batch, dtype=bool)
    for step in range(steps):
        inputs["obs"] = example_inputs(agent, batch, seed=step)["obs"]
        expected, state = agent.greedy(inputs["obs"], state, start)
        actions, *next_state = session.run(None, inputs)
        close = np.isclose(actions, expected, rtol=1e-3, atol=1e-4)
        if actions.dtype != expected.dtype or close.mean() < 0.99:
            return False
        start = np.arange(batch) % 3 == 0  # some episodes end
        parts = {f"state_{i}": part for i, part in enumerate(next_state)}
        inputs |= {"episode_start": start, **parts} if parts else {}
    return True


def export_onnx(agent: Agent, path: str | os.PathLike[str]) -> dict[str, str]:
    """Write the greedy policy of an agent as an ONNX file, and return its metadata."""
    import_onnx()
    path = Path(path)
    if path.suffix != ".onnx" or path.is_dir():
        raise ValueError(f"The name of an exported policy must end in .onnx, not be {str(path)!r}.")
    if not path.parent.is_dir():
        raise ValueError(f"There is no directory {path.parent}: make it first.")
    if agent.device.type != "cpu":
        raise ValueError("An agent is exported on the CPU: save it and `rlbook.load` it there.")
    inputs = example_inputs(agent)
    try:
        program = trace(agent, inputs)
    except Exception as error:  # what PyTorch raises here is not documented
        raise ValueError(
            f"{agent.name} cannot be exported: PyTorch could not trace its `act` ({reason(error)})."
        ) from error
    actions, state = agent.greedy(inputs["obs"], None, np.ones(2, dtype=bool))
    next_state = {f"next_state_{i}": part.numpy() for i, part in enumerate(state or ())}
    metadata = {
        "algo": agent.name,
        "env_id": agent.config.env_id,
        "env_kwargs": json.dumps(agent.config.env_kwargs),
        "global_step": str(agent.global_step),
        "inputs": json.dumps(describe(inputs)),
        "outputs": json.dumps(describe({"action": actions, **next_state})),
        "rlbook": rlbook.__version__,
    }
    program.model.metadata_props.update(metadata)

    def save(file: Path) -> None:
        program.save(file, external_data=False)
        if not same_actions(agent, file):
            raise ValueError(
                f"{agent.name} cannot be exported: the exported policy acts differently. Its `act` "
                "without exploring must not draw random numbers, or branch on values."
            )

    try:
        write_whole(path, save)
    except OSError as error:
        raise ValueError(f"Could not write {path}: {error.strerror or error}.") from error
    return metadata


# %% [markdown]
# Here is the metadata of a SAC agent's file. Its actions are between the bounds of the
# environment, −2 and 2, because the scaling is part of `act`:

# %%
export_onnx(SAC("Pendulum-v1", seed=1), folder / "sac.onnx")
session = onnxruntime.InferenceSession(folder / "sac.onnx")
for name, value in sorted(session.get_modelmeta().custom_metadata_map.items()):
    if not name.startswith("pkg."):  # PyTorch leaves notes too
        print(f"{name:12} {value}")
(torques,) = session.run(None, {"obs": 100 * many[:, :3]})  # far from what it knows
print(f"actions from {torques.min():.3f} to {torques.max():.3f}")
assert np.abs(torques).max() <= 2

# %% [markdown]
# ## A recurrent agent
#
# [DRQN](drqn.ipynb) carries a hidden state from step to step. In a file it is an input and an
# output: what comes out as `next_state_0` goes in as `state_0` at the next step. `episode_start`
# says which episodes start, and for those the state is reset to zero. So one batch can hold many
# games, each at another step of its episode.

# %%
recurrent = DRQN("rlbook/MaskedCartPole-v0", seed=1)
told = export_onnx(recurrent, folder / "drqn.onnx")
print("inputs ", ", ".join(json.loads(told["inputs"])))
print("outputs", ", ".join(json.loads(told["outputs"])))

session = onnxruntime.InferenceSession(folder / "drqn.onnx")
fed = {each.name: np.zeros((4, each.shape[1]), np.float32)
       for each in session.get_inputs() if each.name.startswith("state")}
rng, hidden = np.random.default_rng(0), None
for t in range(250):  # four games: a thousand observations
    seen = rng.normal(0, 0.2, (4, 2)).astype(np.float32)
    start = rng.random(4) < 0.1 if t else np.ones(4, dtype=bool)
    expected, hidden = recurrent.predict(seen, hidden, start)
    actions, *state = session.run(None, {"obs": seen, "episode_start": start, **fed})
    fed = {f"state_{i}": part for i, part in enumerate(state)}
    assert np.array_equal(actions, expected)
    assert all(np.allclose(a, b.numpy(), atol=1e-5) for a, b in zip(state, hidden, strict=True))

# %% [markdown]
# ## Mistakes
#
# A mistake gets one sentence, and no file is left behind. The policy of `Coin` is random, so its
# file cannot give the same actions:

# %%
class Coin(DQN):
    """Chooses by chance, even when it should not explore."""

    name = "coin"

    def act(self, obs: np.ndarray, state: Any, episode_start: np.ndarray, explore: bool) -> tuple[np.ndarray, Any]:
        """Toss a coin for each observation."""
        return torch.randint(0, 2, (len(obs),)).numpy(), state


for attempt in (
    lambda: export_onnx(agent, folder / "policy.pt"),
    lambda: export_onnx(agent, folder / "nowhere" / "policy.onnx"),
    lambda: export_onnx(Coin("CartPole-v1"), folder / "coin.onnx"),
):
    try:
        attempt()
    except ValueError as error:
        print(str(error).replace(str(folder), "runs"))
assert not (folder / "coin.onnx").exists()

# %% [markdown]
# ## Honest edges
#
# - The file holds the greedy policy. Exploring, learning and the critics stay in Python.
# - A trace follows one path. `act` may branch on settings, which never change, but not on the
#   observation.
# - Running statistics of the observations ([Preprocessing](preprocess.ipynb)) are in the file, as
#   they were when it was written. Frame stacking and other wrappers belong to the environment and
#   are not in the file.
# - PyTorch and the runtime round differently, so continuous actions are not the same bit for bit
#   (exercise 4).
# - Files are checked only with the CPU runtime. For half precision and quantisation, use the tools
#   of ONNX.
#
# ## Exercises
#
# **Exercise 1, a planted bug.** This function feeds the observations of two episodes to the
# recurrent file, and returns the actions. In the first episode they are those of `predict`, in the
# second they are not. Why?


# %%
def two_episodes(session: Any, episodes: list[np.ndarray]) -> list[int]:
    """Return the actions of the exported policy for the observations of some episodes."""
    names = [each.name for each in session.get_inputs() if each.name.startswith("state")]
    state = {each.name: np.zeros((1, each.shape[1]), np.float32) for each in session.get_inputs() if each.name in names}
    actions = []
    for number, episode in enumerate(episodes):
        for t, seen in enumerate(episode):
            start = np.array([number == 0 and t == 0])
            action, *parts = session.run(None, {"obs": seen[None], "episode_start": start, **state})
            state = dict(zip(names, parts, strict=True))
            actions.append(int(action[0]))
    return actions


# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Only the first step of the first episode is marked as a start, so the second episode begins with
# the hidden state of the end of the first. Each episode starts at its own first step:
#
# ```python
# def two_episodes(session: Any, episodes: list[np.ndarray]) -> list[int]:
#     """Return the actions of the exported policy for the observations of some episodes."""
#     names = [each.name for each in session.get_inputs() if each.name.startswith("state")]
#     state = {each.name: np.zeros((1, each.shape[1]), np.float32) for each in session.get_inputs() if each.name in names}
#     actions = []
#     for episode in episodes:
#         for t, seen in enumerate(episode):
#             start = np.array([t == 0])
#             action, *parts = session.run(None, {"obs": seen[None], "episode_start": start, **state})
#             state = dict(zip(names, parts, strict=True))
#             actions.append(int(action[0]))
#     return actions
#
#
# class Follower:
#     """Stands in for a session: its action is the hidden state, which counts the steps."""
#
#     def get_inputs(self) -> list[Any]:
#         """Name one state."""
#         from types import SimpleNamespace
#
#         return [SimpleNamespace(name="obs", shape=["batch", 2]), SimpleNamespace(name="state_0", shape=["batch", 1])]
#
#     def run(self, _: None, fed: dict[str, np.ndarray]) -> list[np.ndarray]:
#         """Count on from the state, or from zero at a start."""
#         count = fed["state_0"] * ~fed["episode_start"][:, None] + 1
#         return [count[:, 0], count]
#
#
# episode = np.zeros((3, 2), np.float32)
# assert two_episodes(Follower(), [episode, episode]) == [1, 2, 3, 1, 2, 3]
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** How many numbers does the file of the first agent hold, and how many bytes do
# they take? Compare with the size of the file.

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Each layer of the Q-network has a weight for each pair of input and output, and a bias for each
# output. By hand: $4 \cdot 64 + 64$, $64 \cdot 64 + 64$ and $64 \cdot 2 + 2$ make 4,610 numbers.
# At four bytes each they take 18,440 bytes, about half of the file. The rest is mostly the list of
# operations.
#
# ```python
# q_network = DQN("CartPole-v1").q_network
# numbers = sum(parameter.numel() for parameter in q_network.parameters())
# sizes = [layer.weight.shape for layer in q_network.modules() if isinstance(layer, nn.Linear)]
# assert numbers == sum(outputs * inputs + outputs for outputs, inputs in sizes)
# print(f"{numbers:,} numbers, {4 * numbers:,} bytes")
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** Write an agent that takes the action with the largest Q-value, but only if this
# is more than 0.1 above the Q-value of action 0, and action 0 otherwise. Write `act` so that it
# can be traced.

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# A Python `if` would need the value while tracing. `np.where` is an operation that can be traced:
#
# ```python
# class Cautious(DQN):
#     """Takes action 0 unless another is clearly better."""
#
#     name = "cautious"
#
#     def act(self, obs: np.ndarray, state: Any, episode_start: np.ndarray, explore: bool) -> tuple[np.ndarray, Any]:
#         """Compare the Q-values."""
#         q = self.q_values(obs)
#         clear = q.max(axis=1) - q[:, 0] > 0.1
#         return np.where(clear, q.argmax(axis=1), 0), state
#
#
# cautious = Cautious("CartPole-v1", hidden=(8,))
# exported = torch.export.export(GreedyPolicy(cautious), (torch.zeros(2, 4),), strict=True)
# obs = torch.randn(50, 4)
# q = cautious.q_network(obs)
# expected = torch.where(q[:, 1] - q[:, 0] > 0.1, 1, 0)
# assert np.array_equal(cautious.predict(obs.numpy())[0], expected)
# assert torch.equal(exported.module()(obs[:2])[0], expected[:2])
# ```
#
# </details>

# %% [markdown]
# **Exercise 4.** Continuous actions of the file and of the agent differ in their last digits.
# Where does the difference come from, if both compute with 32 bits? Show it without ONNX.

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# A matrix product is a sum of many numbers, and each addition rounds. Programs that add in another
# order round differently:
#
# ```python
# numbers = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
# forwards = np.cumsum(numbers)[-1]
# backwards = np.cumsum(numbers[::-1])[-1]
# exact = np.sum(numbers.astype(np.float64))
# assert forwards != backwards
# assert abs(forwards - exact) < 1e-2 and abs(backwards - exact) < 1e-2
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# ```
# pip install 'rlbook[onnx]'
# rlbook train dqn --config cartpole --run-dir runs/a
# rlbook export runs/a --out policy.onnx
# ```
#
# ```python
# import rlbook
# from rlbook.export import export_onnx
# metadata = export_onnx(rlbook.load("runs/a"), "policy.onnx")
# ```
#
# ## References
#
# - The [ONNX](https://onnx.ai) format and [ONNX Runtime](https://onnxruntime.ai).
# - PyTorch's [`torch.export`](https://pytorch.org/docs/stable/export.html) and
#   [`torch.onnx`](https://pytorch.org/docs/stable/onnx.html).
