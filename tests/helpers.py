"""What several test files need: comparing runs bit for bit, and running something that dies."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rlbook.agent import Agent
from rlbook.checkpoint import CheckpointDirectory
from rlbook.cli import main
from rlbook.dqn import DQN
from rlbook.run import resume, train
from rlbook.sweep import Item, worker

# A server that has imported the library forks each child: nobody waits for torch again, or for
# the part of it that optimisers import when they are first used.
CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(["rlbook.cli", "rlbook.dqn", "torch._dynamo"])


# A run of a second that still evaluates and writes checkpoints.
TINY: dict[str, Any] = {
    "env_id": "rlbook/ObservationReward-v0",
    "total_steps": 200,
    "learning_starts": 50,
    "train_frequency": 10,
    "eval_every": 100,
    "eval_episodes": 2,
    "checkpoint_every": 50,
    "hidden": [8],
}


# A run that learns at each step, to be watched.
SMALL: dict[str, Any] = {
    "env_id": "CartPole-v1",
    "hidden": (16,),
    "batch_size": 16,
    "learning_starts": 50,
    "train_frequency": 1,
    "eval_every": 500,
    "eval_episodes": 1,
}


def assert_same(one: Any, two: Any, path: str = "") -> None:
    """Compare nested states bit for bit, and say where they differ."""
    assert type(one) is type(two), f"{path}: {type(one)} is not {type(two)}"
    if isinstance(one, dict):
        assert list(one) == list(two), f"{path}: the keys differ"
        for key in one:
            assert_same(one[key], two[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(two), f"{path}: {len(one)} entries are not {len(two)}"
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            assert_same(a, b, f"{path}/{i}")
    elif isinstance(one, Tensor):
        assert one.dtype == two.dtype and one.shape == two.shape, f"{path}: another kind of tensor"
        bits = [t.detach().contiguous().numpy().tobytes() for t in (one, two)]
        assert bits[0] == bits[1], f"{path}: the tensors differ"
    else:
        assert one == two, f"{path}: {one!r} is not {two!r}"


def newest(path: Path) -> dict[str, Any]:
    """Read the newest checkpoint of a run, without the name of the run."""
    found = CheckpointDirectory(path / "checkpoints").newest()
    assert found is not None, f"{path} has no checkpoint"
    found[1]["config"].pop("run_dir")
    return found[1]


def assert_same_run(one: Path, two: Path) -> None:
    """Compare weights, optimiser, buffer, generators, the way back, and the metrics' bytes."""
    assert (one / "metrics.jsonl").read_bytes() == (two / "metrics.jsonl").read_bytes()
    assert_same(newest(one), newest(two))


def in_child(function: Callable[..., None], *arguments: Any) -> int:
    """Run a function in a process of its own and return its exit code, -9 for SIGKILL."""
    process = CHILDREN.Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def run_rlbook(words: list[str], folder: Path, terminal: str | None = None) -> None:
    """Be the program `rlbook` in a folder, and write to a terminal or to its files out and err."""
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        flags = os.O_WRONLY | os.O_NOCTTY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(terminal or folder / name, flags), number)
    sys.exit(main(words))


def be_worker(item: Item, folder: str, ours: Connection, theirs: Connection) -> None:
    """Be the process of one run of a sweep, with the pipe of its parent as stdin."""
    theirs.close()
    os.chdir(folder)
    os.setsid()
    os.dup2(ours.fileno(), 0)
    log = os.open(Path(item.run_dir, "log.txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(log, number)
    sys.exit(worker(json.dumps(dataclasses.asdict(item))))


class WarmWorker:
    """Does one run of a sweep in a process that has imported the library, which takes seconds.

    All else is as with `rlbook.sweep.start_worker`, which tests of the start itself use.
    """

    def __init__(self, item: Item) -> None:
        Path(item.run_dir).mkdir(parents=True, exist_ok=True)
        # A child of the server has imported all and can be forked; it would start a new server.
        child = multiprocessing.parent_process() is not None
        context: Any = multiprocessing.get_context("fork") if child else CHILDREN
        ours, self.stdin = context.Pipe(duplex=False)
        arguments = (item, os.getcwd(), ours, self.stdin)
        self.process: BaseProcess = context.Process(target=be_worker, args=arguments)
        self.process.start()
        ours.close()

    @property
    def returncode(self) -> int | None:
        """The exit code, or none while the process runs."""
        return self.process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, or none while the process runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, but not for ever."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a warm worker", timeout or 0.0)

    def kill(self) -> None:
        """End the process."""
        self.process.kill()


@contextlib.contextmanager
def warm_workers() -> Iterator[None]:
    """Let sweeps and searches start warm workers."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("sweep", "tune"):
            patch.setattr(f"rlbook.{module}.start_worker", WarmWorker)
        yield


def run_warm(words: list[str], folder: Path, terminal: str | None = None) -> None:
    """Be the program `rlbook`, whose sweeps start warm workers."""
    with warm_workers():
        run_rlbook(words, folder, terminal)


class Clock:
    """Counts the calls of functions, in Python and in C, and kills the process at one of them."""

    def __init__(self, moment: int | None = None) -> None:
        self.calls, self.moment = 0, moment

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += 1
        if self.calls == self.moment:
            os.kill(os.getpid(), signal.SIGKILL)


def run_until(moment: int | None, agent_class: type, settings: dict[str, Any], note: Path) -> None:
    """Start or resume a run, dying at a moment; one that ends writes down how long it was."""
    clock = Clock(moment)
    path = Path(settings["run_dir"])
    sys.setprofile(clock)
    try:
        if (path / "config.yaml").exists():
            resume(path, progress=False)
        else:
            train(agent_class(**settings), progress=False)
    finally:
        sys.setprofile(None)
    note.write_text(str(clock.calls))


def train_for_ever(settings: dict[str, Any]) -> None:
    """Train a run that does not end by itself."""
    train(DQN(**settings, total_steps=10**9), progress=False)


def learn_elsewhere(agent: Agent) -> Agent:
    """Learn in another process, which sends the agent back."""
    agent.learn(40, progress=False)
    return agent


def learn_in_terminal(name: str) -> None:
    """Learn with a terminal in the place of stderr."""
    sys.stderr = os.fdopen(os.open(name, os.O_RDWR | os.O_NOCTTY), "w")
    DQN(**SMALL).learn(1_000)


def learn_in_pipe(out: Path, err: Path, run_dir: Path) -> None:
    """Learn and resume with stdout and stderr in files."""
    with open(out, "w") as sys.stdout, open(err, "w") as sys.stderr:
        DQN(**{**SMALL, "eval_every": 200}, run_dir=str(run_dir)).learn(400)
        resume(run_dir, 600)
