"""A stopwatch at the door of each part of training: where does the time of a step go?"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch

import rlbook.dqn
import rlbook.ensemble
import rlbook.run
import rlbook.sac
from rlbook.dqn import MLP
from rlbook.drqn import LSTMQNetwork

Price = tuple[float, float]  # seconds that a look at the clock costs the caller, and the called
WHOLE = ("acting", "environment", "target")  # nothing is taken out of these

# What an update itself calls for its metrics alone; others are worked out later. A metric without
# such a call (the value in SAC's policy loss) cannot be told from the loss and stays there.
METRICS: dict[str, tuple[tuple[Any, str], ...]] = {
    "drqn": ((torch, "stack"), (torch.Tensor, "abs mv")),
    "r2d2": ((torch, "stack"), (torch.Tensor, "mv")),  # `abs` is for its priorities, too
    "drqv2": ((torch.Tensor, "abs __float__"),),
}


class Clock:
    """Counts the time of each kind of work; what is inside another is taken out of it."""

    def __init__(self, price: Price = (0.0, 0.0)) -> None:
        self.spent: dict[str, float] = {}
        self.stack, self.undo = ["loop"], list[Callable[[], None]]()
        self.price = price
        self.last = time.perf_counter()

    def switch(self) -> None:
        """Book the time since the last switch."""
        now, label = time.perf_counter(), self.stack[-1]  # no call to the system: the least to pay
        self.spent[label] = self.spent.get(label, 0.0) + now - self.last
        self.last = now

    def timed(
        self, work: Callable[..., Any], label: str, within: str | None = None
    ) -> Callable[..., Any]:
        """Return the same function, on the clock wherever it is called, or `within` a kind only."""

        def run(*args: Any, **keywords: Any) -> Any:
            caller = self.stack[-1]
            if caller in WHOLE or caller == label or within not in (None, caller):
                return work(*args, **keywords)
            self.switch()
            self.stack.append(label)
            try:
                return work(*args, **keywords)
            finally:
                self.switch()
                self.stack.pop()
                self.spent[caller] -= self.price[0]
                self.spent[label] -= self.price[1]

        return run

    def watch(self, owner: Any, names: str, label: str, within: str | None = None) -> None:
        """Put functions of an object, a class or a module on the clock, where they exist."""
        for name in names.split():
            if not hasattr(owner, name):
                continue
            own, old = name in vars(owner), getattr(owner, name)
            setattr(owner, name, self.timed(old, label, within))
            undo = partial(setattr, owner, name, old) if own else partial(delattr, owner, name)
            self.undo.append(undo)


def price_of_looking(count: int = 20_000) -> Price:
    """Return the seconds that a call on the clock adds to its caller and to itself."""
    clock = Clock()
    watched = clock.timed(lambda: None, "called")
    for _ in range(count):
        watched()
    clock.switch()
    return clock.spent["loop"] / count, clock.spent["called"] / count


def modules_of(agent: Any) -> list[ModuleType]:
    """Return the modules in which an agent's class and those above it are written."""
    names = dict.fromkeys(part.__module__ for part in type(agent).__mro__)
    return [sys.modules[name] for name in names if name.startswith("rlbook.")]


def watch_loop(clock: Clock, agent: Any) -> None:
    """Put what the loop calls on the clock, and what of it is the buffer's."""
    clock.watch(agent, "act", "acting")
    clock.watch(agent, "observe sample draw", "buffer")
    clock.watch(agent, "update valued", "update")
    clock.watch(agent.replay, "update_priorities", "buffer")
    clock.watch(getattr(agent, "drawn", None), "draw", "buffer")
    # The metrics of the last update of a step, which are worked out when the loop reads them.
    clock.watch(rlbook.dqn.TDErrors, "loss details", "metrics")
    clock.watch(rlbook.sac.Judgement, "loss details", "metrics")
    clock.watch(getattr(agent, "model", None), "opinions", "metrics")


def watch_networks(clock: Clock, agent: Any) -> None:
    """Put forward and backward passes on the clock."""
    clock.watch(rlbook.ensemble, "forward_pass", "forward")
    clock.watch(rlbook.ensemble, "backward_pass", "backward")
    clock.watch(torch.Tensor, "backward", "backward")
    parts = [getattr(agent, name, None) for name in ("online", "target", "model")]
    model = parts[2]
    parts += [getattr(model, name, None) for name in ("actor", "critics", "critic", "encoder")]
    for part in parts:
        clock.watch(part, "forward trace q_values_sequence unroll draw values learn run", "forward")
        clock.watch(part, "weight_slopes input_slopes actor_slopes", "backward")
        if isinstance(part, MLP | LSTMQNetwork):
            clock.watch(part, "backward", "backward")


def watch_update(clock: Clock, agent: Any) -> None:
    """Put the parts of an update on the clock."""
    for module in modules_of(agent):
        clock.watch(module, "apply_gradients", "optimiser")
        clock.watch(module, "polyak_update", "target")
    clock.watch(torch.Tensor, "lerp_", "target")
    clock.watch(agent.optimizer, "step zero_grad", "optimiser")
    watch_networks(clock, agent)
    clock.watch(rlbook.sac, "critic_slope", "update")  # it is called from within a pass
    for owner, names in METRICS.get(agent.name, ()):
        clock.watch(owner, names, "metrics", within="update")


@contextlib.contextmanager
def on_the_clock(agent: Any, price: Price, inside: bool) -> Iterator[Clock]:
    """Watch all that an agent and its loop do, or look inside its updates, too."""
    clock = Clock(price)
    watch_loop(clock, agent)
    if inside:
        watch_update(clock, agent)
    made = rlbook.run.make_vector_env

    def make(*args: Any, **keywords: Any) -> Any:
        envs = made(*args, **keywords)
        clock.watch(envs, "step reset", "environment")
        return envs

    rlbook.run.make_vector_env = make
    try:
        yield clock
    finally:
        rlbook.run.make_vector_env = made
        for undo in reversed(clock.undo):
            undo()


def measure_step(agent: Any, steps: int, price: Price) -> dict[str, float]:
    """Return the microseconds of each kind of work per environment step.

    The parts of an update come from a run of their own, and share out what updates take in a run
    that does not look inside: so the looking does not make updates seem longer than they are.
    """
    runs = []
    for inside in (False, True):
        with on_the_clock(agent, price, inside) as clock:
            agent.learn(steps, progress=False)
            clock.switch()
        runs.append({kind: spent / steps * 1e6 for kind, spent in clock.spent.items()})
    whole, looked = runs
    update, read = whole.pop("update"), whole.pop("metrics", 0.0)
    parts = {kind: spent for kind, spent in looked.items() if kind not in whole}
    parts["metrics"] = parts.get("metrics", 0.0) - read  # inside updates, not when they are read
    parts["loss"] = parts.pop("update")  # what is left of an update
    total = sum(parts.values())
    shared = {kind: update * spent / total for kind, spent in parts.items()}
    return whole | shared | {"metrics": shared["metrics"] + read}
