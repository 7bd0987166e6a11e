"""What all benchmarks share: contestants take turns, and medians come with their spread."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

Work = Callable[[], object]


def seconds(work: Work, count: int = 1, wall: bool = False) -> float:
    """Return the seconds of one call: of the processor, which other programs do not slow down."""
    clock = time.perf_counter if wall else time.process_time
    began = clock()
    for _ in range(count):
        work()
    return (clock() - began) / count


def take_turns(
    works: dict[str, Work],
    rounds: int = 9,
    slice_seconds: float = 0.02,
    wall: bool = False,
    before: Callable[[str], object] = lambda name: None,  # what is not to be timed
    calls: int | None = None,  # of a turn; by default as many as fill a slice
) -> dict[str, list[float]]:
    """Time works in turn, so that all meet the same noise, each often enough to be measurable."""
    counts = {}
    for name, work in works.items():
        before(name)
        work()  # warm up
        counts[name] = calls or max(1, round(slice_seconds / max(seconds(work), 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            before(name)
            times[name].append(seconds(work, counts[name], wall))
    return times


def spread(values: list[float] | np.ndarray, scale: float = 1.0) -> list[float]:
    """Return median, lower and upper quartile."""
    return [float(f"{x * scale:.4g}") for x in np.percentile(values, [50, 25, 75])]


def compare(
    works: dict[str, Work], rounds: int, per: dict[str, int] | int = 1, **options: Any
) -> dict[str, Any]:
    """Return milliseconds of each work, and how many times those of each other one.

    A call may do something several times: then `per` says how often. A ratio is that of neighbours,
    turn by turn, and the median is taken over these ratios.
    """
    often = per if isinstance(per, dict) else dict.fromkeys(works, per)
    turns = take_turns(works, rounds, **options)
    times = {name: np.array(values) / often[name] for name, values in turns.items()}
    found = {
        name: {
            "ms": spread(values, 1e3),
            "times": {
                other: spread(values / times[other]) for other in times if other != name
            },
        }
        for name, values in times.items()
    }  # fmt: skip
    return {"turns": rounds, "works": found}


def alternate(works: dict[str, Work], rounds: int) -> dict[str, list[float]]:
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
