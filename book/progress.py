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
# A training run is a program that you wait for. It should say how far it is, and it should stop
# when you ask, without losing what it has. At the end of this chapter you have a progress display
# that suits a terminal, a notebook and a log file, and a way to turn Ctrl-C into a clean end.
#
# | | |
# |---|---|
# | Builds on | `tqdm` for bars, Python's `signal` |
# | New here | one display for three places; signals that are noted, not obeyed at once |
# | Next | the loop in [The run](run.ipynb) uses both |

# %%
#| export
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import SupportsFloat

from tqdm import tqdm

from rlbook.envs import Evaluation

# %% [markdown]
# ## Where am I?
#
# The same run may be started in a terminal, in a notebook or by a job scheduler. In a terminal a
# bar that redraws itself is best. In a log file the same bar leaves thousands of lines of debris,
# so there one line per evaluation is right. A notebook is a third case: a stored notebook must not
# keep a half-drawn bar or a widget that no code host can show. So the bar is plain text that is
# replaced, and at the end a single sentence is left in its place.

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
# ## From numbers to text
#
# What is there to show? A few numbers. A run that was resumed at step 900,000 has not done those steps
# now, so its speed counts from `start`.

# %%
#| export
@dataclass
class Tally:
    """How far a run is: the numbers that every display makes its text of."""

    label: str
    start: int  # the step at which the counting began
    total: int
    step: int = 0
    seconds: float = 0.0  # since `start`
    notes: dict[str, str] = field(default_factory=dict)  # the last loss and evaluation

    def speed(self) -> float:
        """Return the steps per second since the start."""
        return (self.step - self.start) / self.seconds

# %% [markdown]
# Three texts are made of them: the bar of a notebook, the line of a log file, and the sentence that
# stays at the end. They are functions of a tally alone, so that we can check them without a run. The
# bar itself is drawn by `tqdm`.

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


def line_text(tally: Tally, evaluation: Evaluation) -> str:
    """Say in one line what an evaluation found, and how fast the run is."""
    where = f"{tally.label}: step {tally.step:,} of {tally.total:,}"
    loss = f", loss {tally.notes['loss']}" if "loss" in tally.notes else ""
    score = f"{evaluation.mean:.1f} ± {evaluation.std:.1f}"
    return f"{where}, evaluation {score}{loss}, {tally.speed():,.0f} steps/s"


def closing_text(tally: Tally) -> str:
    """Say in one line what was done, and how well it ended."""
    done = f"{tally.step - tally.start:,} steps in {tally.seconds:.1f} s"
    result = f", evaluation {tally.notes['eval']}" if "eval" in tally.notes else ""
    return f"{tally.label}: {done} ({tally.speed():,.0f} steps/s){result}"

# %% [markdown]
# By hand: 250 of 1,000 steps in 2 seconds is 25 %, at 125 steps a second, with 6 seconds to go. If the
# run was resumed at step 200, only 50 of those steps were done now: 25 a second, and 30 seconds to go.

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
# ## Three places
#
# A display has four verbs, and each place needs only some of them. So the plainest display does nothing
# at all, which is also what a run needs that nobody watches; the three others say only where they
# differ. In a terminal `tqdm` keeps time and draws by itself:

# %%
#| export
class Display:
    """Shows nothing: the places below fill in what they show."""

    def start_at(self, step: int) -> None:
        """Count from a step on."""

    def move(self, tally: Tally) -> None:
        """Show where the run is."""

    def evaluated(self, tally: Tally, evaluation: Evaluation) -> None:
        """Show the result of an evaluation."""

    def announce(self, tally: Tally, text: str) -> None:
        """Say what the run waits for."""

    def close(self, tally: Tally) -> None:
        """Leave what shall stay."""


class TerminalBar(Display):
    """A bar that redraws itself."""

    def __init__(self, tally: Tally) -> None:
        self.bar = tqdm(total=tally.total, initial=tally.start, desc=tally.label, unit="step")

    def start_at(self, step: int) -> None:
        self.bar.initial = self.bar.n = self.bar.last_print_n = step

    def move(self, tally: Tally) -> None:
        self.bar.set_postfix(tally.notes, refresh=False)
        self.bar.update(tally.step - self.bar.n)

    def announce(self, tally: Tally, text: str) -> None:
        self.bar.set_postfix_str(text)

    def close(self, tally: Tally) -> None:
        self.move(tally)
        self.bar.close()

# %% [markdown]
# In a notebook a line of text is replaced by the next, and in a log file nothing can be replaced, so
# there is a line for each evaluation and no more:

# %%
#| export
class NotebookLine(Display):
    """One line of plain text that is replaced, in the end by a sentence."""

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
    """One line per evaluation."""

    def evaluated(self, tally: Tally, evaluation: Evaluation) -> None:
        print(line_text(tally, evaluation), flush=True)

    def announce(self, tally: Tally, text: str) -> None:
        print(f"{tally.label}: {text}", flush=True)


def find_display(tally: Tally) -> Display:
    """Make the display that suits the place where this code runs."""
    if in_notebook():
        return NotebookLine(tally)
    return TerminalBar(tally) if sys.stderr.isatty() else LogLines()

# %% [markdown]
# `Progress` is what a run holds. It keeps the tally and the clock, and speaks up ten times a second at
# most: more often nobody could read it.

# %%
#| export
class Progress:
    """A bar in a terminal and in a notebook; elsewhere one line per evaluation."""

    def __init__(self, label: str, start: int, total: int, enabled: bool) -> None:
        self.tally = Tally(label, start, total)
        self.began = self.shown = time.perf_counter()
        self.display = find_display(self.tally) if enabled else Display()

    def start_at(self, step: int) -> None:
        """Count from a step on, as a resumed run does: what came before was not done now."""
        self.tally.start, self.began = step, time.perf_counter()
        self.display.start_at(step)

    def count(self, step: int) -> Tally:
        """Write down where the run is."""
        self.tally.step, self.tally.seconds = step, time.perf_counter() - self.began
        return self.tally

    def step(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Show where the run is, ten times a second at most."""
        now = time.perf_counter()
        if now - self.shown < 0.1:
            return
        self.shown = now
        if "loss" in metrics:
            self.tally.notes["loss"] = f"{float(metrics['loss']):.3g}"
        self.display.move(self.count(step))

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Note the result of an evaluation."""
        self.tally.notes["eval"] = f"{evaluation.mean:.1f}"
        self.display.evaluated(self.count(step), evaluation)

    def announce(self, text: str) -> None:
        """Say what the run waits for, such as a compiler."""
        self.display.announce(self.tally, text)

    def close(self, step: int) -> None:
        """Leave one plain line where the bar was."""
        self.display.close(self.count(step))

# %% [markdown]
# This is how it looks in a notebook. While the cell runs you see the bar; what stays is the
# sentence:

# %%
progress = Progress("demo", start=0, total=50, enabled=True)
for step in range(1, 51):
    time.sleep(0.01)
    progress.step(step, {"loss": 1 / step})
progress.close(50)

# %% [markdown]
# Where output is not a terminal, there is a line per evaluation. Here a program runs in a child
# process whose output is a pipe, as in a log file:

# %%
import subprocess

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
# ## Being stopped
#
# Ctrl-C sends the signal SIGINT; a scheduler that wants its machine back sends SIGTERM. By default
# the first raises an exception wherever the program happens to be, perhaps between the two halves
# of an update, and the second ends the process on the spot. Neither is a good moment to write a
# checkpoint.
#
# So the loop only *notes* the signal, finishes the step that it is in, writes its checkpoint and
# then stops. Whoever presses Ctrl-C twice is in a hurry and is obeyed at once. SIGKILL cannot be
# noted by anybody: what happens then is the subject of [Checkpoints](checkpoint.ipynb) and of
# [The run](run.ipynb).

# %%
#| export
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

# %% [markdown]
# A signal that arrives inside is noted; the code after it still runs. By hand: the process sends
# itself SIGTERM, number 15, in the second of three rounds.

# %%
rounds = []
with catch_signals() as caught:
    for number in range(3):
        rounds.append(number)
        if number == 1:
            signal.raise_signal(signal.SIGTERM)
        if caught:
            break
print("rounds finished:", rounds, " signals caught:", caught)
assert rounds == [0, 1] and caught == [15]

# %% [markdown]
# And afterwards the signals mean again what they meant before:

# %%
before = signal.getsignal(signal.SIGTERM)
with catch_signals():
    assert signal.getsignal(signal.SIGTERM) is not before
assert signal.getsignal(signal.SIGTERM) is before

# %% [markdown]
# How long does one wait? As long as one turn of the loop takes, since the note is read at its top.
# The figure shows the delay between a signal and the end of the block, for turns of 1 to 20
# milliseconds, with the signal at a random moment of the turn: on average half a turn.

# %% tags=["hide-input"]
import numpy as np
from matplotlib import pyplot as plt

from rlbook.figures import COLORS, use_style

use_style()
dice = np.random.default_rng(0)


def delay(turn: float) -> float:
    """Seconds from a signal at a random moment of a turn to the end of the block."""
    with catch_signals() as caught:
        timer = threading.Timer(turn * dice.uniform(1, 2), signal.raise_signal, [signal.SIGTERM])
        sent = time.perf_counter() + timer.interval
        timer.start()
        while not caught:
            time.sleep(turn)
    return time.perf_counter() - sent


turns = np.array([1, 2, 5, 10, 20])
delays = np.array([[1000 * delay(turn / 1000) for turn in turns] for _ in range(20)])
figure, ax = plt.subplots(figsize=(5, 3))
ax.plot(np.tile(turns, 20), delays.ravel(), ".", color=COLORS["dqn"], alpha=0.5, label="measured")
ax.plot(turns, turns, "--", color=COLORS["reference"], label="one whole turn")
ax.set(xlabel="length of a turn [ms]", ylabel="delay until the stop [ms]")
ax.legend()
plt.show()

# %% [markdown]
# ## Exercises
#
# **Exercise 1.** Why does the handler append to a list instead of raising an exception that the
# loop could catch?
#
# <details>
# <summary>Solution</summary>
#
# An exception from a handler can surface between any two instructions: after the environments have
# stepped and before the transition is stored, say. The state that would then be saved never exists
# in a run that is left alone, and resuming would not be exact. A note that is read at one place
# makes every stop a stop between two steps.
#
# ```python
# with catch_signals() as caught:
#     signal.raise_signal(signal.SIGINT)
#     reached = True  # the signal is a note, and the piece of work is finished
# assert reached and caught == [signal.SIGINT]
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** In which thread may `signal.signal` be called, and what does `catch_signals` do in
# another one?
#
# <details>
# <summary>Solution</summary>
#
# Only in the main thread; elsewhere Python raises a `ValueError`. There `catch_signals` hands out a
# list that stays empty: the run works, and whoever started the thread decides what Ctrl-C means.
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


# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# If the block raises, the line after `yield` never runs, the handler stays installed and Ctrl-C is
# noted in a list that nobody reads any more: the notebook cannot be interrupted. `try ... finally`
# around the `yield` is the repair. The cell below shows both.
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
# earlier = signal.getsignal(signal.SIGINT)
# try:
#     with catch_signals_with_a_bug():
#         raise RuntimeError
# except RuntimeError:
#     later = signal.getsignal(signal.SIGINT)
# signal.signal(signal.SIGINT, earlier)  # in case it is not repaired
# assert later is earlier
# ```
#
# </details>


# %%
def restored(manager) -> bool:
    """Whether the handler of Ctrl-C is back after a block that raised an exception."""
    before = signal.getsignal(signal.SIGINT)
    try:
        with manager():
            raise RuntimeError
    except RuntimeError:
        pass
    after = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    return after is before


print("with the bug:", restored(catch_signals_with_a_bug), " repaired:", restored(catch_signals))
assert not restored(catch_signals_with_a_bug) and restored(catch_signals)

# %% [markdown]
# **Exercise 4.** `Progress.step` looks at the clock in every step. Estimate what that costs in a
# run of a million steps, then measure it.
#
# <details>
# <summary>Solution</summary>
#
# One call of `time.perf_counter` takes well under a microsecond, so a million steps pay less than a
# second, in a run of many minutes. `%timeit time.perf_counter()` tells.
#
# ```python
# start = time.perf_counter()
# for _ in range(100_000):
#     time.perf_counter()
# seconds = 10 * (time.perf_counter() - start)
# print(f"{seconds:.2f} s in a million steps")
# assert seconds < 10
# ```
#
# </details>

# %% [markdown]
# ## Using it
#
# ```python
# from rlbook.progress import catch_signals
#
# with catch_signals() as caught:
#     while work_is_left() and not caught:
#         do_a_piece()
# ```
#
# In the shell, press Ctrl-C once during `rlbook train`: it writes a checkpoint and prints the
# command that goes on from there.
#
# ## References
#
# - C. da Costa-Luis (2019). *tqdm: A Fast, Extensible Progress Meter for Python and CLI*. JOSS
#   4(37).
# - The Python documentation of `signal`, on which thread runs a handler and when.
