"""What the chapter on progress cannot test about itself: terminals, pipes, notebooks, signals."""

import fcntl
import io
import os
import re
import select
import signal
import struct
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import CHILDREN, SMALL, in_child, learn_in_pipe, learn_in_terminal
from IPython.core.interactiveshell import InteractiveShell

from rlbook.callbacks import Callback
from rlbook.dqn import DQN
from rlbook.envs import Evaluation
from rlbook.progress import LogLines, Progress, TerminalBar, catch_signals
from rlbook.run import Run, resume, train


def test_in_a_terminal_a_bar_shows_step_evaluation_loss_and_speed(tmp_path: Path) -> None:
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    pieces: list[bytes] = []

    def read() -> None:
        while True:
            try:
                piece = os.read(master, 4096)
            except OSError:  # the other side is closed
                return
            if not piece:
                return
            pieces.append(piece)

    process = CHILDREN.Process(target=learn_in_terminal, args=(os.ttyname(slave),))
    process.start()
    reader = threading.Thread(target=read)
    reader.start()
    process.join()
    os.close(slave)
    reader.join()
    os.close(master)
    assert process.exitcode == 0
    text = b"".join(pieces).decode()
    last = text.rstrip().split("\r")[-1]
    assert text.count("\r") > 1, "the bar is drawn over itself"
    for part in ("dqn, seed 0", "1000/1000", "step/s", "loss=", "eval="):
        assert part in last, f"{part} is not in {last!r}"
    assert "100%" in last


def test_in_a_pipe_each_evaluation_is_one_plain_line(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    assert in_child(learn_in_pipe, out, err, tmp_path / "run") == 0
    assert err.read_text() == ""
    text = out.read_bytes().decode()
    assert "\r" not in text
    score = r"evaluation \d+\.\d ± \d+\.\d(?:, loss \S+)?"
    line = rf"dqn, seed 0: step ([\d,]+) of ([\d,]+), {score}, [\d,]+ steps/s"
    found = [re.fullmatch(line, each) for each in text.splitlines()]
    assert [each and each.groups() for each in found] == [
        ("200", "400"),
        ("400", "400"),
        ("600", "600"),
    ]


class Kernel:
    """The shell of a Jupyter kernel, as far as displays need one: it keeps what is published."""

    def __init__(self) -> None:
        self.kernel = self.display_pub = self
        self.published: list[dict[str, Any]] = []

    def publish(self, **message: Any) -> None:
        self.published.append(message)


def test_in_a_notebook_one_plain_line_stays_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shell = Kernel()
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    for name, value in (("initialized", True), ("instance", shell)):
        monkeypatch.setattr(InteractiveShell, name, lambda value=value: value)
    DQN(**{**SMALL, "eval_every": 100}).learn(200)
    first, *updates = shell.published
    assert not first.get("update") and updates and all(each["update"] for each in updates)
    assert len({each["transient"]["display_id"] for each in shell.published}) == 1
    kinds = {kind for each in shell.published for kind in each["data"]}
    assert kinds == {"text/plain"}, "a widget would need its Javascript"
    last = r"dqn, seed 0: 200 steps in [\d.]+ s \([\d,]+ steps/s\), evaluation \d+\.\d"
    assert re.fullmatch(last, updates[-1]["data"]["text/plain"])
    assert tuple(capfd.readouterr()) == ("", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_resumed_run_does_not_count_the_steps_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    progress = Progress("dqn", 900_000, 1_000_000, enabled=True)
    progress.shown = 0.0  # as if a tenth of a second had passed
    time.sleep(0.11)
    progress.step(900_001, {"loss": 0.5})
    assert isinstance(progress.display, TerminalBar)
    facts = progress.display.bar.format_dict
    assert facts["n"] == 900_001 and facts["initial"] == 900_000
    assert facts["rate"] is None or facts["rate"] < 100
    progress.close(900_001)


def test_the_bar_of_a_resumed_run_begins_at_its_checkpoint(tmp_path: Path) -> None:
    settings = {**SMALL, "total_steps": 60, "eval_every": 0, "run_dir": str(tmp_path / "a")}
    train(DQN(**settings), progress=False)
    begun = []

    class Spy(Callback):
        def after_step(self, run: Run) -> None:
            begun.append(run.progress.tally.start)

    resume(tmp_path / "a", total_steps=70, progress=False, callbacks=[Spy()])
    assert begun == [60] * 10


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let agents believe that they are compiled."""
    monkeypatch.setattr(torch, "compile", lambda method, **_: method)
    monkeypatch.setattr("shutil.which", lambda program: program)


@pytest.mark.usefixtures("no_compiler")
def test_a_line_says_that_the_update_is_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    line = "dqn, seed 0: compiling the update, which can take a minute"
    for compiles in (True, False):
        DQN(**{**SMALL, "eval_every": 100, "learning_starts": 150}, compile=compiles).learn(200)
        lines = capsys.readouterr().out.splitlines()
        assert [each == line for each in lines] == (
            [False, True, False] if compiles else [False] * 2
        )
    DQN(**SMALL, compile=True).learn(40)  # no update, so there is nothing to wait for
    assert line not in capsys.readouterr().out


def test_the_bar_says_what_the_run_waits_for_until_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    progress = Progress("dqn", 0, 1_000, enabled=True)
    progress.announce("compiling")
    assert isinstance(progress.display, TerminalBar)
    assert progress.display.bar.postfix == "compiling"
    assert isinstance(sys.stderr, Terminal) and "compiling" in sys.stderr.getvalue()
    progress.shown = 0.0
    progress.step(10, {"loss": 0.5})
    assert progress.display.bar.postfix == "loss=0.5"
    progress.close(10)


def test_an_agent_without_a_loss_can_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    progress = Progress("mine", 0, 10, enabled=True)
    progress.shown = 0.0
    progress.step(5, {"q_mean": 1.0})
    progress.close(10)
    assert "loss" not in progress.tally.notes


def test_switched_off_it_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("dqn", 0, 10, enabled=False)
    progress.shown = 0.0
    progress.step(5, {"loss": 1.0})
    progress.evaluated(5, Evaluation(np.ones(2), np.ones(2, dtype=np.int64)))
    progress.announce("compiling")
    progress.close(10)
    assert capsys.readouterr() == ("", "")


def test_the_first_signal_is_kept_and_the_second_stops_at_once() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), catch_signals() as caught:
        signal.raise_signal(signal.SIGTERM)
        assert caught == [signal.SIGTERM]
        signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_run_in_another_thread_leaves_signals_alone() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def inside() -> None:
        with catch_signals() as caught:
            seen.append((signal.getsignal(signal.SIGINT), list(caught)))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [(before, [])]


@pytest.mark.parametrize("columns", [0, 20, 40, 79, 200])
def test_the_bar_fits_the_terminal(columns: int) -> None:
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24 * bool(columns), columns, 0, 0))
    with os.fdopen(slave, "w") as terminal, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        progress = Progress("dqn, seed 0", 0, 1_000_000, enabled=True)
        assert isinstance(progress.display, TerminalBar)
        progress.shown = 0.0
        progress.tally.notes["eval"] = "123.4"
        progress.step(10_000, {"loss": 0.123})
        progress.display.bar.refresh()
        terminal.flush()
        shown = ""
        while select.select([master], [], [], 0.5)[0]:
            shown += os.read(master, 100_000).decode()
        progress.close(10_000)
    os.close(master)
    lines = [part for part in re.split(r"[\r\n]", shown) if part.strip()]
    assert lines and all(len(line) < (columns or 80) for line in lines)
    assert lines[-1].startswith("dqn, seed 0")
    if columns > 100:
        assert "eval=123.4, loss=0.123" in lines[-1]


def test_a_long_run_in_a_pipe_says_now_and_then_where_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogLines, "quiet", 0.3)
    progress = Progress("dqn, seed 0", 0, 100, enabled=True)
    began, step = time.perf_counter(), 0
    while time.perf_counter() - began < 1.0:
        step += 1
        progress.step(step, {"loss": 0.25})
        time.sleep(0.005)
    lines = capsys.readouterr().out.splitlines()
    assert 1 <= len(lines) <= 3
    assert re.fullmatch(r"dqn, seed 0: step \d+ of 100, loss 0.25, [\d,]+ steps/s", lines[0])


def test_two_runs_with_one_seed_print_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for pause in (0.0, 0.002):  # a slower machine
        agent = DQN(**{**SMALL, "eval_every": 100, "log_every": 40})
        act = agent.act

        def slower(*arguments: Any, act: Any = act, pause: float = pause, **options: Any) -> Any:
            time.sleep(pause)
            return act(*arguments, **options)

        agent.act = slower  # type: ignore[method-assign]
        result = agent.learn(300)
        lines = capsys.readouterr().out.splitlines()
        printed.append([line.rsplit(", ", 1)[0] for line in lines])  # without the speed
    assert printed[0] == printed[1] and len(printed[0]) == 3
    logged = [line["loss"] for line in result.history if "loss" in line]
    assert printed[0][-1].endswith(f"loss {logged[-1]:.3g}")


def test_agents_and_results_print_as_one_informative_line(tmp_path: Path) -> None:
    agent = DQN(**{**SMALL, "eval_every": 100}, seed=4, run_dir=str(tmp_path / "a"))
    assert repr(agent) == "DQN('CartPole-v1', seed=4: step 0, 0 updates)"
    result = agent.learn(200, progress=False)
    shown = r"DQN\('CartPole-v1', seed=4: step 200, 150 updates\)"
    line = rf"RunResult\({shown}, mean return [\d.]+, [\d.]+ s, \S+step_0+200\.pt\)"
    assert re.fullmatch(line, repr(result))
