"""What the chapter of the run cannot test about itself: kills, full disks, bad numbers."""

import copy
import datetime
import errno
import functools
import io
import json
import math
import multiprocessing
import random
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import (
    CHILDREN,
    TINY,
    assert_same,
    assert_same_run,
    in_child,
    newest,
    run_rlbook,
    run_until,
    train_for_ever,
)

import rlbook
import rlbook.run
from rlbook.agent import REGISTRY, Transition, UpdateResult
from rlbook.callbacks import Callback
from rlbook.checkpoint import CheckpointDirectory, CheckpointError, read_checkpoint
from rlbook.dqn import DQN
from rlbook.envs import ObservationReward
from rlbook.progress import Interrupted, RunFailed
from rlbook.run import (
    Collector,
    GrowingFile,
    Logger,
    MetricsFile,
    Run,
    RunDirectory,
    RunResult,
    crosses,
    resume,
    train,
    versions,
)
from rlbook.settings import read_settings

SMALL: dict[str, Any] = {
    "env_id": "CartPole-v1",
    "hidden": (16,),
    "batch_size": 16,
    "learning_starts": 100,
    "train_frequency": 12,
    "total_steps": 900,
    "checkpoint_every": 250,
    "eval_every": 300,
    "eval_episodes": 2,
    "log_every": 50,
    "seed": 3,
}
# 250 is not a multiple of three environments, so checkpoints come a step late and differently.
SEVERAL: dict[str, Any] = {"num_envs": 3, "n_step": 3, "lr_decay_from": 0.5}
KINDS = pytest.mark.parametrize("extra", [{}, SEVERAL], ids=["plain", "several"])


def run_whole(path: Path, **extra: Any) -> RunResult:
    """Train without any interruption."""
    return train(DQN(**{**SMALL, "run_dir": str(path), **extra}), progress=False)


def run_disturbed(path: Path, step: int, disturb: Callable[[], object], **extra: Any) -> None:
    """Train, and let something happen after a step was stored and before it is learned from."""
    agent = DQN(**{**SMALL, "run_dir": str(path), **extra})
    observe = agent.observe

    def observe_and_disturb(transition: Transition) -> None:
        observe(transition)
        if crosses(agent.global_step, agent.config.num_envs, step) and agent.global_step < 2 * step:
            disturb()

    agent.observe = observe_and_disturb  # type: ignore[method-assign]
    train(agent, progress=False)


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunResult]:
    """Runs that nothing interrupted, to compare others with; each is made once."""

    @functools.cache
    def run(**extra: Any) -> RunResult:
        return run_whole(tmp_path_factory.mktemp("whole") / "run", **extra)

    return run


@pytest.fixture(scope="module")
def whole(left_alone: Callable[..., RunResult]) -> Path:
    """The directory of a run that nothing interrupted."""
    return directory_of(left_alone())


def directory_of(result: RunResult) -> Path:
    """Return where a run was written."""
    return Path(result.agent.config.run_dir or "")


class PowerCut(Exception):
    """Stands for a process that ends without a word."""


def cut_power() -> None:
    raise PowerCut


# Stopped and resumed


def test_a_run_killed_at_three_random_moments_ends_as_one_left_alone(tmp_path: Path) -> None:
    half = {"total_steps": 450, "checkpoint_every": 125, "eval_every": 150, "log_every": 25}

    def settings(name: str) -> dict[str, Any]:
        return {**SMALL, **half, **SEVERAL, "run_dir": str(tmp_path / name)}

    note = tmp_path / "calls"
    assert in_child(run_until, None, DQN, settings("whole"), note) == 0
    calls = int(note.read_text())
    note.unlink()
    # Three times 0.3 is less than the whole, so each kill meets a run that is still going on.
    moments = [random.randrange(calls // 50, 3 * calls // 10) for _ in range(3)]
    try:
        for moment in moments:
            assert in_child(run_until, moment, DQN, settings("killed"), note) == -signal.SIGKILL
        assert not note.exists()
        assert in_child(run_until, None, DQN, settings("killed"), note) == 0
        assert_same_run(tmp_path / "whole", tmp_path / "killed")
    except AssertionError as error:
        raise AssertionError(f"killed at the calls {moments} of {calls}: {error}") from error


@KINDS
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_of_a_segment_loses_nothing(
    number: signal.Signals,
    extra: dict[str, Any],
    left_alone: Callable[..., RunResult],
    tmp_path: Path,
) -> None:
    whole = left_alone(**extra)
    path = tmp_path / "stopped"
    with pytest.raises(Interrupted) as stopped:
        run_disturbed(path, 620, lambda: signal.raise_signal(number), **extra)
    assert stopped.value.signal_number == number
    step = newest(path)["agent"]["global_step"]
    assert 620 <= step < 623
    advice = rf"^Stopped at step {step}\. Go on from .*step_0+{step}\.pt with `rlbook resume .*`\.$"
    assert re.match(advice, str(stopped.value))
    again = resume(path, progress=False)
    assert_same_run(directory_of(whole), path)
    assert_same(whole.agent.state_dict(), again.agent.state_dict())
    assert whole.history == again.history and whole.metrics == again.metrics


def test_a_stop_right_at_a_checkpoint_or_at_the_end_loses_nothing(
    whole: Path, tmp_path: Path
) -> None:
    for step in (500, 900):
        path = tmp_path / f"stopped {step}"
        with pytest.raises(Interrupted, match=f"step {step}"):
            run_disturbed(path, step, lambda: signal.raise_signal(signal.SIGTERM))
        resume(path, progress=False)
        assert_same_run(whole, path)


def test_a_signal_after_the_last_step_is_not_swallowed(tmp_path: Path) -> None:
    class Term(Callback):
        def at_end(self, run: Run) -> None:
            signal.raise_signal(signal.SIGTERM)

    agent = DQN(**TINY, run_dir=str(tmp_path / "a"))
    with pytest.raises(Interrupted, match="Stopped at step 20") as caught:
        agent.learn(20, progress=False, callbacks=[Term()])
    assert caught.value.signal_number == signal.SIGTERM
    assert newest(tmp_path / "a")["agent"]["global_step"] == 20


def test_a_crash_before_the_first_checkpoint_starts_again(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(PowerCut):
        run_disturbed(tmp_path / "cut", 240, cut_power)
    assert (tmp_path / "cut" / "metrics.jsonl").stat().st_size > 0
    resume(tmp_path / "cut", progress=False)
    assert_same_run(whole, tmp_path / "cut")


def test_a_run_without_a_directory_says_that_nothing_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = DQN(**SMALL)
    monkeypatch.setattr(agent, "observe", lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Interrupted, match=r"^Stopped at step 1\. Nothing was written"):
        train(agent, progress=False)


def test_sigterm_to_the_command_stops_and_resumes(tmp_path: Path) -> None:
    path = tmp_path / "shell"
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items() if name != "hidden"
    ]
    endless = ["--hidden", "16", *flags, "--total-steps", "10000000", "--run-dir", str(path)]
    words = ["train", "dqn", *endless]
    process = CHILDREN.Process(target=run_rlbook, args=(words, tmp_path))
    process.start()
    metrics = path / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 8):
        assert process.is_alive(), (tmp_path / "err").read_text()
        time.sleep(0.01)
    process.terminate()
    process.join()
    assert process.exitcode == 128 + signal.SIGTERM
    complaint = (tmp_path / "err").read_text()
    assert re.fullmatch(
        r"Stopped at step [\d,]+\. Go on from .* with `rlbook resume .*`\.\n", complaint
    )
    step = newest(path)["agent"]["global_step"]
    total = step + 333
    resume(path, total, progress=False)
    run_whole(tmp_path / "whole", total_steps=total)
    assert_same_run(tmp_path / "whole", path)


# Resuming what needs no resuming, longer, damaged


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    whole = run_whole(tmp_path / "a")
    before = (tmp_path / "a" / "metrics.jsonl").read_bytes(), newest(tmp_path / "a")
    again = resume(tmp_path / "a", progress=False)
    assert before[0] == (tmp_path / "a" / "metrics.jsonl").read_bytes()
    assert_same(before[1], newest(tmp_path / "a"))
    assert again.metrics == whole.metrics and again.checkpoint == whole.checkpoint


@pytest.mark.parametrize("first", [600, 655])
def test_a_longer_run_is_the_run_that_was_longer_from_the_start(
    whole: Path, tmp_path: Path, first: int
) -> None:
    short = run_whole(tmp_path / "longer", total_steps=first)
    assert short.metrics["global_step"] == first
    longer = resume(tmp_path / "longer", 900, progress=False)
    assert read_settings(tmp_path / "longer" / "config.yaml")["total_steps"] == 900
    if first % 300 == 0:
        assert_same_run(whole, tmp_path / "longer")
    else:  # the short run ended with an evaluation of its own, and that is all
        extra = [line for line in longer.history if line["global_step"] == first]
        assert len(extra) == 1 and "eval_return_mean" in extra[0]
        assert_same(newest(whole)["agent"], newest(tmp_path / "longer")["agent"])


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_newest_checkpoint_is_passed_over_and_the_end_is_the_same(
    whole: Path, tmp_path: Path, damage: str
) -> None:
    with pytest.raises(PowerCut):
        run_disturbed(tmp_path / "hurt", 700, cut_power)
    path = CheckpointDirectory(tmp_path / "hurt" / "checkpoints").paths()[-1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data[: len(data) // 2] if damage == "cut" else data)
    with pytest.warns(UserWarning, match=r"step_0+500\.pt is damaged.* the one before"):
        resume(tmp_path / "hurt", progress=False)
    assert_same_run(whole, tmp_path / "hurt")


def test_without_its_buffer_a_run_resumes_and_learns(tmp_path: Path) -> None:
    with pytest.raises(PowerCut):
        run_disturbed(tmp_path / "light", 700, cut_power, checkpoint_replay=False)
    stored = newest(tmp_path / "light")["agent"]
    assert "replay" not in stored and stored["global_step"] == 500
    again = resume(tmp_path / "light", progress=False)
    assert again.agent.global_step == 900
    assert len(again.agent.replay) == 400
    assert again.agent.updates > stored["updates"] + 25
    weights = again.agent.state_dict()["q_network"]
    assert any(not torch.equal(weights[name], stored["q_network"][name]) for name in weights)


def test_learning_on_without_the_buffer_is_told_once(tmp_path: Path) -> None:
    DQN(**TINY, checkpoint_replay=False, run_dir=str(tmp_path / "a")).learn(60, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # to evaluate, nobody needs it
        agent = rlbook.load(tmp_path / "a")
    with pytest.warns(UserWarning, match="The replay buffer was not saved"):
        agent.learn(10, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agent.learn(10, progress=False)


@pytest.mark.parametrize(("eval_every", "made"), [(0, 0), (300, 2)])
def test_environments_for_evaluating_are_made_once_and_only_if_needed(
    eval_every: int, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, make_env = [], rlbook.run.make_env

    def count(*args: Any) -> gym.Env:
        calls.append(args)
        return make_env(*args)

    monkeypatch.setattr(rlbook.run, "make_env", count)
    train(DQN(**{**SMALL, "eval_every": eval_every}), progress=False)
    assert len(calls) == made  # one an episode, kept for all three evaluations


def test_evaluating_more_often_changes_no_weight(tmp_path: Path) -> None:
    states = [
        train(DQN(**{**SMALL, "eval_every": every}), progress=False).agent.state_dict()
        for every in (0, 70, 300)
    ]
    assert_same(states[0], states[1])
    assert_same(states[0], states[2])


def test_metrics_that_somebody_cut_do_not_stop_a_resume(tmp_path: Path) -> None:
    with pytest.raises(PowerCut):
        run_disturbed(tmp_path / "a", 700, cut_power)
    (tmp_path / "a" / "metrics.jsonl").unlink()
    again = resume(tmp_path / "a", progress=False)
    assert again.history[0]["global_step"] == 550
    assert again.agent.global_step == 900


def test_the_metrics_are_one_object_a_line_and_in_order(
    left_alone: Callable[..., RunResult],
) -> None:
    result = left_alone()
    lines = [json.loads(line) for line in (directory_of(result) / "metrics.jsonl").open()]
    assert lines == result.history
    steps = [line["global_step"] for line in lines]
    assert steps == sorted(steps)
    evaluated = [line["global_step"] for line in lines if "eval_return_mean" in line]
    assert evaluated == [300, 600, 900]
    assert all("eval_return_std" in line for line in lines if "eval_return_mean" in line)
    assert result.metrics["eval_return_mean"] == lines[-1]["eval_return_mean"]
    assert all(math.isfinite(value) for line in lines for value in line.values())


def test_a_directory_that_holds_a_run_is_left_alone(tmp_path: Path) -> None:
    run_whole(tmp_path / "a", total_steps=300)
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="already holds a run: go on with `rlbook resume"):
        run_whole(tmp_path / "a")
    after = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert before == after


class Other(DQN):
    """Another algorithm."""


Other.name = "other"  # later than a class declares itself, so that only one test knows it


@pytest.mark.parametrize("what", ["nothing", "saved by hand", "another algorithm"])
def test_what_cannot_be_resumed_is_said(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "nothing":
        with pytest.raises(ValueError, match=r"is not a run directory: it has no config\.yaml"):
            resume(tmp_path, progress=False)
        return
    result = run_whole(tmp_path / "a", total_steps=300)
    assert result.checkpoint is not None
    if what == "saved by hand":
        DQN(**SMALL).save(result.checkpoint)
        message = "was written by `agent.save`, not by a run"
    else:
        monkeypatch.setitem(REGISTRY, "other", Other)
        config = tmp_path / "a" / "config.yaml"
        config.write_text(config.read_text().replace("algo: dqn", "algo: other"))
        message = "holds a dqn agent, but the run is test_run:other"
    with pytest.raises(ValueError, match=message):
        resume(tmp_path / "a", progress=False)


@pytest.mark.parametrize("changed", [{"hidden": [9]}, {"normalize_observations": True}])
def test_settings_that_do_not_fit_the_checkpoint_get_one_sentence(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    DQN(**TINY, run_dir=str(tmp_path / "a")).learn(10, progress=False)
    settings = read_settings(tmp_path / "a" / "config.yaml") | changed
    (tmp_path / "a" / "config.yaml").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"^[^\n]*10\.pt does not fit this dqn: [^\n]*$"):
        resume(tmp_path / "a", progress=False)


def test_another_number_of_environments_cannot_resume(tmp_path: Path) -> None:
    DQN(**TINY, run_dir=str(tmp_path / "a")).learn(10, progress=False)
    settings = read_settings(tmp_path / "a" / "config.yaml") | {"num_envs": 3}
    (tmp_path / "a" / "config.yaml").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"is of a run with 'num_envs' 1, not 3: change it back"):
        resume(tmp_path / "a", progress=False)


def test_a_run_that_ends_before_its_first_update_says_so() -> None:
    for agent in (DQN("CartPole-v1", hidden=(8,)), rlbook.PPO("CartPole-v1", hidden=(8,))):
        with pytest.warns(UserWarning, match=r"^Nothing was learned: 9[06] steps are too few"):
            agent.learn(90, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DQN(**TINY).learn(90, progress=False)  # it learns
        DQN("CartPole-v1", hidden=(8,), total_steps=5_000).learn(90, progress=False)  # or will


def test_fewer_steps_than_were_made_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    run_whole(tmp_path / "a")
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="a is already at step 900: ask for more steps"):
        resume(tmp_path / "a", total_steps=500, progress=False)
    assert before == {path: path.read_bytes() for path in before}


def test_two_processes_cannot_write_to_one_run(tmp_path: Path) -> None:
    run_whole(tmp_path / "a")
    refused = pytest.raises(ValueError, match=r"Another process is at work on .*a: wait for it")
    with RunDirectory.open(tmp_path / "a"), refused:
        resume(tmp_path / "a", total_steps=1_200, progress=False)
    assert resume(tmp_path / "a", 1_200, progress=False).metrics["global_step"] == 1_200


def test_nothing_is_written_before_the_lock_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = DQN(**TINY, run_dir=str(tmp_path / "a"))
    agent.learn(10, progress=False)
    before, agent.config.lr = (tmp_path / "a" / "config.yaml").read_text(), 0.5
    with RunDirectory.open(tmp_path / "a"), pytest.raises(ValueError, match="Another process"):
        agent.learn(10, progress=False)
    assert (tmp_path / "a" / "config.yaml").read_text() == before

    def be_overtaken(env: gym.Env) -> None:
        monkeypatch.undo()
        DQN(**TINY, run_dir=str(tmp_path / "b"), seed=1).learn(10, progress=False)

    monkeypatch.setattr("rlbook.run.try_env", be_overtaken)
    with pytest.raises(ValueError, match="b already holds a run"):
        DQN(**TINY, run_dir=str(tmp_path / "b"), seed=2).learn(10, progress=False)
    assert read_settings(tmp_path / "b" / "config.yaml")["seed"] == 1


def test_a_run_that_has_gone_on_without_its_agent_is_left_alone(tmp_path: Path) -> None:
    agent = DQN(**TINY, run_dir=str(tmp_path / "a"))
    agent.learn(40, progress=False)
    resume(tmp_path / "a", total_steps=160, progress=False)
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="has gone on without this agent: it is at step 160, and"):
        agent.learn(10, progress=False)
    assert before == {path: path.read_bytes() for path in before}


def test_a_second_process_gets_one_sentence_and_a_killed_one_leaves_no_lock(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a"
    settings = {**SMALL, "hidden": (8,), "checkpoint_every": 50, "run_dir": str(path)}
    settings.pop("total_steps")
    process = CHILDREN.Process(target=train_for_ever, args=(settings,))
    process.start()
    while not list(path.glob("checkpoints/*.pt")):
        assert process.is_alive()
        time.sleep(0.01)
    said = rf"^Another process is at work on {path}: wait for it, or stop it\.$"
    with pytest.raises(ValueError, match=said):
        resume(path, progress=False)
    assert record(path)["ended"] == "still running, or killed"  # the refused one wrote nothing
    process.kill()
    process.join()
    step = newest(path)["agent"]["global_step"]
    assert resume(path, step + 10, progress=False).agent.global_step == step + 10
    assert record(path)["before"][0]["ended"] == "still running, or killed"


@pytest.mark.parametrize("every", [0, 1, 3, 7])
def test_multiples_are_crossed_once_each(every: int) -> None:
    for advance in (1, 2, 5, 9):
        for step in range(advance, 60, advance):
            passed = [n for n in range(step - advance + 1, step + 1) if every and n % every == 0]
            assert crosses(step, advance, every) == bool(passed)


def test_a_metric_that_not_every_update_reports_has_its_own_mean() -> None:
    logger = Logger(None, tensorboard=False)
    for loss, alpha in ((1.0, 0.2), (3.0, None), (5.0, 0.4)):
        metrics = {"loss": torch.tensor(loss)}
        logger.add(metrics if alpha is None else metrics | {"alpha": torch.tensor(alpha)})
    logger.log_training(10, 3, [])
    assert logger.lines == [
        pytest.approx({"global_step": 10, "loss": 3, "alpha": 0.3, "updates": 3})
    ]
    logger.add({"loss": torch.tensor(7.0)})
    logger.log_training(20, 4, [1.0, 2.0])
    line = {"global_step": 20, "loss": 7, "updates": 4, "train_return_mean": 1.5}
    assert logger.lines[1] == pytest.approx(line)


def test_metrics_may_be_numbers_and_keep_no_graph() -> None:
    logger, weight = Logger(None, tensorboard=False), torch.ones((), requires_grad=True)
    for loss in (1.0, 3 * weight):
        logger.add({"loss": loss})  # type: ignore[dict-item]
    assert not logger.sums["loss"].requires_grad
    logger.log_training(10, 2, [])
    assert logger.lines[0]["loss"] == 2


@pytest.mark.parametrize("log_every", [5, 40])
def test_a_line_has_the_means_of_the_metrics_since_the_last(log_every: int) -> None:
    changed = {"learning_starts": 120, "train_frequency": 1, "log_every": log_every}
    agent = DQN(**SMALL | changed | {"eval_every": 0})
    update, seen = agent.update, list[dict[str, float]]()

    def watched(batch: Any) -> UpdateResult:
        result = update(batch)
        assert all(not value.requires_grad for value in result.metrics.values())
        seen.append({name: float(value) for name, value in result.metrics.items()})
        return result

    agent.update = watched  # type: ignore[method-assign]
    lines = agent.learn(320, progress=False).history
    taught = [line for line in lines if line["updates"]]
    assert len(seen) == 200 == log_every * len(taught)
    for name in ("loss", "q_mean", "target_mean", "td_error_abs"):
        means = np.array([metrics[name] for metrics in seen]).reshape(-1, log_every).mean(axis=1)
        assert [line[name] for line in taught] == pytest.approx(means.tolist())


class EndsTwice(gym.Env[np.ndarray, Any]):
    """Terminates in the step in which its time is up too."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return np.ones(1, np.float32), 1.0, self.time == 3, self.time == 3, {}


def test_a_step_is_cut_by_a_checkpoint_or_a_limit_unless_it_terminated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gym.register("test/EndsTwice-v0", f"{__name__}:EndsTwice")
    try:
        agent = DQN("test/EndsTwice-v0", checkpoint_every=5)
        seen: list[Transition] = []
        monkeypatch.setattr(agent, "observe", seen.append)
        collector = Collector(agent)
        for _ in range(8):
            collector.step()
    finally:
        del gym.registry["test/EndsTwice-v0"]
    ends = [(bool(step.terminated[0]), bool(step.truncated[0])) for step in seen]
    no, end, cut = (False, False), (True, False), (False, True)
    assert ends == [no, no, end, no, cut, no, no, end]
    starts = [bool(step.episode_start[0]) for step in seen]
    assert starts == [True, False, False, True, False, True, False, False]
    assert list(collector.recent) == [3.0, 3.0]  # the one that was cut did not finish


# What is known of a run


def record(path: Path) -> dict[str, Any]:
    """Read run.json."""
    content: dict[str, Any] = json.loads((path / "run.json").read_text())
    return content


def test_a_run_leaves_command_versions_machine_and_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/rlbook", "train", "dqn", "--env-id", "a b"])
    began = datetime.datetime.now().astimezone().replace(microsecond=0)
    run_whole(tmp_path / "a", total_steps=100)
    found = record(tmp_path / "a")
    assert list(found) == ["command", "versions", "machine", "start", "end", "ended"]
    assert found["command"] == "rlbook train dqn --env-id 'a b'"
    assert found["versions"] == versions()
    assert list(versions()) == ["python", "torch", "numpy", "gymnasium", "rlbook"]
    assert versions()["torch"] == torch.__version__ and versions()["rlbook"] == rlbook.__version__
    assert re.fullmatch(r"\w+ \w+, \d+ cores", found["machine"])
    start, end = (datetime.datetime.fromisoformat(found[name]) for name in ("start", "end"))
    assert began <= start <= end <= datetime.datetime.now().astimezone()
    assert found["ended"] == "finished at step 100"


def test_a_resumed_run_keeps_how_it_ended_before(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with pytest.raises(Interrupted):
        run_disturbed(path, 120, lambda: signal.raise_signal(signal.SIGTERM), total_steps=400)
    first = record(path)
    assert first["ended"] == "interrupted at step 120" and "before" not in first
    resume(path, progress=False)
    second = record(path)
    assert second["ended"] == "finished at step 400" and second.pop("before") == [first]
    resume(path, 500, progress=False)
    assert record(path)["before"] == [first, second]


@pytest.mark.parametrize("how", ["a loss", "an error"])
def test_a_run_that_fails_says_so_in_its_record(tmp_path: Path, how: str) -> None:
    if how == "a loss":
        with pytest.raises(RunFailed):
            run_whole(tmp_path / "a", lr=1e30)
    else:
        with pytest.raises(PowerCut):
            run_disturbed(tmp_path / "a", 120, cut_power)
    assert re.fullmatch(r"failed at step 1\d\d", record(tmp_path / "a")["ended"])
    assert record(tmp_path / "a")["end"] is not None


DAMAGED = ['{"command": "rlb', "", "[1, 2]", "7", "null", '{"before": 3}', '"x"']


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_record_stops_no_run(tmp_path: Path, damaged: str) -> None:
    path = tmp_path / "a"
    run_whole(path, total_steps=10, eval_every=0)
    (path / "run.json").write_text(damaged)
    resume(path, 20, progress=False)
    found = record(path)
    assert found["ended"] == "finished at step 20" and "before" not in found


# A full disk


@pytest.mark.parametrize("failing", ["checkpoint", "metrics"])
def test_a_full_disk_leaves_the_previous_checkpoint_usable(
    whole: Path, tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    save, append = torch.save, MetricsFile.append

    def save_half(content: dict[str, Any], file: Any) -> None:
        if content["agent"]["global_step"] >= 500:
            file.write(b"half of it")
            raise full
        save(content, file)

    def append_half(self: MetricsFile, line: dict[str, float]) -> None:
        if line["global_step"] >= 400:
            with open(self.path, "a") as file:
                file.write('{"global_st')
            raise full
        append(self, line)

    with monkeypatch.context() as patch:
        if failing == "checkpoint":
            patch.setattr(torch, "save", save_half)
        else:
            patch.setattr(MetricsFile, "append", append_half)
        with pytest.raises((RunFailed, OSError)) as failure:
            run_whole(tmp_path / "full")
    if failing == "checkpoint":
        said = r"^Could not write .*step_0+500\.pt: No space left on device\. Older checkpoints "
        said += r"are untouched\. Go on from .*step_0+250\.pt with `rlbook resume .*`\.$"
        assert re.match(said, str(failure.value))
    names = [path.name for path in (tmp_path / "full" / "checkpoints").iterdir()]
    assert names == ["step_000000000250.pt"]
    resume(tmp_path / "full", progress=False)
    assert_same_run(whole, tmp_path / "full")


def test_a_line_that_fits_only_in_part_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AlmostFull(io.FileIO):
        """A file on a disk that is full before the last byte."""

        def write(self, data: Any) -> int:
            return super().write(data[:-1])

    file = GrowingFile(tmp_path / "lines")
    file.write("first\n")
    almost_full = AlmostFull(file.path, "a")
    monkeypatch.setattr(rlbook.run, "open", lambda *_, **__: almost_full, raising=False)
    with pytest.raises(RunFailed, match="No space left on device"):
        file.write("größer\n")  # in which a letter takes two bytes
    assert file.path.read_text() == "first\n"


# Numbers that are not finite


def test_a_loss_that_is_not_finite_names_the_step_and_the_last_good_checkpoint(
    tmp_path: Path,
) -> None:
    with pytest.raises(RunFailed) as failure:
        run_whole(tmp_path / "a", learning_starts=300, lr=1e30)
    found = re.fullmatch(
        r"The run stopped at step (\d+) because the loss of update (\d+) is (inf|nan)\. "
        r"A lower learning rate may help\. Go on from (\S+) with `rlbook resume \S+`\.",
        str(failure.value),
    )
    assert found is not None, failure.value
    assert 300 < int(found[1]) < 500 and int(found[2]) == (int(found[1]) - 300) // 12
    content = read_checkpoint(Path(found[4]))
    assert content["agent"]["global_step"] == 250
    assert all(torch.isfinite(part).all() for part in content["agent"]["q_network"].values())
    text = (tmp_path / "a" / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text


def test_a_loss_that_is_no_number_amid_several_updates_stops_at_their_step() -> None:
    agent = DQN(**{**TINY, "gradient_steps": 5})
    real, ruined = agent.update, list[int]()

    def update(batch: Any) -> Any:
        if agent.global_step >= 150 and agent.updates % 5 == 1:  # the second of five
            batch.reward[0] = math.nan
            ruined.append(agent.global_step)
        return real(batch)

    agent.update = update  # type: ignore[method-assign]
    with pytest.raises(RunFailed, match=r"because the loss of update \d+ is nan") as failure:
        train(agent, progress=False)
    assert len(ruined) == 1 and f"stopped at step {ruined[0]} " in str(failure.value)


@pytest.mark.parametrize(
    "returned",
    [UpdateResult({}), UpdateResult({"q_mean": torch.zeros(())}), {"loss": 1.0}, None],
    ids=["no metrics", "another", "a dictionary", "nothing"],
)
def test_an_update_that_returns_no_loss_is_told_what_to_return(returned: Any) -> None:
    agent = DQN(**TINY)
    agent.update = lambda batch: returned  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"`update` of dqn must return a loss, as in UpdateResult"):
        train(agent, progress=False)


def test_weights_that_are_not_finite_never_reach_a_checkpoint(tmp_path: Path) -> None:
    agent = DQN(**TINY, run_dir=str(tmp_path / "a"))
    real = agent.update

    def update(batch: Any) -> Any:
        result = real(batch)  # its loss is finite, whatever happens to the weights after it
        if agent.global_step == 150:
            next(agent.q_network.parameters()).data[0, 0] = math.inf
        return result

    agent.update = update  # type: ignore[method-assign]
    with pytest.raises(RunFailed, match=r"stopped at step 150 because .* is not finite any more"):
        train(agent, progress=False)
    assert newest(tmp_path / "a")["agent"]["global_step"] == 100


def test_a_floating_point_error_of_a_callback_is_not_taken_for_a_bad_loss() -> None:
    class Failing(Callback):
        def after_step(self, run: Any) -> None:
            raise FloatingPointError("underflow in my callback")

    with pytest.raises(FloatingPointError, match="underflow in my callback") as failure:
        train(DQN(**TINY), progress=False, callbacks=[Failing()])
    assert "The run stopped at step 1. " in failure.value.__notes__[0]


def test_a_loss_that_is_not_finite_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"Without a checkpoint, `rlbook resume .*` starts again"):
        run_whole(tmp_path / "a", lr=1e30)
    with pytest.raises(RunFailed, match="Nothing was written, since the run has no run_dir"):
        train(DQN(**{**SMALL, "lr": 1e30}), progress=False)


class Broken(gym.Env[np.ndarray, Any]):
    """Episodes of five steps; at some step something is not a number that can be learned from."""

    observation_space = gym.spaces.Box(-1e3, 1e3, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, what: str, at: int, value: float) -> None:
        self.what, self.at, self.value, self.count, self.time = what, at, value, 0, 0

    def observe(self, what: str) -> np.ndarray:
        broken = what == self.what and self.count >= self.at
        return np.full(2, self.value if broken else 0.5, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self.observe("first observation"), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.count += 1
        self.time += 1
        reward = self.value if self.what == "reward" and self.count >= self.at else 1.0
        return self.observe("observation"), reward, False, self.time == 5, {}


@pytest.fixture(autouse=True, scope="module")
def broken_environment() -> Iterator[None]:
    gym.register("test/Broken-v0", f"{__name__}:Broken", disable_env_checker=True)
    yield
    del gym.registry["test/Broken-v0"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("what", ["reward", "observation", "first observation"])
def test_numbers_of_the_environment_that_are_not_finite_name_the_step(
    what: str, value: float
) -> None:
    kwargs = {"what": what, "at": 20, "value": value}
    agent = DQN("test/Broken-v0", env_kwargs=kwargs, eval_every=0, learning_starts=1_000)
    word = what.split()[-1]
    with pytest.raises(RunFailed, match=rf"returned a {word} that is not finite, step 19\. "):
        agent.learn(100, progress=False)
    assert agent.global_step == 19  # the step that brought it was not learned from
    assert np.isfinite(agent.replay.storage["reward"]).all()


def test_a_first_observation_that_is_not_finite_is_found_before_it_is_acted_on() -> None:
    kwargs = {"what": "first observation", "at": 0, "value": math.nan}
    agent = DQN("test/Broken-v0", env_kwargs=kwargs, eval_every=0)
    with pytest.raises(RunFailed, match=r"an? observation that is not finite, step 0\.$"):
        agent.learn(100, progress=False)


def test_rewards_too_large_for_a_network_stop_the_run() -> None:
    kwargs = {"what": "reward", "at": 50, "value": 1e300}
    settings = {**SMALL, "env_id": "test/Broken-v0", "env_kwargs": kwargs, "eval_every": 0}
    with pytest.raises(RunFailed, match=r"a reward that is too large for 32 bits, step 49\."):
        train(DQN(**settings), progress=False)


# In pieces


@functools.cache
def learned_whole(several: bool) -> RunResult:
    """Learn in one piece, in memory."""
    settings = {**SMALL, "lr_decay_from": 0.2, **(SEVERAL if several else {})}
    return DQN(**settings).learn(900, progress=False)


@pytest.mark.parametrize("where", ["memory", "directory", "copies", "files"])
@KINDS
def test_learn_in_pieces_equals_the_whole(
    where: str, extra: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**SMALL, "lr_decay_from": 0.2, **extra}
    agent, pieces = DQN(**settings), [30, 270, 120, 210, 3, 267]
    if where == "directory":
        whole = DQN(**settings, run_dir=str(tmp_path / "a")).learn(900, progress=False)
        agent = DQN(**settings, run_dir=str(tmp_path / "b"))
    else:
        whole = learned_whole(several=bool(extra))
    for steps in pieces:
        result = agent.learn(steps, progress=False)
        if where == "copies":
            agent = copy.deepcopy(agent)
        elif where == "files":
            agent.save(tmp_path / "agent.pt")
            agent = DQN.load(tmp_path / "agent.pt")
    states = [each.agent.state_dict() for each in (whole, result)]
    for state in states if where == "copies" else []:
        for part in ("n_step", "replay"):  # a copy of an array has other bytes between its fields
            state.pop(part)
    assert_same(states[0], states[1])
    ends = set(np.cumsum(pieces).tolist()) - {300, 600, 900}  # where it evaluates once more
    lines = [x for x in result.history if x["global_step"] not in ends or "updates" in x]
    if where != "files":
        assert lines == whole.history
    assert agent.config.total_steps == 900


def test_pieces_go_on_beyond_total_steps_and_say_so(tmp_path: Path) -> None:
    agent = DQN(**{**SMALL, "lr_decay_from": 0.2, "run_dir": str(tmp_path / "a")})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agent.learn(900, progress=False)
    before = copy.deepcopy(agent.q_network.state_dict())
    with pytest.warns(UserWarning, match=r"^learn goes on beyond total_steps \(900\): schedules"):
        agent.learn(40, progress=False)
    assert_same(before, agent.q_network.state_dict())  # at a learning rate of 0
    assert agent.global_step == 940 and agent.config.total_steps == 900
    assert resume(tmp_path / "a", progress=False).agent.global_step == 940


def test_the_first_learn_sets_total_steps_if_nobody_did() -> None:
    settings = {name: value for name, value in SMALL.items() if name != "total_steps"}
    agent = DQN(**settings)
    agent.learn(120, progress=False)
    assert agent.config.total_steps == 120
    given = DQN(**settings, total_steps=50_000)  # the default, but given
    given.learn(120, progress=False)
    assert given.config.total_steps == 50_000


@pytest.mark.parametrize("in_place", [False, True])
def test_learn_in_other_environments_begins_new_episodes(in_place: bool) -> None:
    agent = DQN(**{**SMALL, "env_id": "rlbook/ConstantReward-v0", "env_kwargs": {"limit": 7}})
    agent.learn(110, progress=False)
    if in_place:
        agent.config.env_kwargs["limit"] = 3
    else:
        agent.config.env_kwargs = {"limit": 3}
    agent.learn(110, progress=False)
    assert agent.training_state is not None
    assert agent.training_state["collector"]["origin"] == 110  # reset by the second piece
    assert agent.training_state["collector"]["recent"] == [3.0] * 20


def test_environments_of_another_shape_than_the_agent_are_refused() -> None:
    agent = DQN(**TINY)
    agent.config.env_id = "Acrobot-v1"
    for use in (lambda: agent.learn(10, progress=False), lambda: agent.evaluate(1)):
        with pytest.raises(ValueError, match=r"^'Acrobot-v1' has the spaces .*: make a new one\.$"):
            use()


@pytest.mark.parametrize(
    "changed", [{"num_envs": 2}, {"hidden": (9,)}, {"n_step": 2}, {"run_dir": "elsewhere"}]
)
def test_a_setting_that_can_no_longer_take_effect_is_refused(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    agent = DQN(**TINY, run_dir=str(tmp_path / "a"))
    agent.learn(10, progress=False)
    agent.config = agent.config.replace(lr=1e-4, seed=5)  # those still can
    agent.learn(10, progress=False)
    agent.config = agent.config.replace(**changed)
    with pytest.raises(ValueError, match=f"Setting '{next(iter(changed))}' .*fixed"):
        agent.learn(10, progress=False)


def test_learn_beyond_the_end_goes_on_exactly_after_a_kill(tmp_path: Path) -> None:
    def twice(name: str) -> DQN:
        settings = {"checkpoint_every": 1_000, "total_steps": 330, "run_dir": str(tmp_path / name)}
        agent = DQN(**{**SMALL, **settings})
        agent.learn(330, progress=False)
        return agent

    whole = twice("whole")
    result = whole.learn(330, progress=False)
    steps = [line["global_step"] for line in result.history]
    assert steps[0] == 50 and steps == sorted(steps) and result.metrics["global_step"] == 660
    cut = twice("cut")
    real = cut.batches

    def until() -> Any:
        if cut.global_step > 500:  # long before the next checkpoint
            raise KeyboardInterrupt
        return real()

    cut.batches = until  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        cut.learn(330, progress=False)
    resume(tmp_path / "cut", progress=False)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


# Whatever ends a run


class Fragile(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that breaks once, at the first call of its kind from a number of calls on."""

    calls = 0
    breaks_at: ClassVar[dict[str, int]] = {}

    def breaks(self, what: str) -> bool:
        broken = Fragile.calls >= Fragile.breaks_at.get(what, Fragile.calls + 1)
        return broken and bool(Fragile.breaks_at.pop(what))

    def reset(self, **options: Any) -> Any:
        Fragile.calls += 1
        if self.breaks("reset"):
            raise ArithmeticError("the pole is broken")
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        Fragile.calls += 1
        if self.breaks("step"):
            raise ArithmeticError("the pole is broken")
        obs, reward, terminated, truncated, info = self.env.step(action)
        reward = math.nan if self.breaks("reward") else reward
        obs = obs * math.nan if self.breaks("observation") else obs
        return obs, reward, terminated, truncated, info


def make_fragile() -> gym.Env:
    return Fragile(gym.make("CartPole-v1").unwrapped)


@pytest.fixture
def fragile() -> Iterator[None]:
    gym.register("test/Fragile-v0", f"{__name__}:make_fragile", max_episode_steps=60)
    yield
    del gym.registry["test/Fragile-v0"]


@KINDS
@pytest.mark.parametrize("what", ["step", "reward", "observation"])
def test_what_breaks_in_the_environment_loses_no_step(
    what: str, extra: dict[str, Any], fragile: None, tmp_path: Path
) -> None:
    settings = {**SMALL, "env_id": "test/Fragile-v0", "eval_every": 0, "total_steps": 600, **extra}
    Fragile.calls, Fragile.breaks_at = 0, {}
    train(DQN(**settings, run_dir=str(tmp_path / "whole")), progress=False)
    Fragile.calls, Fragile.breaks_at = 0, {what: 470}
    with pytest.raises(ArithmeticError if what == "step" else RunFailed) as failure:
        train(DQN(**settings, run_dir=str(tmp_path / "broken")), progress=False)
    step = newest(tmp_path / "broken")["agent"]["global_step"]
    assert 400 < step < 470  # resets are calls too, and checkpoints come every 250 steps
    said = " ".join([str(failure.value), *getattr(failure.value, "__notes__", [])])
    assert re.search(rf"Go on from \S+step_0+{step}\.pt with `rlbook resume \S+`\.$", said)
    assert record(tmp_path / "broken")["ended"] == f"failed at step {step}"
    resume(tmp_path / "broken", progress=False)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_an_environment_that_loses_its_own_connection_says_so_itself(
    fragile: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Fragile, action: Any) -> Any:
        raise ConnectionRefusedError("the simulator at port 2000 refused")

    monkeypatch.setattr(Fragile, "step", refuse)
    with pytest.raises(ConnectionRefusedError, match="port 2000"):
        DQN("test/Fragile-v0", hidden=(8,)).learn(10, progress=False)


@pytest.mark.parametrize("at", ["checkpoint", "evaluation"])
def test_a_reset_that_fails_loses_no_step(at: str, fragile: None, tmp_path: Path) -> None:
    settings = {**SMALL, "env_id": "test/Fragile-v0", "total_steps": 600}
    Fragile.calls, Fragile.breaks_at = 0, {}
    train(DQN(**settings, run_dir=str(tmp_path / "whole")), progress=False)
    agent = DQN(**settings, run_dir=str(tmp_path / "broken"))
    act, broken = agent.act, list[int]()
    moment = 249 if at == "checkpoint" else 300

    def act_and_break(*arguments: Any, **options: Any) -> Any:
        if agent.global_step == moment and not broken and options["explore"] == (moment == 249):
            broken.append(moment)
            # in the step that ends in a checkpoint the next call but one resets; here, the next
            Fragile.breaks_at = {"reset": Fragile.calls + 2, "step": Fragile.calls + 1}
            Fragile.breaks_at.pop("step" if at == "checkpoint" else "reset")
        return act(*arguments, **options)

    agent.act = act_and_break  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError) as failure:
        train(agent, progress=False)
    assert f"step_{moment:012d}.pt" in failure.value.__notes__[0]
    Fragile.breaks_at = {}
    resume(tmp_path / "broken", progress=False)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_an_agent_in_memory_learns_on_after_its_environment_broke(fragile: None) -> None:
    settings = {**SMALL, "env_id": "test/Fragile-v0", "eval_every": 0}
    Fragile.calls, Fragile.breaks_at = 0, {}
    whole = train(DQN(**settings), progress=False).agent
    agent = DQN(**settings)
    Fragile.calls, Fragile.breaks_at = 0, {"step": 440}
    with pytest.raises(ArithmeticError) as failure:
        train(agent, progress=False)
    assert "the agent is as it was after this step and can `learn` on" in failure.value.__notes__[0]
    agent.learn(900 - agent.global_step, progress=False)
    assert_same(whole.state_dict(), agent.state_dict())


def test_a_second_ctrl_c_in_the_environment_saves_and_in_an_update_names_the_last(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    real = Collector.play

    def play(self: Collector, action: np.ndarray) -> Any:
        if self.agent.global_step == 620:
            press_twice()
        return real(self, action)

    with monkeypatch.context() as patch:
        patch.setattr(Collector, "play", play)
        with pytest.raises(Interrupted, match=r"^Stopped at step 620\. Go on from .*620\.pt with"):
            run_whole(tmp_path / "acting")
    with pytest.raises(Interrupted, match=r"^Stopped at step 620\. Go on from .*0500\.pt with"):
        run_disturbed(tmp_path / "learning", 620, press_twice)
    for name in ("acting", "learning"):
        resume(tmp_path / name, progress=False)
        assert_same_run(whole, tmp_path / name)


# Evaluations


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [250, 300, 900])
def test_a_signal_in_an_evaluation_stops_at_once_and_loses_nothing(
    number: signal.Signals, step: int, left_alone: Callable[..., RunResult], tmp_path: Path
) -> None:
    whole = left_alone(eval_every=50)
    agent = DQN(**{**SMALL, "eval_every": 50, "run_dir": str(tmp_path / "stopped")})
    greedy, calls = agent.greedy, list[int]()

    def watched(*arguments: Any) -> Any:
        if agent.global_step == step:
            calls.append(step)
            if len(calls) == 3:
                signal.raise_signal(number)
        return greedy(*arguments)

    agent.greedy = watched  # type: ignore[assignment, method-assign]
    with pytest.raises(Interrupted, match=rf"^Stopped at step {step}\. Go on from") as stopped:
        train(agent, progress=False)
    assert stopped.value.signal_number == number and len(calls) == 3
    resume(tmp_path / "stopped", progress=False)
    assert_same_run(directory_of(whole), tmp_path / "stopped")


def test_an_environment_that_never_ends_does_not_hang_a_run() -> None:
    settings = {**SMALL, "env_id": "rlbook/ConstantReward-v0", "env_kwargs": {"limit": 10**9}}
    with pytest.warns(UserWarning, match=r"2 of 2 episodes .* after 70 steps and were cut"):
        result = DQN(**settings, eval_max_steps=70).learn(300, progress=False)
    assert result.metrics["eval_return_mean"] == result.metrics["eval_length_mean"] == 70
    with pytest.warns(UserWarning, match="'eval_max_steps' is the limit"):
        assert result.agent.evaluate(3).lengths.tolist() == [70, 70, 70]


def test_metrics_that_cannot_be_written_stop_the_run_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = DQN(**{**SMALL, "run_dir": str(tmp_path / "a")})

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rlbook.run, "open", full, raising=False)
    with pytest.raises(RunFailed, match=r": No space left on device\. Without"):
        train(agent, progress=False)


def test_an_environment_that_ignores_its_seed_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draws = np.random.default_rng(0)
    agent = DQN(**TINY)
    agent.learn(10, progress=False)
    saved = copy.deepcopy(agent)
    monkeypatch.setattr(ObservationReward, "observe", lambda env: draws.uniform(-1, 1))
    with pytest.warns(UserWarning, match="The environment ignores its seed"):
        agent.learn(10, progress=False)
    assert saved.training_state is not None
    del saved.training_state["collector"]["obs"]  # as in earlier checkpoints
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved.learn(10, progress=False)


def test_episodes_that_never_end_between_checkpoints_are_told_of() -> None:
    settings = {**SMALL, "env_id": "rlbook/ConstantReward-v0", "checkpoint_every": 60}
    for limit, warned in ((100, True), (20, False)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            DQN(**settings, env_kwargs={"limit": limit}).learn(300, progress=False)
        told = [str(w.message) for w in found if "No episode has ended yet" in str(w.message)]
        assert len(told) == warned, limit


# TensorBoard


def scalars(path: Path, name: str) -> list[tuple[int, float]]:
    """Read what TensorBoard would draw."""
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    accumulator = EventAccumulator(str(path / "tensorboard"))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_tensorboard_shows_the_metrics_once_also_after_a_resume(tmp_path: Path) -> None:
    with pytest.raises(PowerCut):
        run_disturbed(tmp_path / "a", 620, cut_power, tensorboard=True)
    assert len(scalars(tmp_path / "a", "q_mean")) == 10  # 150, 200, ... 600
    result = resume(tmp_path / "a", progress=False)
    for name in ("q_mean", "loss", "eval_return_mean", "updates"):
        wanted = [(line["global_step"], line[name]) for line in result.history if name in line]
        found = scalars(tmp_path / "a", name)
        assert [step for step, _ in found] == [step for step, _ in wanted]
        np.testing.assert_allclose([v for _, v in found], [v for _, v in wanted], rtol=1e-6)


def test_without_tensorboard_one_sentence_comes_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"^TensorBoard is not installed: `pip install .*\.$"):
        run_whole(tmp_path / "a", tensorboard=True)
    assert not (tmp_path / "a").exists()


def test_an_environment_that_cannot_be_closed_takes_no_result_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jams, closed = list[str](), list[int]()

    class Stiff(ObservationReward):
        def close(self) -> None:
            if jams:
                raise OSError(jams.pop())
            closed.append(id(self))

    class Jam(Callback):
        def at_end(self, run: Run) -> None:
            closed.clear()
            jams.append("jammed")

    monkeypatch.setattr("rlbook.envs.ObservationReward", Stiff)
    agent = DQN(**{**TINY, "eval_every": 10}, run_dir=str(tmp_path / "a"))
    with pytest.warns(UserWarning, match=r"closing it failed: OSError\('jammed'\)"):
        result = agent.learn(20, progress=False, callbacks=[Jam()])
    assert result.agent.global_step == 20 and len(closed) == 2  # and one is jammed
    assert record(tmp_path / "a")["ended"] == "finished at step 20"


def test_a_run_that_fails_before_it_begins_leaves_no_process() -> None:
    class Forgetful(Callback):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("forgotten")

    agent = DQN(**TINY, vectorize="async", num_envs=2)
    agent.learn(10, progress=False, callbacks=[Forgetful()])
    with pytest.raises(KeyError) as caught:  # which keeps the frames alive
        agent.learn(10, progress=False, callbacks=[Forgetful()])
    assert caught.value is not None and not multiprocessing.active_children()


def test_the_writer_of_tensorboard_is_closed_and_opened_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    before = threading.active_count()
    agent = DQN(**TINY, log_every=10, tensorboard=True, run_dir=str(tmp_path / "a"))
    for pieces in (1, 2):
        agent.learn(10, progress=False)
        assert threading.active_count() == before
        assert len(list((tmp_path / "a" / "tensorboard").iterdir())) == pieces


def test_a_result_gives_the_curve_of_each_metric() -> None:
    result = train(DQN(**TINY), progress=False)
    steps, returns = result.curve("eval_return_mean")
    assert steps.tolist() == [100, 200] and returns.shape == (2,)
    assert returns[-1] == result.metrics["eval_return_mean"]
    assert result.curve("nothing of the kind")[0].shape == (0,)
