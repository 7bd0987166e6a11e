"""What the benchmarks share: works timed turn by turn, so that all meet the same noise."""

import time
from collections.abc import Callable

import numpy as np


def alternate(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Call each work once to warm up and then `rounds` times, in turn; return the seconds."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for round_number in range(rounds + 1):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            if round_number:
                times[name].append(time.perf_counter() - began)
    return times


def fill_randomly(rows: np.ndarray) -> np.ndarray:
    """Fill transitions with random numbers of the right kind."""
    generator = np.random.default_rng(0)
    for name in ("obs", "next_obs", "reward"):
        rows[name] = generator.normal(size=rows[name].shape)
    rows["action"], rows["discount"] = generator.uniform(-1, 1, size=rows["action"].shape), 0.99
    return rows
