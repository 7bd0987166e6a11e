# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Watching and stopping a run
#
# A training run takes minutes or hours. While it runs you want to see how far it is. When you
# press Ctrl-C it should stop without losing what it has learned. In this chapter you build both: a
# progress display that works in a terminal, in a notebook and in a log file, and a context manager
# that turns Ctrl-C into a clean stop.
#
# Here they are at work. The loop below counts to 100. After 60 steps it gets the signal that a job
# scheduler sends when it wants the machine back.

# %% tags=["hide-input"]
#| export
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

# %%
import subprocess

import rlbook.progress as finished  # the module that this chapter exports

progress = finished.Progress("demo", start=0, total=100, enabled=True)
with finished.catch_signals() as caught:
    for step in range(1, 101):
        time.sleep(0.01)
        progress.step(step, {"loss": 1 / step})
        if step == 60:
            signal.raise_signal(signal.SIGTERM)
        if caught:
            break
progress.close(step)
print(f"stopped after step {step} by signal {caught[0]}")
assert step == 60 and caught == [signal.SIGTERM]

# %% [markdown]
# While the cell runs, a bar moves. When it is done, one line of text stays. The signal did not
# kill the process: the loop finished its step and then stopped.
#
# ## Three places
#
# The same program may run in three places, and each needs its own display:
#
# | place | display |
# |---|---|
# | terminal | a bar that is drawn over itself |
# | notebook | one line of plain text that is replaced, at the end by a summary |
# | log file | one line for each evaluation, and one after each minute without a line |
#
# The notebook gets plain text and not a widget, because a widget is gone when the notebook is
# stored and opened elsewhere. This function tells a notebook from the rest:

# %%
#| export
def in_notebook() -> bool:
    """Say whether a Jupyter kernel runs this code."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")

# %%
print("in a notebook:", in_notebook())

# %% [markdown]
# ## The numbers
#
# All three displays show the same few numbers. A run that was resumed at step 900,000 has not
# taken those steps in this process, so its speed counts from `start`.

# %%
#| export
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

# %% [markdown]
# Three texts are made from these numbers: the bar of a notebook, the line of a log file, and the
# summary at the end. `tqdm` draws the bar.

# %%
#| export
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

# %% [markdown]
# By hand: 250 of 1,000 steps in 2 seconds is 25 %, at 125 steps a second, with 6 seconds to go. If
# the run was resumed at step 200, only 50 of those steps were taken now: 25 a second, and 30
# seconds to go.

# %%
fresh = Tally("demo", start=0, total=1000, step=250, seconds=2.0, notes={"loss": "0.5"})
resumed = Tally("demo", start=200, total=1000, step=250, seconds=2.0, notes={"eval": "9.0"})
for tally in (fresh, resumed):
    print(bar_text(tally))
print(closing_text(resumed))
assert "25%" in bar_text(fresh) and "00:02<00:06, 125.00step/s, loss=0.5" in bar_text(fresh)
assert "00:02<00:30, 25.00step/s" in bar_text(resumed)
assert closing_text(resumed) == "demo: 50 steps in 2.0 s (25 steps/s), evaluation 9.0"

# %% [markdown]
# ## The displays
#
# The base class shows nothing, and a run with `progress=False` uses it. Each of its three
# subclasses fills in only what it shows. In a terminal, `tqdm` keeps the time and draws the bar.
# We tell it the width each time, because a bar that is too long breaks into two lines and can no
# longer be drawn over. A window may change its size, and a terminal inside another program may
# have no size at all.

# %%
#| export
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

# %% [markdown]
# The other two, and the function that chooses among the three:

# %%
#| export
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

# %% [markdown]
# [The run](run.ipynb) only uses `Progress`, which keeps the numbers and the clock, and updates the
# display at most ten times a second. The loss that it shows is a mean over many updates, from the
# last line of metrics. The loss of a single update would depend on the moment at which the display
# is updated, and two runs with the same seed would show different numbers.

# %%
#| export
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

# %% [markdown]
# You have seen the notebook's line at the top of the chapter. Now run a program whose output goes
# to a pipe, as it would go to a log file. It prints one line per evaluation:

# %%
program = """
import numpy as np
from rlbook.envs import Evaluation
from rlbook.progress import Progress

progress = Progress("demo", start=0, total=2000, enabled=True)
for step in (1000, 2000):
    progress.step(step, {"loss": 0.5})
    progress.evaluated(step, Evaluation(np.array([9.0, 11.0]), np.array([9, 11])))
progress.close(2000)
"""
lines = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
shown = [line.rsplit(", ", 1)[0] for line in lines.splitlines()]  # without the speed
print(*shown, sep="\n")
assert shown[0].startswith("demo: step 1,000 of 2,000, evaluation 10.0 ± 1.0")

# %% [markdown]
# ## Stopping
#
# Ctrl-C sends the signal SIGINT. A job scheduler that wants its machine back sends SIGTERM. By
# default, SIGINT raises an exception wherever the program happens to be, perhaps in the middle of
# an update, and SIGTERM ends the process at once. Neither leaves a consistent state to save.
#
# So the handler only puts the signal into a list. The training loop finishes its step, writes a
# checkpoint and then stops. If you press Ctrl-C twice, it stops at once. No program can catch
# SIGKILL: [Checkpoints](checkpoint.ipynb) and [The run](run.ipynb) show what survives it.
#
# The cell also defines what the loop raises when a run does not reach its end: `Interrupted` after
# a signal, and `RunFailed` if it cannot go on.

# %%
#| export
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

# %% [markdown]
# By hand: the process sends itself SIGTERM, which has the number 15, in the second of three steps.
# The second step is finished, and the third never starts. After the block, the old handler is
# back.

# %%
before, finished_steps = signal.getsignal(signal.SIGTERM), []
with catch_signals() as caught:
    for step in (1, 2, 3):
        if step == 2:
            signal.raise_signal(signal.SIGTERM)
        finished_steps.append(step)
        if caught:
            break
print("steps finished:", finished_steps, " signals caught:", caught)
assert finished_steps == [1, 2] and caught == [15]
assert signal.getsignal(signal.SIGTERM) is before

# %% [markdown]
# ## Exercises
#
# **Exercise 1.** Why does the handler append to a list instead of raising an exception that the
# loop could catch?
#
# <details>
# <summary>Solution</summary>
#
# A handler can run between any two instructions, for example after the environments have stepped
# and before the transition is stored. An exception at that point leaves a state that an
# uninterrupted run never has, and a run resumed from it would not be exact. The list is read in
# one line of the loop, so every stop is a stop between two steps.
#
# ```python
# with catch_signals() as caught:
#     signal.raise_signal(signal.SIGINT)
#     reached = True  # the step is finished
# assert reached and caught == [signal.SIGINT]
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** In which thread may `signal.signal` be called, and what does `catch_signals` do
# in another one?
#
# <details>
# <summary>Solution</summary>
#
# Only in the main thread. Elsewhere Python raises a `ValueError`. There `catch_signals` yields a
# list that stays empty: the run works, and the main thread decides what Ctrl-C does.
#
# ```python
# import threading
#
# seen = []
#
# def work():
#     with catch_signals() as caught:
#         seen.append(list(caught))
#
# thread = threading.Thread(target=work)
# thread.start()
# thread.join()
# assert seen == [[]]
# ```
#
# </details>

# %% [markdown]
# **Exercise 3, a planted bug.** This version seems to work, and a run does stop. What goes wrong
# the next time that you press Ctrl-C in the same notebook, and why?


# %%
@contextmanager
def catch_signals_with_a_bug() -> Iterator[list[int]]:
    """As above, with a bug."""
    caught: list[int] = []
    old = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    yield caught
    signal.signal(signal.SIGINT, old)


def restored(manager) -> bool:
    """Whether Ctrl-C does again what it did before, after a block that raised an exception."""
    before = signal.getsignal(signal.SIGINT)
    try:
        with manager():
            raise RuntimeError
    except RuntimeError:
        pass
    after = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    return after is before


print("with the bug:", restored(catch_signals_with_a_bug), " without:", restored(catch_signals))

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# If the block raises an exception, the line after `yield` never runs. The handler stays installed
# and appends each Ctrl-C to a list that nobody reads: you cannot interrupt the notebook any more.
# The repair is `try ... finally` around the `yield`.
#
# ```python
# @contextmanager
# def catch_signals_with_a_bug() -> Iterator[list[int]]:
#     """As above, without the bug."""
#     caught: list[int] = []
#     old = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
#     try:
#         yield caught
#     finally:
#         signal.signal(signal.SIGINT, old)
#
# assert restored(catch_signals_with_a_bug)
# ```
#
# </details>

# %% [markdown]
# **Exercise 4.** A run of a million steps is resumed at step 900,000. It takes 1,000 steps in 2
# seconds. Which speed and which time to go does the bar show? What would it show if `start` were
# 0?
#
# <details>
# <summary>Solution</summary>
#
# The speed is 500 steps a second, so the remaining 99,000 steps take 198 seconds. With `start=0`
# the bar would count all 901,000 steps as done in 2 seconds: 450,500 a second, and nothing left to
# wait for.
#
# ```python
# right = Tally("demo", start=900_000, total=1_000_000, step=901_000, seconds=2.0)
# wrong = Tally("demo", start=0, total=1_000_000, step=901_000, seconds=2.0)
# assert right.speed() == 500 and wrong.speed() == 450_500
# assert "<03:18" in bar_text(right) and "<00:00" in bar_text(wrong)
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# ```python
# from rlbook.progress import catch_signals
#
# with catch_signals() as caught:
#     while work_is_left() and not caught:
#         do_a_step()
# ```
#
# In the shell, press Ctrl-C once during `rlbook train`: it writes a checkpoint and prints the
# command that continues the run.
#
# ## References
#
# - C. da Costa-Luis (2019). *tqdm: A Fast, Extensible Progress Meter for Python and CLI*. JOSS
#   4(37).
# - The Python documentation of [signal](https://docs.python.org/3/library/signal.html), on which
#   thread runs a handler and when.
