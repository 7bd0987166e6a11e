"""Made from book/replay.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "Batch",
    "NStepAccumulator",
    "ReplayBuffer",
    "ReplayConfig",
    "check_stored",
    "make_transitions",
    "storage_dtype",
    "to_batch",
    "transition_dtype",
    "updates_due",
]

# %% book/replay.py · Replay
from dataclasses import dataclass
from typing import Any, Self

import gymnasium as gym
import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlbook.settings import Config


# %% book/replay.py · A transition
def storage_dtype(space: gym.Space) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the type and shape in which values of `space` are stored: images stay bytes."""
    if space.dtype is None or space.shape is None:
        raise ValueError(f"A replay buffer stores arrays of numbers, and {space} is not one array.")
    if isinstance(space, gym.spaces.Discrete):
        return np.dtype(np.int64), ()  # PyTorch indexes with int64
    dtype = np.dtype(np.float32) if space.dtype.kind == "f" else space.dtype
    return dtype, space.shape


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


# %% book/replay.py · The circular buffer
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


# %% book/replay.py · From transitions to tensors
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


# %% book/replay.py · n-step returns
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


# %% book/replay.py · When to learn
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


def updates_due(config: ReplayConfig, step: int) -> int:
    """Return how many updates are due once all environments have stepped, up to `step`."""
    if step <= config.learning_starts:
        return 0
    before = (step - config.num_envs) // config.train_frequency
    return (step // config.train_frequency - before) * config.gradient_steps
