"""A search for settings: killed and continued, shared, pruned, and a config that trains."""

import dataclasses
import functools
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import filelock
import pytest
import yaml
from helpers import CHILDREN, TINY, warm_workers

from rlbook.agent import REGISTRY, Agent, algorithms
from rlbook.cli import main
from rlbook.dqn import DQNConfig
from rlbook.settings import read_settings
from rlbook.sweep import Item, Outcome, start_worker
from rlbook.tune import (
    Attempt,
    Processes,
    Study,
    advance,
    find_space,
    ranked,
    read_space,
    report,
    scores,
    tune,
)

pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'rlbook[tune]'")

SPACE: dict[str, Any] = {
    "lr": {"low": 1e-4, "high": 1e-2, "log": True},
    "n_step": {"low": 1, "high": 4},
    "hidden": [[4], [8], [4, 4]],
}
QUIET: dict[str, Any] = {"say": lambda line: None}
SHORT = {**TINY, "total_steps": 300, "eval_every": 100, "eval_episodes": 2, "checkpoint_every": 50}


@pytest.fixture(autouse=True, scope="module")
def warm() -> Iterator[None]:
    """Let searches start processes that need not import the library."""
    with warm_workers():
        yield


def search(directory: Path, trials: int) -> None:
    """Search in a process of its own, which writes what it says to a file."""
    with warm_workers(), open(directory / f"said-{os.getpid()}", "w", buffering=1) as file:
        say = functools.partial(print, file=file)
        tune("dqn", SHORT, space=SPACE, trials=trials, jobs=1, directory=directory, say=say)


def start(directory: Path, trials: int) -> BaseProcess:
    """Start a search in a process of its own."""
    process = CHILDREN.Process(target=search, args=(directory, trials))
    process.start()
    return process


def tried(result: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return what decides a search: trials, settings and scores."""
    return [(t["trial"], t["state"], t["settings"], t["score"]) for t in result["trials"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A search of four trials that was left alone."""
    directory = tmp_path_factory.mktemp("whole")
    result = tune("dqn", SHORT, space=SPACE, trials=4, jobs=1, directory=directory, **QUIET)
    return directory, result


def test_the_first_trial_is_the_config_and_the_others_are_in_the_space(
    whole: tuple[Path, dict[str, Any]],
) -> None:
    _, result = whole
    assert [trial["trial"] for trial in result["trials"]] == [0, 1, 2, 3]
    first = result["trials"][0]["settings"]
    base = algorithms()["dqn"].config_class(**SHORT)
    assert first["lr"] == base.lr and first["n_step"] == base.n_step  # type: ignore[attr-defined]
    for trial in result["trials"]:
        values = trial["settings"]
        assert 1e-4 <= values["lr"] <= 1e-2 and values["n_step"] in range(1, 5)
        assert values["hidden"] in SPACE["hidden"]
    assert len({trial["settings"]["lr"] for trial in result["trials"]}) == 4


def test_the_result_is_a_config_that_trains_and_a_sweep_of_the_best(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, result = whole
    monkeypatch.chdir(tmp_path)
    best = ranked(result)[0]
    assert best["score"] == max(trial["score"] for trial in result["trials"])
    assert main(["train", "--config", str(directory / "best.yaml"), "--run-dir", "runs/a"]) == 0
    settings = read_settings(tmp_path / "runs" / "a" / "config.yaml")
    assert settings["algo"] == "dqn" and settings["total_steps"] == 300
    assert {name: settings[name] for name in best["settings"]} == best["settings"]
    top = yaml.safe_load((directory / "top.yaml").read_text())
    assert next(iter(top["variants"])) == f"trial {best['trial']}"
    words = ["--seed", "9", "--seeds", "1", "--jobs", "1", "--run-dir", "runs/top"]
    assert main(["sweep", "--config", str(directory / "top.yaml"), *words]) == 0
    assert (directory / "tune.png").stat().st_size > 5_000
    assert json.loads((directory / "result.json").read_text()) == result


def test_running_it_again_does_nothing_and_more_trials_go_on(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    directory, result = whole
    shutil.copytree(directory, tmp_path / "copy")
    arguments: dict[str, Any] = {"space": SPACE, "jobs": 1, "directory": tmp_path / "copy"}
    for trials in (4, 5):
        said: list[str] = []
        again = tune("dqn", SHORT, trials=trials, say=said.append, **arguments)
        assert len(again["trials"]) == trials and tried(again)[:4] == tried(result)
        assert sum(line.startswith("[") for line in said) == trials - 4


def test_a_search_that_was_killed_ends_like_one_that_was_left_alone(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    process = start(tmp_path, trials=4)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("trial_0002/seed_0/checkpoints/*.pt")):
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.join()
    result = tune("dqn", SHORT, space=SPACE, trials=4, jobs=1, directory=tmp_path, **QUIET)
    assert tried(result) == tried(whole[1])
    assert sorted(path.name for path in tmp_path.glob("trial_*")) == [
        f"trial_{i:04d}" for i in range(4)
    ]


def test_two_processes_share_a_search(tmp_path: Path) -> None:
    processes = [start(tmp_path, trials=5) for _ in range(2)]
    for process in processes:
        process.join(600)
    said = [path.read_text() for path in tmp_path.glob("said-*")]
    assert [process.exitcode for process in processes] == [0, 0], said
    result = json.loads((tmp_path / "result.json").read_text())
    assert [trial["trial"] for trial in result["trials"]] == list(range(5))
    assert all(trial["state"] == "complete" for trial in result["trials"])
    done = [re.findall(r"\] trial (\d+): return", text) for text in said]
    assert all(done), "one of them did nothing"
    both = sorted(int(number) for numbers in done for number in numbers)
    assert both == list(range(5)), "each trial is done by one of them"


def test_a_trial_that_ends_while_others_look_for_dead_ones_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = read_space({"lr": [1e-3, 1e-2]}, DQNConfig)
    one, other = (Study("dqn", SHORT, space, [0], tmp_path, 2) for _ in range(2))
    asked, now = threading.Event(), threading.Event()

    def work() -> None:  # in a thread of its own, as locks are
        attempt = one.ask()
        assert attempt is not None
        asked.set()
        now.wait(60)
        one.tell(attempt, "COMPLETE", 1.0)

    process = threading.Thread(target=work)
    process.start()
    asked.wait(60)
    listed = other.study.get_trials

    def slow(*args: Any, **keywords: Any) -> Any:
        found = listed(*args, **keywords)
        if not now.is_set():  # the first list, of running trials: now the other process ends one
            now.set()
            process.join(0.5)
        return found

    monkeypatch.setattr(other.study, "get_trials", slow)
    following = other.ask()
    process.join()
    assert following is not None and following.folder == "trial_0001"
    assert [trial.state.name for trial in listed()] == ["COMPLETE", "RUNNING"]
    following.lock.release()


class OneIsPoor(Processes):
    """Says that five runs ended well at once, and does the sixth, which is long and poor."""

    def start(self, item: Item) -> Any:
        if item.variant == "trial_0005":
            longer = {**item.settings, "total_steps": 10_000}
            return super().start(dataclasses.replace(item, settings=longer))
        folder = Path(item.run_dir)
        folder.mkdir(parents=True)
        lines = [{"global_step": i, "eval_return_mean": 1e6} for i in (100, 200, 300, 400)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "sweep.json").write_text('{"finished": true, "seconds": 1}')
        (folder / "config.yaml").touch()
        return "done"

    def ended(self, handle: Any, item: Item) -> str | None:
        return "" if handle == "done" else super().ended(handle, item)


def test_pruning_stops_a_trial_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlbook.tune.find_runner", lambda _: OneIsPoor())
    said: list[str] = []
    arguments: dict[str, Any] = {"trials": 6, "jobs": 1, "directory": tmp_path, "say": said.append}
    result = tune("dqn", {**SHORT, "total_steps": 400}, space={"lr": [1e-3, 1e-2]}, **arguments)
    assert [trial["state"] for trial in result["trials"]] == ["complete"] * 5 + ["pruned"]
    place, pruned = tmp_path / "trial_0005" / "seed_0", result["trials"][-1]
    assert "interrupted" in json.loads((place / "run.json").read_text())["ended"]
    assert list(place.glob("checkpoints/*.pt"))
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    found = [line["eval_return_mean"] for line in lines if "eval_return_mean" in line]
    assert pruned["evaluations"] == 2  # the first after a quarter of the run
    assert pruned["score"] == pytest.approx(found[1], rel=1e-3) and not pruned["final"]
    assert any(line.startswith("[6/6] trial 5: pruned at step 200 of seed 0") for line in said)


def test_several_seeds_are_a_mean(tmp_path: Path) -> None:
    result = tune("dqn", SHORT, space=SPACE, trials=1, seeds=[3, 5], directory=tmp_path, **QUIET)
    (trial,) = result["trials"]
    assert trial["score"] == pytest.approx(sum(trial["final"]) / 2, rel=1e-4)
    assert len(trial["final"]) == 2 and trial["evaluations"] == 6
    assert {path.name for path in (tmp_path / "trial_0000").glob("seed_*")} == {"seed_3", "seed_5"}


def test_scores_compare_the_same_evaluation_of_all_seeds() -> None:
    done = Outcome([1, 2, 3], [20.0, 50.0, 90.0], 1.0)
    assert scores([], [7.0, 8.0], seen=1) == [8.0]
    assert scores([done], [10.0, 30.0]) == [15.0, 40.0]


class ToldTrial:
    """Remembers what is reported to it."""

    def __init__(self) -> None:
        self.told: list[tuple[int, float]] = []

    def report(self, value: float, step: int) -> None:
        self.told.append((step, value))


def test_a_lucky_first_seed_does_not_protect_a_trial(tmp_path: Path) -> None:
    curves = [20.0, 50.0, 90.0], [0.0, 0.0, 0.0]
    items = []
    for seed, curve in enumerate(curves):
        folder = tmp_path / f"seed_{seed}"
        folder.mkdir()
        lines = [json.dumps({"eval_return_mean": value}) + "\n" for value in curve]
        (folder / "metrics.jsonl").write_text("".join(lines))
        settings = {"total_steps": 300, "eval_every": 100}
        items.append(Item("dqn", "trial", seed, str(folder), settings))
    trial, lock = ToldTrial(), filelock.FileLock(tmp_path / "lock")
    attempt = Attempt(trial, "trial", {}, items, lock)
    complete = [[20.0, 50.0, 80.0] * 2] * 5
    assert not report(attempt, lambda: complete)
    attempt.outcomes.append(Outcome([100, 200, 300], curves[0], 1.0))
    attempt.seen = 0
    assert report(attempt, lambda: complete)  # after five scores its mean is 39, theirs is 44
    assert trial.told == list(enumerate([20.0, 50.0, 90.0, 10.0, 25.0]))  # no step is left out


def test_a_trial_is_not_given_up_at_its_last_evaluation(tmp_path: Path) -> None:
    lines = [json.dumps({"eval_return_mean": value}) + "\n" for value in (10.0, 10.0, 10.0, 500.0)]
    settings = {"total_steps": 350, "eval_every": 100}  # the last evaluation is at the end
    complete = [[50.0, 100.0, 150.0, 260.0]] * 5  # 140 on average, 132.5 here
    for count, given_up in ((3, True), (4, False)):
        (tmp_path / "metrics.jsonl").write_text("".join(lines[:count]))
        item = Item("dqn", "trial", 0, str(tmp_path), settings)
        trial, lock = ToldTrial(), filelock.FileLock(tmp_path / "lock")
        attempt = Attempt(trial, "trial", {}, [item], lock)
        attempt.seen, attempt.reported = count - 1, [10.0] * (count - 1)
        assert report(attempt, lambda: complete) == given_up


class Told:
    """Stands for a study, for the runs and for their end."""

    def __init__(self, metrics: Path) -> None:
        self.metrics, self.states, self.why = metrics, list[str](), None

    def complete(self) -> list[list[float]]:
        return [[9.0, 9.0, 9.0]] * 5

    def tell(self, attempt: Attempt, state: str) -> None:
        self.states.append(state)

    def ended(self, handle: Any, item: Item) -> str | None:
        return self.why

    def stop(self, handles: list[Any]) -> None:
        self.metrics.write_text("")  # a run that went on had cut it back to its checkpoint

    def set_user_attr(self, name: str, value: Any) -> None:
        pass

    def report(self, value: float, step: int) -> None:
        pass


@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_whose_metrics_change_or_break_ends_its_trial_alone(
    tmp_path: Path, damaged: bool
) -> None:
    line = '{"eval_return_mean": 0.0}\n' if not damaged else "{\n"
    (tmp_path / "metrics.jsonl").write_text(line * 3)
    item = Item("dqn", "trial", 0, str(tmp_path), {"total_steps": 300, "eval_every": 100})
    stub: Any = Told(tmp_path / "metrics.jsonl")
    attempt = Attempt(stub, "trial", {}, [item], filelock.FileLock(tmp_path / "lock"))
    how = advance(attempt, stub, stub, prune=True)
    assert how is not None and how.startswith("failed" if damaged else "pruned at step 100")
    assert stub.states == ["FAIL" if damaged else "PRUNED"]


def test_seconds_add_up_over_sessions(tmp_path: Path) -> None:
    words: dict[str, Any] = {"space": SPACE, "directory": tmp_path, **QUIET}
    one = tune("dqn", SHORT, trials=1, **words)
    again = tune("dqn", SHORT, trials=1, **words)  # which has nothing left to do
    assert again["seconds"] >= one["seconds"] > 0


def test_a_trial_that_fails_is_told_and_the_search_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    space = {"batch_size": [4, 500]}  # more than the buffer holds
    settings = {**SHORT, "buffer_size": 100, "batch_size": 4, "total_steps": 100}
    arguments: dict[str, Any] = {"directory": tmp_path, "say": said.append, "jobs": 1}
    result = tune("dqn", settings, space=space, trials=6, **arguments)
    states = {t["settings"]["batch_size"]: t["state"] for t in result["trials"]}
    assert states == {4: "complete", 500: "fail"}
    assert any("must not exceed" in line for line in said)


def test_each_algorithm_has_a_space_that_fits_its_settings() -> None:
    for name, agent_class in algorithms().items():
        if agent_class.__module__.startswith("rlbook."):
            assert len(read_space(find_space(name), agent_class.config_class)) >= 4


def test_a_setting_that_is_typed_is_not_searched(tmp_path: Path) -> None:
    plain = {name: value for name, value in SHORT.items() if name != "hidden"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in plain.items()]
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(SPACE))
    line = ["tune", "dqn", *words, "--lr", "0.002", "--trials", "1", "--seed", "7"]
    line += ["--space", str(tmp_path / "space.yaml"), "--run-dir", str(tmp_path / "runs")]
    assert main(line) == 0
    result = json.loads((tmp_path / "runs" / "result.json").read_text())
    assert "lr" not in result["trials"][0]["settings"] and result["seeds"] == [7]
    assert read_settings(tmp_path / "runs" / "best.yaml")["lr"] == 0.002


def test_an_algorithm_of_one_s_own_is_tuned_and_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tuned_own.py").write_text(
        "from rlbook.dqn import DQN\n\n\nclass Mine(DQN):\n    name = 'mine'\n"
    )
    # Its processes find the module from the current directory, as they do from a shell.
    monkeypatch.setattr("rlbook.tune.start_worker", start_worker)
    Path("config.yaml").write_text(yaml.safe_dump({"algo": "tuned_own:mine", **SHORT}))
    Path("space.yaml").write_text(yaml.safe_dump({"lr": [1e-3, 1e-2]}))
    line = "tune --config config.yaml --space space.yaml --trials 1 --run-dir runs/tune"
    assert main(line.split()) == 0
    assert main(["train", "--config", "runs/tune/best.yaml", "--run-dir", "runs/a"]) == 0
    assert find_space("tuned_own:mine") == find_space("dqn")  # of the algorithm that it extends


def test_an_algorithm_without_a_space_says_so_in_words_for_python_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(REGISTRY, "alone", Agent)
    with pytest.raises(ValueError, match=r"'alone' comes without .*: give one as `space`: \{lr: "):
        find_space("alone")


def test_numbers_of_a_space_are_read_as_settings_are(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"  # YAML takes 1e-4 for a text
    path.write_text("lr: {low: 1e-4, high: 1e-2, log: true}\ntau: [5e-3, 1]\nhidden: [[8], [4, 4]]")
    lr, tau, hidden = read_space(find_space("dqn", path), DQNConfig)
    assert (lr.low, lr.high, lr.whole) == (1e-4, 1e-2, False)
    assert tau.choices == (5e-3, 1.0) and hidden.choices == ([8], [4, 4])
    assert not read_space({"gamma": {"low": 0, "high": 1}}, DQNConfig)[0].whole


def test_tuples_and_none_are_choices_and_the_first_trial_has_them() -> None:
    given = {"hidden": [(64,), (64, 64)], "max_grad_norm": [10.0, None]}
    hidden, norm = read_space(given, DQNConfig)
    assert hidden.labels == {"[64]": [64], "[64, 64]": [64, 64]}
    assert norm.labels == {10.0: 10.0, "None": None}
    assert hidden.stored((64, 64)) == "[64, 64]"
    assert norm.stored(None) == "None" and norm.stored(3.0) is None


BAD: list[tuple[list[str], str]] = [
    (["dqm"], "Did you mean 'dqn'?"),
    (["dqn", "--trials", "0"], "must be a whole number above 0"),
    (["dqn", "--space", "absent.yaml"], "There is no search space 'absent.yaml'"),
    (["dqn", "--space", "empty.yaml"], "empty.yaml must hold settings"),
    (["dqn", "--space", "name.yaml"], "Did you mean 'batch_size'?"),
    (["dqn", "--space", "range.yaml"], "must go from a number `low` to a higher one"),
    (["dqn", "--space", "value.yaml"], "Setting 'lr' must be above 0, not -1.0"),
    (["dqn", "--space", "log.yaml"], "only if it is above 0"),
    (["dqn", "--space", "text.yaml"], "must be a list of choices"),
    (["dqn", "--space", "seed.yaml"], "'seed' cannot be searched"),
    (["dqn", "--eval-every", "0"], "'eval_every' must be above 0"),
    (["dqn", "--env-id", "CartPol-v1"], "Did you mean 'CartPole-v1'?"),
    (["dqn", "--backend", "moon"], "There is no backend 'moon'"),
    (["dqn", "--out", "a.txt"], "name a file NAME.json"),
    (["dqn", "--out", "folder.json"], "name a file NAME.json"),
    (["dqn", "--out", "notes.json"], "is not a search of dqn on CartPole-v1"),
    (["dqn", "--out", "sac.json"], "is not a search of dqn on CartPole-v1"),
    (["dqn", "--out", "notes.json/a.json"], "Cannot write into notes.json"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_mistakes_are_one_sentence(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "empty": "",
        "name": "batch_sise: [1, 2]",
        "range": "lr: {low: 1, high: 0}",
        "value": "lr: [-1.0, 0.1]",
        "log": "tau: {low: 0, high: 1, log: true}",
        "text": "lr: high",
        "seed": "seed: [1, 2]",
    }
    for name, text in files.items():
        Path(f"{name}.yaml").write_text(text)
    Path("folder.json").mkdir()
    Path("notes.json").write_text("[1]")
    Path("sac.json").write_text('{"algo": "sac", "env_id": "CartPole-v1", "trials": []}')
    assert main(["tune", *words]) == 2
    assert not Path("runs").exists()  # nothing was begun
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


def test_another_search_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    space = read_space({"lr": [1e-3, 1e-2]}, algorithms()["dqn"].config_class)
    Study("dqn", SHORT, space, [0], tmp_path, 1)
    Study("dqn", SHORT, space, [0], tmp_path, 5)
    with pytest.raises(ValueError, match="holds a search with other seeds"):
        Study("dqn", SHORT, space, [0, 1], tmp_path, 1)
    with pytest.raises(ValueError, match="holds a search with other settings"):
        Study("dqn", {**SHORT, "gamma": 0.5}, space, [0], tmp_path, 1)
    with pytest.raises(ValueError, match="holds a search with other space"):
        Study("dqn", SHORT, space[:0], [0], tmp_path, 1)


def test_without_optuna_a_sentence_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"pip install 'rlbook\[tune\]'"):
        tune("dqn", SHORT, directory=tmp_path)
