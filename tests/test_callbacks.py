"""What the chapter on callbacks cannot test about itself: exact resume, settings, the shell."""

import copy
import csv
import inspect
import json
import math
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same, assert_same_run, newest

import rlbook
from rlbook.callbacks import Callback, KeepBest, StopAtReturn, StopWithoutImprovement
from rlbook.cli import main
from rlbook.dqn import DQN, DQNConfig, train_dqn
from rlbook.envs import Evaluation, Mistake
from rlbook.progress import Interrupted
from rlbook.run import Run, resume, train

SMALL: dict[str, Any] = {
    "env_id": "CartPole-v1",
    "hidden": (16,),
    "batch_size": 16,
    "learning_starts": 100,
    "total_steps": 600,
    "checkpoint_every": 250,
    "eval_every": 50,
    "eval_episodes": 2,
    "log_every": 50,
    "seed": 3,
}


class Diary(Callback):
    """Writes down what it is told, logs, and remembers."""

    def __init__(self, stop_at: int = 10**9) -> None:
        self.told: list[str] = []
        self.total, self.stop_at = 0.0, stop_at

    def after_step(self, run: Run) -> None:
        self.total += float(run.collector.obs[0, 0])
        run.log(diary=self.total)
        self.told.append("step")
        if run.agent.global_step >= self.stop_at:
            run.stop("it was time")

    def after_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        assert run.logger.lines[-1]["eval_return_mean"] == evaluation.mean
        self.told.append("evaluation")

    def after_checkpoint(self, run: Run, path: Path) -> None:
        assert path.is_file()
        self.told.append("checkpoint")

    def at_end(self, run: Run) -> None:
        self.told.append("end")

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def test_a_callback_is_told_of_each_moment_and_may_log_and_stop(tmp_path: Path) -> None:
    diary = Diary(stop_at=320)
    config = DQNConfig(**SMALL, run_dir=str(tmp_path / "a"))
    result = train_dqn(config, progress=False, callbacks=[diary])
    assert result.stopped == "it was time" and result.agent.global_step == 320
    told = {word: diary.told.count(word) for word in ("step", "evaluation", "checkpoint", "end")}
    assert told == {"step": 320, "evaluation": 7, "checkpoint": 2, "end": 1}
    assert diary.told[-2:] == ["end", "checkpoint"]
    steps, logged = result.curve("diary")
    assert steps.tolist() == [50, 100, 150, 200, 250, 300] and np.isfinite(logged).all()
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    assert record["ended"] == "stopped by a callback at step 320"


def test_the_state_of_a_callback_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    def run(name: str, stopped: bool) -> None:
        agent = DQN(**SMALL, run_dir=str(tmp_path / name), stop_patience=50, keep_best=True)
        act = agent.act

        def act_and_stop(*arguments: Any, **options: Any) -> Any:
            if stopped and agent.global_step == 330:
                signal.raise_signal(signal.SIGTERM)
            return act(*arguments, **options)

        agent.act = act_and_stop  # type: ignore[method-assign]
        train(agent, progress=False, callbacks=[Diary()])

    run("whole", stopped=False)
    with pytest.raises(Interrupted):
        run("stopped", stopped=True)
    resume(tmp_path / "stopped", progress=False, callbacks=[Diary()])
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    kept = [rlbook.load(tmp_path / n / "checkpoints" / "best.pt") for n in ("whole", "stopped")]
    assert_same(kept[0].state_dict()["q_network"], kept[1].state_dict()["q_network"])
    assert kept[0].global_step == kept[1].global_step


def test_pieces_of_learn_keep_the_state_of_callbacks() -> None:
    whole, pieces = Diary(), Diary()
    DQN(**SMALL).learn(600, progress=False, callbacks=[whole])
    agent = DQN(**SMALL)
    for _ in range(3):
        agent.learn(200, progress=False, callbacks=[pieces])
    assert pieces.total == whole.total
    with pytest.warns(UserWarning, match="The run had the callback Diary and goes on without it"):
        agent.learn(1, progress=False)


def test_numbers_of_numpy_in_the_state_of_a_callback_can_be_saved(tmp_path: Path) -> None:
    class Longest(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"longest": np.float64(2.5), "lengths": [np.int64(3)]}

    agent = DQN(**SMALL, run_dir=str(tmp_path / "a"))
    agent.learn(10, progress=False, callbacks=[Longest()])
    states = newest(tmp_path / "a")["run"]["callbacks"]
    assert_same(states, [["Longest", {"longest": 2.5, "lengths": [3]}]])


def test_a_copy_made_by_a_callback_has_no_training_state_of_an_earlier_step() -> None:
    copies = []

    class Copy(Callback):
        def after_step(self, run: Run) -> None:
            copies.append(copy.deepcopy(run.agent))

    agent = DQN(**SMALL)
    for _ in range(2):
        agent.learn(2, progress=False, callbacks=[Copy()])
    assert [each.global_step for each in copies] == [1, 2, 3, 4]
    assert all(each.training_state is None for each in copies)
    assert copies[2].learn(1, progress=False).agent.global_step == 4


def test_a_run_that_was_stopped_is_finished_until_more_is_asked_for(tmp_path: Path) -> None:
    first = train(DQN(**SMALL, stop_at_return=1, run_dir=str(tmp_path / "a")), progress=False)
    assert first.stopped == f"the mean return {first.metrics['eval_return_mean']:.1f} has reached 1"
    assert first.agent.global_step == 50
    again = resume(tmp_path / "a", progress=False)
    assert again.stopped == first.stopped and again.agent.global_step == 50
    assert resume(tmp_path / "a", 400, progress=False).agent.global_step == 100


def test_patience_counts_evaluations_without_improvement() -> None:
    result = train(DQN(**SMALL | {"lr": 1e-12}, stop_patience=3), progress=False)
    _, returns = result.curve("eval_return_mean")
    best = np.maximum.accumulate(returns)
    waited = [i for i in range(3, len(returns)) if best[i] == best[i - 3]]
    assert result.stopped is not None and waited == [len(returns) - 1]
    assert re.match(r"3 evaluations were no better than \d+\.\d$", result.stopped)


def test_patience_does_not_count_the_evaluation_that_ends_a_piece() -> None:
    settings = {**SMALL, "lr": 1e-12, "env_id": "rlbook/OneStep-v0", "stop_patience": 2}
    whole, pieces = DQN(**settings), DQN(**settings)
    told = whole.learn(200, progress=False).stopped
    ends = [pieces.learn(15, progress=False).stopped for _ in range(10)]
    assert told is not None and ends == [None] * 9 + [told]
    assert pieces.global_step == whole.global_step == 150


def test_stopping_needs_evaluations_and_says_so_before_anything_is_written(tmp_path: Path) -> None:
    settings = {**SMALL, "eval_every": 0, "stop_at_return": 0.0, "run_dir": str(tmp_path / "a")}
    with pytest.raises(ValueError, match="need evaluations: set 'eval_every' above 0"):
        DQN(**settings).learn(10, progress=False)
    assert not (tmp_path / "a").exists()


def test_the_best_agent_is_kept_and_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = train(DQN(**SMALL, keep_best=True, run_dir="runs/a"), progress=False)
    steps, returns = result.curve("eval_return_mean")
    best = DQN.load("runs/a/checkpoints/best.pt")
    assert best.global_step == steps[returns.argmax()]
    assert len(best.replay) == 0 and len(newest(Path("runs/a"))["agent"]["replay"]) > 0
    assert main(["evaluate", "runs/a", "--best", "--episodes", "3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["returns"] == best.evaluate(3).returns.tolist()
    obs = [[0.1 * i, 0.5, -0.1, 0.2] for i in range(4)]
    assert main(["predict", "runs/a", "--best", "--observation", json.dumps(obs)]) == 0
    assert json.loads(capsys.readouterr().out)["q_values"] == best.q_values(np.array(obs)).tolist()
    train(DQN(**SMALL, run_dir="runs/b"), progress=False)
    said = "runs/b keeps no best agent: train it with the setting 'keep_best'.\n"
    for command in ("evaluate", "predict --observation [1]", "watch", "export"):
        name, *rest = command.split()
        assert main([name, "runs/b", "--best", *rest]) == 2
        assert capsys.readouterr().err == said


def test_nowhere_to_keep_the_best_agent_is_an_error(tmp_path: Path) -> None:
    agent = DQN(**SMALL, keep_best=True)
    with pytest.raises(ValueError, match="'keep_best' needs a 'run_dir'"):
        agent.learn(100, progress=False)
    with pytest.raises(ValueError, match="'keep_best' needs a 'run_dir'"):
        rlbook.train_dqn(agent.config, progress=False)
    agent.save(tmp_path / "agent.pt")
    for other in (copy.deepcopy(agent), DQN.load(tmp_path / "agent.pt")):  # which write nowhere
        other.learn(10, progress=False)
        assert other.global_step == 10
    with pytest.raises(Mistake, match="KeepBest needs a 'run_dir'"):
        DQN(**SMALL).learn(100, progress=False, callbacks=[KeepBest()])


def test_stopping_is_a_flag_and_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--hidden", "8", "--total-steps", "500", "--eval-every", "100", "--run-dir", "a"]
    assert main(["train", "dqn", *flags, "--stop-at-return", "1", "--keep-best"]) == 0
    assert "Stopped early because the mean return" in capsys.readouterr().out
    assert newest(tmp_path / "a")["agent"]["global_step"] == 100
    assert (tmp_path / "a" / "checkpoints" / "best.pt").is_file()


@pytest.mark.parametrize("name", rlbook.ALGORITHMS)
def test_the_trainer_of_each_algorithm_takes_callbacks(name: str) -> None:
    parameters = inspect.signature(getattr(rlbook, f"train_{name}")).parameters
    assert list(parameters) == ["config", "progress", "callbacks"]


def test_shipped_callbacks_can_be_given_by_hand(tmp_path: Path) -> None:
    given = [KeepBest(), StopAtReturn(math.inf), StopWithoutImprovement(1_000)]
    result = DQN(**SMALL, run_dir=str(tmp_path / "a")).learn(100, progress=False, callbacks=given)
    assert result.stopped is None and (tmp_path / "a" / "checkpoints" / "best.pt").is_file()


# The record of episodes


def episodes(path: Path) -> list[tuple[int, float, int, float]]:
    """Read the record."""
    with open(path / "episodes.csv") as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "return", "length", "seconds"]
    return [(int(a), float(b), int(c), float(d)) for a, b, c, d in rows]


@pytest.mark.parametrize("num_envs", [1, 3])
def test_each_finished_episode_is_recorded_once_and_exactly(num_envs: int, tmp_path: Path) -> None:
    settings = {**SMALL, "num_envs": num_envs, "total_steps": 900}
    agent = DQN(**settings, run_dir=str(tmp_path / "whole"))
    observe, wanted, open_steps = agent.observe, list[tuple[int, int]](), [0] * num_envs

    def watched(transition: Any) -> None:
        observe(transition)
        for i in range(num_envs):
            open_steps[i] = 1 if transition.episode_start[i] else open_steps[i] + 1
            cut = agent.global_step % 250 < num_envs  # a checkpoint, which is no end
            if transition.terminated[i] or (transition.truncated[i] and not cut):
                wanted.append((agent.global_step, open_steps[i]))

    agent.observe = watched  # type: ignore[method-assign]
    train(agent, progress=False)
    whole = episodes(tmp_path / "whole")
    assert [(step, length) for step, _, length, _ in whole] == wanted and len(wanted) > 15
    assert all(returned == length for _, returned, length, _ in whole)  # CartPole pays 1 a step
    seconds = [row[3] for row in whole]
    assert seconds == sorted(seconds)

    stopped = DQN(**settings, run_dir=str(tmp_path / "stopped"))
    batches = stopped.batches

    def batches_until() -> Any:
        if stopped.global_step > 700:
            raise torch.OutOfMemoryError
        return batches()

    stopped.batches = batches_until  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        train(stopped, progress=False)
    resume(tmp_path / "stopped", progress=False)
    again = episodes(tmp_path / "stopped")
    assert [row[:3] for row in again] == [row[:3] for row in whole]
    seconds = [row[3] for row in again]
    assert seconds == sorted(seconds)
