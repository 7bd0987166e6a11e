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

# %%
#| export
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

# %% [markdown]
# ## A transition is a row

# %%
#| export
def storage_dtype(space: gym.Space) -> tuple[Any, tuple[int, ...]]:
    """Return the type and shape in which values of `space` are stored: images stay bytes."""
    dtype = np.dtype(space.dtype)
    return (np.dtype(np.float32) if dtype.kind == "f" else dtype), tuple(space.shape or ())


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
# ## The ring

# %%
#| export
class ReplayBuffer:
    """A ring of the last `capacity` transitions, sampled uniformly with its own generator."""

    def __init__(self, capacity: int, dtype: np.dtype, seed: int) -> None:
        self.rows = np.zeros(capacity, dtype)
        self.position = 0  # where the next row goes
        self.size = 0
        self.generator = np.random.default_rng(seed)

    def __len__(self) -> int:
        return self.size

    def add(self, rows: np.ndarray) -> None:
        """Store rows, the oldest of the ring giving way."""
        capacity = len(self.rows)
        rows = rows[-capacity:]
        until_end = min(len(rows), capacity - self.position)
        self.rows[self.position : self.position + until_end] = rows[:until_end]
        self.rows[: len(rows) - until_end] = rows[until_end:]
        self.position = (self.position + len(rows)) % capacity
        self.size = min(self.size + len(rows), capacity)

    def sample(self, batch_size: int) -> np.ndarray:
        """Draw rows uniformly, with replacement, in one gather."""
        return self.rows.take(self.generator.integers(self.size, size=batch_size))

    def state_dict(self) -> dict[str, Any]:
        """Return the filled part of the ring, without a copy, and the state of the generator."""
        filled = torch.from_numpy(self.rows[: self.size].view(np.uint8))
        return {
            "rows": filled,
            "position": self.position,
            "dtype": str(self.rows.dtype),
            "generator": self.generator.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a stored ring: the samples go on as if nothing had happened."""
        rows = state["rows"].numpy().view(self.rows.dtype)
        if state["dtype"] != str(self.rows.dtype) or len(rows) > len(self.rows):
            raise ValueError("The stored replay buffer has another shape or is larger than this one.")
        self.size = len(rows)
        self.rows[: self.size] = rows
        self.position = state["position"]
        self.generator.bit_generator.state = state["generator"]


# %% [markdown]
# ## From rows to tensors

# %%
#| export
@dataclass(frozen=True)
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
    names = rows.dtype.names or ()
    return Batch(**{name: torch.from_numpy(rows[name]).to(device) for name in names})


# %% [markdown]
# ## n-step returns

# %%
#| export
class NStepAccumulator:
    """Turns one-step rows of a batch of environments into n-step rows, never across an end."""

    def __init__(self, n: int, gamma: float, num_envs: int, dtype: np.dtype) -> None:
        self.gamma = gamma
        self.pending = np.zeros((n, num_envs), dtype)  # the last n steps, the oldest first
        self.waiting = np.zeros((n, num_envs), dtype=bool)  # not handed out yet

    def add(self, rows: np.ndarray, truncated: np.ndarray) -> np.ndarray:
        """Take one step of each environment and return the rows whose return is now complete."""
        self.pending[:-1], self.waiting[:-1] = self.pending[1:], self.waiting[1:]
        older = self.pending[:-1]
        older["reward"] += older["discount"] * rows["reward"]
        older["discount"] *= self.gamma
        self.pending[-1], self.waiting[-1] = rows, True
        self.pending[-1]["discount"] = self.gamma

        ready = self.waiting & (rows["terminated"] | truncated)  # an end completes all windows
        ready[0] |= self.waiting[0]  # n steps complete the oldest
        self.waiting &= ~ready
        steps, envs = np.nonzero(ready)
        complete = self.pending[steps, envs]
        complete["next_obs"] = rows["next_obs"][envs]
        complete["terminated"] = rows["terminated"][envs]
        return complete

    def state_dict(self) -> dict[str, Any]:
        """Return the steps that still wait for their return."""
        pending = torch.from_numpy(self.pending.view(np.uint8))
        return {"pending": pending, "waiting": torch.from_numpy(self.waiting)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over stored waiting steps."""
        self.pending[:] = state["pending"].numpy().view(self.pending.dtype)
        self.waiting[:] = state["waiting"].numpy()
