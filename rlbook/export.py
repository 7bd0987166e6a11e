"""Made from book/export.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "GreedyPolicy",
    "describe",
    "example_inputs",
    "export_onnx",
    "import_onnx",
    "numpy_values",
    "quiet",
    "reason",
    "replace_value",
    "same_actions",
    "trace",
]

# %% book/export.py · Export
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


# %% book/export.py · Tracing
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


# %% book/export.py · The file
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
