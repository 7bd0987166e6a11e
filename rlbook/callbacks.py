"""Made from book/callbacks.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "BEST",
    "Callback",
    "Callbacks",
    "KeepBest",
    "StopAtReturn",
    "StopWithoutImprovement",
    "check_callbacks",
    "make_callbacks",
]

# %% book/callbacks.py · Callbacks
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbook.checkpoint import write_checkpoint
from rlbook.envs import Evaluation, Mistake
from rlbook.settings import Config

if TYPE_CHECKING:  # the loop is the next chapter
    from rlbook.run import Run


# %% book/callbacks.py · The protocol
class Callback:
    """Is told what happens in a run; a subclass fills in the moments that it cares for."""

    def after_step(self, run: "Run") -> None:
        """After a step of all environments and the updates that were due."""

    def after_evaluation(self, run: "Run", evaluation: Evaluation) -> None:
        """After an evaluation was logged, unless it only ends a piece of a longer run."""

    def after_checkpoint(self, run: "Run", path: Path) -> None:
        """After a checkpoint was written."""

    def at_end(self, run: "Run") -> None:
        """Before the last checkpoint of `learn`, unless an error or a signal ended it."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""


Callbacks = Sequence[Callback]


# %% book/callbacks.py · Stopping
class StopAtReturn(Callback):
    """Stops at the first evaluation whose mean return reaches `wanted`."""

    def __init__(self, wanted: float) -> None:
        self.wanted = wanted

    def after_evaluation(self, run: "Run", evaluation: Evaluation) -> None:
        if evaluation.mean >= self.wanted:
            run.stop(f"the mean return {evaluation.mean:.1f} has reached {self.wanted:g}")


class StopWithoutImprovement(Callback):
    """Stops when `patience` evaluations in a row were no better than the best before them."""

    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.waited = patience, float("-inf"), 0

    def after_evaluation(self, run: "Run", evaluation: Evaluation) -> None:
        self.waited = 0 if evaluation.mean > self.best else self.waited + 1
        self.best = max(self.best, evaluation.mean)
        if self.waited >= self.patience:
            run.stop(f"{self.waited} evaluations were no better than {self.best:.1f}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


# %% book/callbacks.py · Keeping the best agent
BEST = "best.pt"


class KeepBest(Callback):
    """Writes the agent to `checkpoints/best.pt` when an evaluation is better than all before."""

    def __init__(self) -> None:
        self.best = float("-inf")

    def after_evaluation(self, run: "Run", evaluation: Evaluation) -> None:
        if not run.directory:
            raise Mistake("KeepBest needs a 'run_dir' to keep the best agent in.")
        if evaluation.mean > self.best:
            self.best, folder = evaluation.mean, run.directory.checkpoints.directory
            folder.mkdir(parents=True, exist_ok=True)
            write_checkpoint(folder / BEST, run.agent.checkpoint(replay=False))

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


# %% book/callbacks.py · From a setting
def check_callbacks(callbacks: Any) -> None:
    """Raise unless these are callbacks in a list, and not their classes."""
    if not isinstance(callbacks, list | tuple):
        raise ValueError("`callbacks` must be a list: write callbacks=[...].")
    for each in callbacks:
        if isinstance(each, type):
            name = each.__name__
            raise ValueError(f"A callback is an instance, not a class: write {name}(...).")
        if not hasattr(each, "after_step"):
            raise ValueError(f"{each!r} is no callback: extend rlbook.callbacks.Callback.")


def make_callbacks(config: Config) -> list[Callback]:
    """Make the callbacks that the settings ask for."""
    made: list[Callback] = []
    if config.keep_best:
        if config.run_dir is None:
            raise ValueError("Setting 'keep_best' needs a 'run_dir' to keep the best agent in.")
        made.append(KeepBest())
    if config.stop_at_return is not None:
        made.append(StopAtReturn(config.stop_at_return))
    if config.stop_patience is not None:
        made.append(StopWithoutImprovement(config.stop_patience))
    if made and not config.eval_every:
        names = "'keep_best', 'stop_at_return' and 'stop_patience'"
        raise ValueError(f"Settings {names} need evaluations: set 'eval_every' above 0.")
    return made
