"""Made from book/progress.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "Display",
    "Interrupted",
    "LogLines",
    "NotebookLine",
    "Progress",
    "RunFailed",
    "Tally",
    "TerminalBar",
    "bar_text",
    "bar_width",
    "catch_signals",
    "closing_text",
    "find_display",
    "in_notebook",
    "line_text",
]

# %% book/progress.py · Watching and stopping a run
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from tqdm import tqdm

from rlbook.envs import Evaluation


# %% book/progress.py · Three places
def in_notebook() -> bool:
    """Say whether a Jupyter kernel runs this code."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


# %% book/progress.py · The numbers
@dataclass
class Tally:
    """How far a run is: the numbers that every display shows."""

    label: str
    start: int  # the step at which this process began
    total: int
    step: int = 0
    seconds: float = 0.0  # since `start`
    notes: dict[str, str] = field(default_factory=dict)  # the last loss and evaluation

    def speed(self) -> float:
        """Return the steps per second since the start."""
        return (self.step - self.start) / self.seconds


def bar_text(tally: Tally) -> str:
    """Draw a bar with speed, time to go and notes."""
    return tqdm.format_meter(
        tally.step,
        tally.total,
        tally.seconds,
        prefix=tally.label,
        unit="step",
        rate=tally.speed(),
        postfix=", ".join(f"{name}={note}" for name, note in tally.notes.items()),
        ncols=100,
    )


def line_text(tally: Tally, evaluation: Evaluation | None = None) -> str:
    """Say in one line where the run is, how fast it is, and what an evaluation found."""
    where = f"{tally.label}: step {tally.step:,} of {tally.total:,}"
    loss = f", loss {tally.notes['loss']}" if "loss" in tally.notes else ""
    score = f", evaluation {evaluation.mean:.1f} ± {evaluation.std:.1f}" if evaluation else ""
    return f"{where}{score}{loss}, {tally.speed():,.0f} steps/s"


def closing_text(tally: Tally) -> str:
    """Say in one line what was done, and how well it ended."""
    done = f"{tally.step - tally.start:,} steps in {tally.seconds:.1f} s"
    result = f", evaluation {tally.notes['eval']}" if "eval" in tally.notes else ""
    return f"{tally.label}: {done} ({tally.speed():,.0f} steps/s){result}"


# %% book/progress.py · The displays
class Display:
    """Shows nothing: its subclasses fill in what they show."""

    def move(self, tally: Tally) -> None:
        """Show where the run is."""

    def evaluated(self, tally: Tally, evaluation: Evaluation) -> None:
        """Show the result of an evaluation."""

    def announce(self, tally: Tally, text: str) -> None:
        """Say what the run waits for."""

    def close(self, tally: Tally) -> None:
        """Show the end of the run."""


def bar_width() -> int:
    """Return one column less than the terminal has, or 79 if it does not tell."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return (columns or 80) - 1


class TerminalBar(Display):
    """A bar that is drawn over itself."""

    def __init__(self, tally: Tally) -> None:
        self.bar = tqdm(
            total=tally.total,
            initial=tally.start,
            desc=tally.label,
            unit="step",
            ncols=bar_width(),
            nrows=24,  # otherwise it asks the terminal, and shows nothing if that has no size
        )

    def move(self, tally: Tally) -> None:
        self.bar.ncols = bar_width()
        self.bar.set_postfix(tally.notes, refresh=False)
        self.bar.update(tally.step - self.bar.n)

    def announce(self, tally: Tally, text: str) -> None:
        self.bar.set_postfix_str(text)

    def close(self, tally: Tally) -> None:
        self.move(tally)
        self.bar.close()


class NotebookLine(Display):
    """One line of plain text that is replaced, at the end by a summary."""

    def __init__(self, tally: Tally) -> None:
        from IPython.display import display

        self.handle = display({"text/plain": tally.label}, raw=True, display_id=True)

    def show(self, text: str) -> None:
        """Replace the line."""
        self.handle.update({"text/plain": text}, raw=True)

    def move(self, tally: Tally) -> None:
        self.show(bar_text(tally))

    def announce(self, tally: Tally, text: str) -> None:
        self.show(f"{tally.label}: {text}")

    def close(self, tally: Tally) -> None:
        self.show(closing_text(tally))


class LogLines(Display):
    """One line per evaluation, and one when nothing was printed for a minute."""

    quiet = 60.0  # seconds

    def __init__(self) -> None:
        self.printed = time.perf_counter()

    def print(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)
        self.printed = time.perf_counter()

    def move(self, tally: Tally) -> None:
        if time.perf_counter() - self.printed > self.quiet:
            self.print(line_text(tally))

    def evaluated(self, tally: Tally, evaluation: Evaluation) -> None:
        self.print(line_text(tally, evaluation))

    def announce(self, tally: Tally, text: str) -> None:
        self.print(f"{tally.label}: {text}")


def find_display(tally: Tally) -> Display:
    """Make the display that suits the place where this code runs."""
    if in_notebook():
        return NotebookLine(tally)
    return TerminalBar(tally) if sys.stderr.isatty() else LogLines()


class Progress:
    """A bar in a terminal and in a notebook; elsewhere a line now and then."""

    def __init__(self, label: str, start: int, total: int, enabled: bool) -> None:
        self.tally = Tally(label, start, total)
        self.began = self.shown = time.perf_counter()
        self.display = find_display(self.tally) if enabled else Display()

    def count(self, step: int) -> Tally:
        """Write down where the run is."""
        self.tally.step, self.tally.seconds = step, time.perf_counter() - self.began
        return self.tally

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show where the run is and its last line of metrics, ten times a second at most."""
        now = time.perf_counter()
        if now - self.shown < 0.1:
            return
        self.shown = now
        self.note(metrics)
        self.display.move(self.count(step))

    def note(self, metrics: Mapping[str, float]) -> None:
        """Keep the loss, if there is one."""
        if "loss" in metrics:
            self.tally.notes["loss"] = f"{metrics['loss']:.3g}"

    def evaluated(
        self, step: int, evaluation: Evaluation, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Show the result of an evaluation."""
        self.note(metrics or {})
        self.tally.notes["eval"] = f"{evaluation.mean:.1f}"
        self.display.evaluated(self.count(step), evaluation)

    def announce(self, text: str) -> None:
        """Say what the run waits for, such as a compiler."""
        self.display.announce(self.tally, text)

    def close(self, step: int) -> None:
        """Leave one plain line in place of the bar."""
        self.display.close(self.count(step))


# %% book/progress.py · Stopping
class Interrupted(KeyboardInterrupt):
    """A run was stopped by Ctrl-C or SIGTERM; the message says from where it can go on."""

    def __init__(self, message: str, signal_number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class RunFailed(RuntimeError):
    """A run cannot go on; the message says why, and from where it can be resumed."""


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
