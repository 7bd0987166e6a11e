"""Made from book/preprocess.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "CLIP",
    "EPSILON",
    "Preprocessing",
    "RunningStatistics",
    "has_channels_last",
    "prepare",
    "prepared_space",
]

# %% book/preprocess.py · What the network sees
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

from rlbook.settings import Config

# %% book/preprocess.py · Running statistics
CLIP = 10.0  # largest size of a number that was standardised
EPSILON = 1e-8  # added to a variance, which may be 0


class RunningStatistics:
    """Mean and variance of all arrays of one shape that were seen so far."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.mean, self.variance = np.zeros(shape), np.ones(shape)  # in 64 bits
        self.count = 0

    def update(self, batch: np.ndarray) -> None:
        """Count some more values, (batch, ...)."""
        batch = batch.astype(np.float64)
        old, new = self.count, len(batch)
        delta = batch.mean(axis=0) - self.mean
        between = delta**2 * (old * new / (old + new))
        self.variance = (old * self.variance + new * batch.var(axis=0) + between) / (old + new)
        self.mean = self.mean + delta * (new / (old + new))
        self.count = old + new

    def scale(self, values: np.ndarray) -> np.ndarray:
        """Divide values by the deviation."""
        scaled = values / np.sqrt(self.variance + EPSILON)
        return np.clip(scaled, -CLIP, CLIP).astype(np.float32)

    def standardize(self, values: np.ndarray) -> np.ndarray:
        """Subtract the mean and divide by the deviation."""
        return self.scale(values - self.mean)

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics."""
        tensors = {"mean": torch.as_tensor(self.mean), "variance": torch.as_tensor(self.variance)}
        return {**tensors, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over stored statistics."""
        mean, variance = state["mean"].cpu().numpy(), state["variance"].cpu().numpy()
        if mean.shape != np.shape(self.mean):
            raise ValueError(f"Statistics of {mean.shape} were stored, not {np.shape(self.mean)}.")
        self.mean, self.variance, self.count = mean, variance, state["count"]


# %% book/preprocess.py · Numbers and pictures
def has_channels_last(space: gym.Space) -> bool:
    """Say whether observations are pictures of (height, width, channels)."""
    shape = space.shape or ()
    return isinstance(space, Box) and len(shape) == 3 and shape[2] < min(shape[:2])


def prepared_space(space: gym.Space) -> gym.Space:
    """Return the space of prepared observations."""
    if isinstance(space, Discrete):
        return Box(0.0, 1.0, (int(space.n),), np.float32)
    if has_channels_last(space):
        assert isinstance(space, Box)
        low, high = space.low.transpose(2, 0, 1), space.high.transpose(2, 0, 1)
        return Box(low, high, dtype=space.dtype.type)
    return space


def prepare(obs: np.ndarray, space: gym.Space) -> np.ndarray:
    """Turn observations (batch, ...) of a space into what networks take."""
    if isinstance(space, Discrete):
        numbers = np.arange(int(space.n)) + space.start
        return (np.asarray(obs)[:, None] == numbers).astype(np.float32)
    return obs.transpose(0, 3, 1, 2) if has_channels_last(space) else obs


# %% book/preprocess.py · All of it
class Preprocessing:
    """What happens to observations and rewards between the environments and the agent."""

    def __init__(self, env_space: gym.Space, config: Config) -> None:
        self.env_space = env_space  # of the environment's observations
        self.space = prepared_space(env_space)  # of what the agent gets
        self.gamma = float(getattr(config, "gamma", 0.99))
        self.statistics: dict[str, RunningStatistics] = {}
        if config.normalize_observations:
            shape = self.space.shape or ()
            if len(shape) != 1:
                raise ValueError(
                    "Setting 'normalize_observations' is for vectors, and the observations of "
                    f"{config.env_id!r} are {' '.join(str(env_space).split())}: leave it out."
                )
            self.statistics["observations"] = RunningStatistics(shape)
            self.space = Box(-CLIP, CLIP, shape, np.float32)
        if config.normalize_rewards:
            self.statistics["returns"] = RunningStatistics(())

    def update(self, obs: np.ndarray) -> None:
        """Count observations of the environments, (num_envs, ...)."""
        if "observations" in self.statistics:
            self.statistics["observations"].update(prepare(obs, self.env_space))

    def prepare(self, obs: np.ndarray) -> np.ndarray:
        """Return observations as the agent gets them."""
        obs = prepare(obs, self.env_space)
        if "observations" in self.statistics:
            return self.statistics["observations"].standardize(obs)
        return obs

    def scale_reward(self, reward: np.ndarray, discounted: np.ndarray) -> np.ndarray:
        """Return rewards as the agent gets them, after counting the discounted returns so far."""
        if "returns" not in self.statistics:
            return reward
        self.statistics["returns"].update(discounted)
        return self.statistics["returns"].scale(reward)

    def state_dict(self) -> dict[str, Any]:
        """Return all statistics."""
        return {name: part.state_dict() for name, part in self.statistics.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over stored statistics."""
        for name, part in self.statistics.items():
            part.load_state_dict(state[name])
