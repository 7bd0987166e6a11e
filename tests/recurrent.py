"""Random episodes and random steps for the tests of recurrent agents."""

from typing import Any

import numpy as np
import torch

from rlbook.drqn import RecurrentReplayBuffer


def play(buffer: RecurrentReplayBuffer, steps: int, seed: int) -> list[list[dict[str, Any]]]:
    """Fill a buffer with random episodes; return the episodes of each environment, in order."""
    rng = np.random.default_rng(seed)
    count, _, inputs = buffer.open["obs"].shape
    size = buffer.open["state"].shape[1]
    episodes: list[list[dict[str, Any]]] = [[] for _ in range(count)]
    start, obs = np.ones(count, dtype=bool), rng.normal(size=(count, inputs)).astype(np.float32)
    for _ in range(steps):
        terminated = rng.random(count) < 0.08
        truncated = (rng.random(count) < 0.05) & ~terminated
        step: dict[str, Any] = {
            "obs": obs,
            "action": rng.integers(3, size=count),
            "reward": rng.normal(size=count).astype(np.float32),
            "next_obs": rng.normal(size=(count, inputs)).astype(np.float32),
            "terminated": terminated,
            "truncated": truncated,
            "episode_start": start,
        }
        step["state"] = rng.normal(size=(count, size)).astype(np.float32) * ~start[:, None]
        buffer.append(**step)
        for i in range(count):
            episodes[i].append({name: part[i] for name, part in step.items()})
        start = terminated | truncated
        first = rng.normal(size=obs.shape).astype(np.float32)
        obs = np.where(start[:, None], first, step["next_obs"])
    return episodes


def split(steps: list[dict[str, Any]], length: int) -> list[list[dict[str, Any]]]:
    """Cut the steps of one environment into chunks the plain way; the open one is left out."""
    chunks, chunk = [], []
    for step in steps:
        chunk.append(step)
        if len(chunk) == length or step["terminated"] or step["truncated"]:
            chunks.append(chunk)
            chunk = []
    return chunks


def random_steps(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "q": torch.randn(5, 4, 3),
        "action": torch.randint(3, (5, 4)),
        "reward": torch.randn(5, 4),
        "discount": torch.rand(5, 4),
        "terminated": torch.rand(5, 4) < 0.3,
        "mask": torch.rand(5, 4) < 0.7,
        "next_q_target": torch.randn(5, 4, 3),
    }
