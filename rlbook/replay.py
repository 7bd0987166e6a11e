"""Made from book/replay.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "Batch",
    "DrawnBatches",
    "NStepAccumulator",
    "NStepWindows",
    "ReplayBuffer",
    "draw_places",
    "make_rows",
    "storage_dtype",
    "to_batch",
    "transition_dtype",
]

# %% book/replay.py · Replay
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor


# %% book/replay.py · A transition is a row
def storage_dtype(space: gym.Space) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the type and shape in which values of `space` are stored: images stay bytes."""
    if space.dtype is None or space.shape is None:
        raise ValueError(f"A replay buffer stores arrays of numbers, and {space} is not one array.")
    if isinstance(space, gym.spaces.Discrete):
        return np.dtype(np.int64), ()  # PyTorch wants it so, whatever the environment counts in
    dtype = np.dtype(np.float32) if space.dtype.kind == "f" else space.dtype
    return dtype, space.shape


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


# %% book/replay.py · The ring
def draw_places(generator: np.random.Generator, size: int, count: int) -> np.ndarray:
    """Draw `count` of `size` places with replacement, each as likely as any other."""
    return (generator.random(count) * size).astype(np.int64)  # quicker than `integers`


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


# %% book/replay.py · From rows to tensors
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


# %% book/replay.py · n-step returns
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
