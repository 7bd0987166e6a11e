"""Runs of on-policy agents that are killed, which must end as if nothing had happened."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers import assert_same_run, in_child, run_until

from rlbook.agent import Agent
from rlbook.run import RunResult, resume, train

# Checkpoints that do not fall on the ends of rollouts, which have 12 steps.
RUN: dict[str, Any] = {
    **{"env_id": "Pendulum-v1", "hidden": (8,), "num_envs": 2, "num_steps": 6, "seed": 3},
    **{"minibatch_size": 6, "total_steps": 120, "checkpoint_every": 28, "log_every": 20},
    **{"eval_every": 60, "eval_episodes": 1, "lr_decay_from": 0.0},
}


def check_killed_within_a_rollout(
    agent_class: type[Agent], settings: dict[str, Any], folder: Path
) -> None:
    """Kill a run at more than half of its calls of functions, wherever that is, and resume it."""
    whole, cut, note = folder / "whole", folder / "cut", folder / "calls"
    assert in_child(run_until, None, agent_class, {**settings, "run_dir": str(whole)}, note) == 0
    calls = int(note.read_text())
    settings = {**settings, "run_dir": str(cut)}
    assert in_child(run_until, int(0.6 * calls), agent_class, settings, note) == -9
    assert in_child(run_until, None, agent_class, settings, note) == 0
    assert_same_run(whole, cut)


def die_before(
    agent_class: type[Agent], settings: dict[str, Any], method: str, updates: int
) -> None:
    """Train, and be killed before a method is called after so many updates."""
    real = getattr(agent_class, method)

    def call(self: Agent, *arguments: Any) -> Any:
        if self.updates == updates:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *arguments)

    setattr(agent_class, method, call)
    train(agent_class(**settings), progress=False)


def check_killed_before(
    method: str,
    updates: int,
    agent_class: type[Agent],
    train_it: Callable[..., RunResult],
    settings: dict[str, Any],
    folder: Path,
) -> None:
    """Kill a run before a call of a method, and resume it."""
    config = agent_class.config_class(**settings, run_dir=str(folder / "whole"))
    whole = train_it(config, progress=False)
    cut = {**settings, "run_dir": str(folder / "cut")}
    assert in_child(die_before, agent_class, cut, method, updates) == -9
    again = resume(folder / "cut", progress=False)
    assert again.metrics == whole.metrics
    assert_same_run(folder / "whole", folder / "cut")
