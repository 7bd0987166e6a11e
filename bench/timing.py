"""How the benchmarks measure: contestants take turns, and medians come with their quartiles."""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

import rlbook.run

Work = Callable[[], object]
Spread = list[float]  # median, lower and upper quartile


def spread(values: Any, scale: float = 1.0) -> Spread:
    """Return median and quartiles, with four digits."""
    return [float(f"{x * scale:.4g}") for x in np.percentile(values, [50, 25, 75])]


def seconds(work: Work, calls: int = 1) -> float:
    """Return the seconds of one call, in time of the processor: other programs do not count."""
    began = time.process_time()
    for _ in range(calls):
        work()
    return (time.process_time() - began) / calls


def take_turns(works: dict[str, Work], rounds: int, at_least: float = 0.04) -> dict[str, Any]:
    """Time works in turn, `rounds` times, each often enough for `at_least` so many seconds."""
    calls = {}
    for name, work in works.items():
        work()  # the first calls compile, allocate and import
        once = min(seconds(work) for _ in range(3))
        calls[name] = max(1, round(at_least / max(once, 1e-7)))
    # Compiling has switched these checks off for the whole process. Without them peers that rely on
    # them would be faster here than where nothing is compiled.
    torch.distributions.Distribution.set_default_validate_args(True)
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(seconds(work, calls[name]))
    return {name: np.array(values) for name, values in times.items()}


def compare(works: dict[str, Work], rounds: int, base: str, per: int = 1) -> dict[str, Any]:
    """Return milliseconds of each work, and how many times as fast as `base` it is.

    A call does its work `per` times. A ratio is that of neighbours in one round, so that a busy
    moment hits both, and its median is taken over the rounds.
    """
    times = take_turns(works, rounds)
    return {
        name: {"ms": spread(values, 1e3 / per), "speedup": spread(times[base] / values)}
        for name, values in times.items()
    }


class Stopwatch:
    """Books time on what the program does, without what it calls in between."""

    whole = ("acting", "environment")  # networks inside these are not counted apart

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.stack = ["loop"]
        self.last = time.process_time()

    def book(self) -> None:
        """Book the time since the last event."""
        now = time.process_time()
        self.spent[self.stack[-1]] += now - self.last
        self.last = now

    def enter(self, label: str) -> None:
        """Begin a kind of work."""
        self.book()
        self.stack.append(self.stack[-1] if self.stack[-1] in self.whole else label)

    def leave(self) -> None:
        """Go back to the work before."""
        self.book()
        self.stack.pop()

    def timed(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        """Return the same function, on the stopwatch."""

        def run(*args: Any, **keywords: Any) -> Any:
            self.enter(label)
            try:
                return function(*args, **keywords)
            finally:
                self.leave()

        return run


METHODS = {"act": "acting", "observe": "storing", "sample": "sampling", "update": "loss"}


@contextmanager
def on_the_stopwatch(agent: Any) -> Iterator[Stopwatch]:
    """Watch an agent and its loop at work; `loss` is the rest of an update."""
    watch = Stopwatch()
    with ExitStack() as stack:

        def put(owner: Any, name: str, label: str) -> None:
            replaced = watch.timed(getattr(owner, name), label)
            stack.enter_context(patch.object(owner, name, replaced))

        for name, label in METHODS.items():
            put(agent, name, label)
        for part in vars(agent).values():
            if isinstance(part, nn.Module):
                hooks = (
                    part.register_forward_pre_hook(lambda *_: watch.enter("forward")),
                    part.register_forward_hook(lambda *_: watch.leave()),
                )
                for hook in hooks:
                    stack.callback(hook.remove)
            elif isinstance(part, torch.optim.Optimizer):
                put(part, "step", "optimiser")
                put(part, "zero_grad", "optimiser")
        put(torch.Tensor, "backward", "backward")
        for module in {sys.modules[kind.__module__] for kind in type(agent).__mro__}:
            if hasattr(module, "polyak_update"):
                put(module, "polyak_update", "target update")
        if hasattr(agent.replay, "update_priorities"):
            put(agent.replay, "update_priorities", "sampling")
        make = rlbook.run.make_vector_env

        def make_watched(*args: Any, **keywords: Any) -> Any:
            envs = make(*args, **keywords)
            for name in ("step", "reset"):
                setattr(envs, name, watch.timed(getattr(envs, name), "environment"))
            return envs

        stack.enter_context(patch.object(rlbook.run, "make_vector_env", make_watched))
        yield watch
        watch.book()
