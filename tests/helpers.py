"""What several test files need: comparing runs bit for bit, and running something that dies."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from rlbook.agent import Agent
from rlbook.checkpoint import CheckpointDirectory
from rlbook.cli import main
from rlbook.dqn import DQN
from rlbook.run import resume, train

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
    agent.learn(60, progress=False)
    return agent


def learn_in_terminal(name: str) -> None:
    """Learn with a terminal in the place of stderr."""
    sys.stderr = os.fdopen(os.open(name, os.O_RDWR | os.O_NOCTTY), "w")
    DQN(**SMALL).learn(2_000)


def learn_in_pipe(out: Path, err: Path, run_dir: Path) -> None:
    """Learn and resume with stdout and stderr in files."""
    with open(out, "w") as sys.stdout, open(err, "w") as sys.stderr:
        DQN(**SMALL, run_dir=str(run_dir)).learn(1_000)
        resume(run_dir, 1_500)
