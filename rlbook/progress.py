"""Made from book/progress.py: edit the chapter, then run `rlbook tangle`."""

__all__ = ["Interrupted", "Progress", "RunFailed", "catch_signals", "in_notebook"]

# %% book/progress.py · Watching and stopping a run
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tqdm import tqdm

from rlbook.envs import Evaluation


# %% book/progress.py · Where am I?
def in_notebook() -> bool:
    """Say whether a Jupyter kernel runs this code."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


class Progress:
    """A bar in a terminal and in a notebook; elsewhere one line per evaluation."""

    def __init__(self, label: str, start: int, total: int, enabled: bool) -> None:
        self.label, self.start, self.total = label, start, total
        self.began = self.shown = time.perf_counter()
        self.notes: dict[str, str] = {}
        self.notebook = enabled and in_notebook()
        self.lines = enabled and not self.notebook and not sys.stderr.isatty()
        self.bar = None
        if enabled and not self.notebook and not self.lines:
            self.bar = tqdm(total=self.total, initial=start, desc=label, unit="step")
        if self.notebook:
            from IPython.display import display

            self.handle = display({"text/plain": label}, raw=True, display_id=True)

    def start_at(self, step: int) -> None:
        """Count from a step on, as a resumed run does: what came before was not done now."""
        self.start, self.began = step, time.perf_counter()
        if self.bar:
            self.bar.initial = self.bar.n = self.bar.last_print_n = step

    def step(self, step: int, metrics: dict[str, float] | None) -> None:
        """Show where the run is, ten times a second at most."""
        now = time.perf_counter()
        if now - self.shown < 0.1:
            return
        self.shown = now
        if metrics and "loss" in metrics:
            self.notes["loss"] = f"{metrics['loss']:.3g}"
        if self.bar:
            self.bar.set_postfix(self.notes, refresh=False)
            self.bar.update(step - self.bar.n)
        if self.notebook:
            elapsed, done = now - self.began, step - self.start
            self.show(
                tqdm.format_meter(
                    step,
                    self.total,
                    elapsed,
                    prefix=self.label,
                    unit="step",
                    rate=done / elapsed,
                    postfix=", ".join(f"{name}={note}" for name, note in self.notes.items()),
                    ncols=100,
                )
            )

    def show(self, text: str) -> None:
        """Replace the line in the notebook."""
        self.handle.update({"text/plain": text}, raw=True)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Note the result of an evaluation."""
        self.notes["eval"] = f"{evaluation.mean:.1f}"
        if self.lines:
            seconds = time.perf_counter() - self.began
            speed = (step - self.start) / seconds
            loss = f", loss {self.notes['loss']}" if "loss" in self.notes else ""
            print(
                f"{self.label}: step {step:,} of {self.total:,}, evaluation "
                f"{evaluation.mean:.1f} ± {evaluation.std:.1f}{loss}, {speed:,.0f} steps/s",
                flush=True,
            )

    def close(self, step: int) -> None:
        """Leave one plain line where the bar was."""
        if self.bar:
            self.bar.set_postfix(self.notes, refresh=False)
            self.bar.update(step - self.bar.n)
            self.bar.close()
        if self.notebook:
            seconds = time.perf_counter() - self.began
            done = step - self.start
            result = f", evaluation {self.notes['eval']}" if "eval" in self.notes else ""
            speed = f"{done:,} steps in {seconds:.1f} s ({done / seconds:,.0f} steps/s)"
            self.show(f"{self.label}: {speed}{result}")


# %% book/progress.py · Being stopped
class Interrupted(KeyboardInterrupt):
    """A run was stopped by Ctrl-C or SIGTERM after it wrote its checkpoint."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class RunFailed(RuntimeError):
    """A run cannot go on, and says why and from where it can be resumed."""


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collect the first Ctrl-C or SIGTERM in a list; a second one stops at once."""
    caught: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield caught  # only the main thread may handle signals
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, old in before.items():
            signal.signal(number, old)
