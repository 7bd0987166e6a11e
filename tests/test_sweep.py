"""Sweeps: seeds and variants side by side, stopped and resumed, and one small file at the end."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import CHILDREN, TINY, WarmWorker, run_rlbook, run_warm, warm_workers

from rlbook.cli import main
from rlbook.dqn import DQNConfig
from rlbook.envs import mean_interval
from rlbook.figures import load_result
from rlbook.progress import RunFailed
from rlbook.sweep import (
    Item,
    Report,
    check_out,
    check_seeds,
    collect,
    folder_names,
    grid,
    iqm_interval,
    last_step,
    make_plan,
    read_outcome,
    replace_file,
    resolve_seeds,
    run_item,
    run_plan,
    summary,
    sweep,
    write_result,
)


def small_sweep(folder: Path, say: Callable[[str], None], **own: Any) -> dict[str, Any]:
    """Sweep two variants and two seeds in processes, or go on where they are."""
    return sweep(
        "dqn",
        TINY,
        variants={"plain": {}, "fast & wide": {"lr": 0.01, "hidden": [16]}},
        seeds=2,
        directory=folder / "runs",
        out=folder / "x.json",
        say=say,
        **own,
    )


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    """A small sweep that is done: its folder, its result, what it said."""
    folder = tmp_path_factory.mktemp("swept")
    said: list[str] = []
    with warm_workers():
        result = small_sweep(folder, said.append, command="rlbook sweep dqn")
    return folder, result, said


Swept = tuple[Path, dict[str, Any], list[str]]


def test_the_result_has_the_form_that_figures_read(swept: Swept) -> None:
    folder, result, _ = swept
    assert load_result(folder / "x.json") == json.loads(json.dumps(result))
    keys = "command algo env_id seeds versions created seconds defaults runs"
    assert list(result) == keys.split()
    assert result["command"] == "rlbook sweep dqn" and result["seeds"] == [0, 1]
    assert list(result["versions"]) == ["python", "torch", "numpy", "gymnasium", "rlbook"]
    assert result["defaults"]["dqn"]["gamma"] == DQNConfig().gamma
    assert not {"seed", "run_dir"} & result["defaults"]["dqn"].keys()
    run = result["runs"]["fast & wide"]
    assert list(run) == ["algo", "settings", "steps", "returns", "final", "seconds", "iqm"]
    assert run["steps"] == [100, 200] and np.shape(run["returns"]) == (2, 2)
    assert run["final"] == [curve[-1] for curve in run["returns"]]
    assert len(run["seconds"]) == 2 and min(run["seconds"]) > 0
    assert np.allclose(run["iqm"], iqm_interval(run["final"]), rtol=1e-4)
    assert (folder / "x.json").stat().st_size < 2_500


def test_settings_of_the_result_make_the_same_run_again(swept: Swept, tmp_path: Path) -> None:
    _, result, _ = swept
    run = result["runs"]["fast & wide"]
    assert run["settings"]["lr"] == 0.01 and "seed" not in run["settings"]
    item = Item("dqn", "again", 1, str(tmp_path / "r"), run["settings"])
    assert run_item(item).returns == run["returns"][1]


def test_each_run_is_reported_once_then_the_means(swept: Swept) -> None:
    folder, result, said = swept
    assert sorted(line[:5] for line in said[:4]) == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert sum("plain, seed 1: return" in line for line in said) == 1
    mean, low, high = mean_interval(np.array(result["runs"]["plain"]["final"]))
    assert f"mean {mean:8.2f}   95 % bootstrap interval {low:8.2f} to {high:8.2f}" in said[-1]
    iqm = iqm_interval(result["runs"]["plain"]["final"])
    line = "IQM  {:8.2f}   95 % bootstrap interval {:8.2f} to {:8.2f}   2 seeds"
    assert line.format(*iqm) in said[-1]
    assert str(folder / "x.json") in said[-1]


def test_a_second_call_repeats_nothing(swept: Swept) -> None:
    folder, result, _ = swept
    files = [p for p in (folder / "runs").glob("*/*/**/*") if p.is_file()]
    before = {path: path.stat().st_mtime_ns for path in files}
    said: list[str] = []
    again = small_sweep(folder, said.append)
    assert said[0] == "4 of 4 runs are finished already." and len(said) == 2
    assert {path: path.stat().st_mtime_ns for path in files} == before
    assert again["runs"] == result["runs"] and again["seconds"] >= result["seconds"]


def test_a_result_names_the_day_and_the_versions_of_its_runs(swept: Swept, tmp_path: Path) -> None:
    shutil.copytree(swept[0], tmp_path / "a")
    (tmp_path / "a" / "x.json").unlink()
    notes = sorted((tmp_path / "a" / "runs").glob("*/*/sweep.json"))
    assert len(notes) == 4
    for day, path in enumerate(notes, start=1):
        note = json.loads(path.read_text())
        note["created"] = f"1999-12-0{day}"
        note["versions"]["torch"] = "0.1" if day < 4 else "0.2"
        path.write_text(json.dumps(note))
    result = small_sweep(tmp_path / "a", lambda _: None)
    assert result["created"] == "1999-12-04"
    assert result["versions"] == {**swept[1]["versions"], "torch": "0.1, 0.2"}


def test_a_variant_that_is_added_never_moves_another() -> None:
    names = ["a b", "lr=0.1", "...", "x.json"]
    before = folder_names(names)
    assert before == ["a-b", "lr=0.1", "variant", "x.json_"]
    assert folder_names([*names, "a-b", "a/b", "a-b_2"])[:4] == before
    assert folder_names([*names, "a-b", "a/b", "a-b_2"])[4:] == ["a-b_2", "a-b_3", "a-b_2_2"]


def test_a_run_of_another_sweep_is_no_result_of_this_one(tmp_path: Path) -> None:
    wanted, other = (Item("dqn", "dqn", 0, str(tmp_path / "r"), {**TINY, "lr": x}) for x in (1, 2))
    report = Report([wanted], lambda _: None)  # nothing is there yet
    run_item(other)  # and now somebody else has been there
    report.end(wanted, "")
    assert report.failed == [wanted]
    for blind in (lambda: run_item(wanted), lambda: collect([wanted], "", 0.0)):
        with pytest.raises(ValueError, match=r"holds a run with lr 2(\.0)?, not 1(\.0)?: choose"):
            blind()


DAMAGE: list[tuple[str, bytes | None]] = [
    ("sweep.json", b"[1]"),
    ("sweep.json", b'{"finished": true}'),
    ("sweep.json", b'{"finished": true, "seconds": "x"}'),
    ("config.yaml", None),
    ("metrics.jsonl", None),
    ("metrics.jsonl", b""),
    ("metrics.jsonl", b'{"global_step": 100, "eval_return_m'),
    ("metrics.jsonl", b"garbage\n"),
    ("metrics.jsonl", b"\xff\xff\n"),
]


@pytest.mark.parametrize(("name", "content"), DAMAGE)
def test_damage_to_a_finished_run_is_never_a_result(
    name: str, content: bytes | None, swept: Swept, tmp_path: Path
) -> None:
    shutil.copytree(swept[0] / "runs" / "plain" / "seed_0", tmp_path / "r")
    path = tmp_path / "r" / name
    path.unlink() if content is None else path.write_bytes(content)
    if name == "metrics.jsonl":
        with pytest.raises(ValueError, match=r"metrics.jsonl is damaged: delete .* to do it again"):
            read_outcome(tmp_path / "r")
    else:
        assert read_outcome(tmp_path / "r") is None  # it is done again


def test_seeds_with_other_steps_are_not_put_together(swept: Swept, tmp_path: Path) -> None:
    shutil.copytree(swept[0], tmp_path / "a")
    run = tmp_path / "a" / "runs" / "plain" / "seed_1" / "metrics.jsonl"
    lines = run.read_text().splitlines(keepends=True)
    evaluated = [line for line in lines if "eval_return_mean" in line]
    run.write_text("".join(line for line in lines if line != evaluated[0]))
    with pytest.raises(ValueError, match="was evaluated at other steps than other seeds"):
        small_sweep(tmp_path / "a", lambda _: None)


def test_files_where_a_sweep_is_started_shadow_no_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("queue", "rlbook"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('mine')")
    sweep("dqn", TINY, seeds=1, directory="runs", jobs=1, say=lambda _: None)


def start(target: Callable[..., None], folder: Path, *words: str) -> BaseProcess:
    """Start a sweep of long runs in a process of its own."""
    settings = {**TINY, "total_steps": 100_000}
    (folder / "base.yaml").write_text(json.dumps({"algo": "dqn", **settings}))
    line = ["sweep", "--config", "base.yaml", *words]
    process = CHILDREN.Process(target=target, args=(line, folder))
    process.start()
    return process


def checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoints of a sweep."""
    return sorted(folder.glob("runs/*/*/checkpoints/*.pt"))


def workers(folder: Path, parent: int) -> list[int]:
    """Return the worker processes that still run for a sweep in a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(entry / "cwd") == str(folder) and int(entry.name) != parent:
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize(
    ("number", "code", "target"),
    [
        (signal.SIGINT, 130, run_warm),
        (signal.SIGTERM, 143, run_warm),
        (signal.SIGKILL, -9, run_rlbook),  # nobody but the kernel closes the pipes
    ],
)
def test_however_it_ends_its_workers_checkpoint_and_end(
    tmp_path: Path, number: signal.Signals, code: int, target: Callable[..., None]
) -> None:
    process = start(target, tmp_path, "--seeds", "3", "--jobs", "1", "--run-dir", "runs")
    assert process.pid is not None
    while not checkpoints(tmp_path):
        assert process.is_alive(), (tmp_path / "err").read_text()
        time.sleep(0.02)
    assert len(workers(tmp_path, process.pid)) == 1
    os.kill(process.pid, number)
    process.join(90)
    assert process.exitcode == code and (tmp_path / "out").read_text() == ""
    if code > 0:
        err = (tmp_path / "err").read_text()
        assert err == "Stopped with 3 of 3 runs unfinished: the same command goes on.\n"
        assert workers(tmp_path, process.pid) == []  # they ended before their parent did
    while workers(tmp_path, process.pid):
        time.sleep(0.02)
    (run_dir,) = {path.parents[1] for path in checkpoints(tmp_path)}
    assert read_outcome(run_dir) is None
    assert json.loads((run_dir / "sweep.json").read_text())["finished"] is False


def test_a_stopped_run_ends_with_the_numbers_of_one_left_alone(tmp_path: Path) -> None:
    settings = {**TINY, "total_steps": 2_000, "log_every": 100}
    cut, whole = (
        make_plan("dqn", settings, {name: {}}, [0], tmp_path)[0] for name in ("cut", "whole")
    )
    process = WarmWorker(cut)
    while process.poll() is None and not list(Path(cut.run_dir).glob("checkpoints/*.pt")):
        time.sleep(0.005)
    process.stdin.close()  # as when the sweep ends
    process.wait(60)
    assert process.returncode in (0, 143)
    assert run_item(cut).returns == run_item(whole).returns
    one, two = (Path(item.run_dir, "metrics.jsonl").read_bytes() for item in (cut, whole))
    assert one == two


def test_a_crash_is_reported_and_stops_nobody(tmp_path: Path) -> None:
    said: list[str] = []
    variants = {"bad": {"lr": 1e30}, "good": {}}
    message = r"1 of 2 runs failed \(bad seed 0\): nothing is written"
    with warm_workers(), pytest.raises(RunFailed, match=message):
        sweep("dqn", TINY, variants=variants, seeds=1, directory=tmp_path, say=said.append)
    assert sum("bad, seed 0: failed: The run stopped at step" in line for line in said) == 1
    assert sum("good, seed 0: return" in line for line in said) == 1
    assert not (tmp_path / "result.json").exists()


def test_a_killed_worker_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = make_plan("dqn", {**TINY, "total_steps": 100_000}, {"dqn": {}}, [0], Path("runs"))
    said: list[str] = []

    def kill() -> None:
        while not checkpoints(tmp_path):
            time.sleep(0.02)
        os.kill(workers(tmp_path, os.getpid())[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    failed = run_plan(plan, jobs=1, say=said.append)
    killer.join()
    assert failed == plan
    assert said == ["[1/1] dqn, seed 0: failed: its process was ended by SIGKILL"]


# Variants and plans ---------------------------------------------------------------------------


def test_a_grid_combines_all_values() -> None:
    assert grid(["lr=1e-3,3e-4", "hidden=[8],[8,8]"]) == {
        "lr=1e-3, hidden=[8]": {"lr": "1e-3", "hidden": [8]},
        "lr=1e-3, hidden=[8, 8]": {"lr": "1e-3", "hidden": [8, 8]},
        "lr=3e-4, hidden=[8]": {"lr": "3e-4", "hidden": [8]},
        "lr=3e-4, hidden=[8, 8]": {"lr": "3e-4", "hidden": [8, 8]},
    }
    assert list(grid(["n-step=1,2"]).values()) == [{"n_step": 1}, {"n_step": 2}]
    for repeated in (["lr=1,2", "lr=3"], ["lr=1,2,1"], ["n-step=1", "n_step=2"]):
        with pytest.raises(ValueError, match="repeats a setting or a value: name each once"):
            grid(repeated)


@pytest.mark.parametrize(("own", "other"), [({"gamma": 0.5}, "settings"), ({}, "algorithms")])
def test_a_result_of_another_sweep_is_not_replaced(
    swept: Swept, tmp_path: Path, own: dict[str, Any], other: str
) -> None:
    before = (swept[0] / "x.json").read_bytes()
    fast = {"lr": 0.01, "hidden": [16]} | ({} if own else {"algo": "drqn"})
    with pytest.raises(ValueError, match=rf"x\.json holds a sweep with other {other}: choose"):
        sweep(
            "dqn",
            {**TINY, "env_id": "CartPole-v1", **own},
            variants={"plain": {}, "fast & wide": fast},
            seeds=2,
            directory=tmp_path,
            out=swept[0] / "x.json",
        )
    assert (swept[0] / "x.json").read_bytes() == before


def test_the_order_of_variants_makes_no_other_sweep(swept: Swept, tmp_path: Path) -> None:
    settings = {"plain": {}, "fast & wide": {"lr": 0.01, "hidden": [16]}}
    plan = make_plan("dqn", TINY, dict(reversed(settings.items())), [0, 1], tmp_path)
    check_out(swept[0] / "x.json", plan)
    old = json.loads((swept[0] / "x.json").read_text())
    for run in old["runs"].values():
        del run["algo"]  # as results were before an algorithm could be a variant
    (tmp_path / "old.json").write_text(json.dumps(old))
    check_out(tmp_path / "old.json", plan)


def test_a_file_that_could_not_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(path: Path, text: str) -> None:
        path.write_bytes(text.encode()[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "a.json", "text")
    assert not list(tmp_path.iterdir())


def test_brackets_in_names_and_commands_stay_as_they_are(tmp_path: Path) -> None:
    result = {"command": "rlbook sweep '[1., 8.]' \"[a\\", "runs": {"no [x": {"steps": [1, 2]}}}
    write_result(tmp_path / "x.json", result)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == result and '"steps": [1, 2]' in text


def test_no_process_is_asked_for_too_few(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`jobs` must be a whole number above 0, not -1"):
        sweep("dqn", TINY, jobs=-1, directory=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_flag_counts_more_than_the_seeds_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlbook.sweep.run_plan", run_here)
    Path("a.yaml").write_text(json.dumps({"algo": "dqn", **TINY, "total_steps": 100, "seeds": 10}))
    assert main(["sweep", "--config", "a.yaml", "--seeds", "1", "--out", "a.json"]) == 0
    assert load_result("a.json")["seeds"] == [0]


def test_seconds_are_those_of_one_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlbook.sweep.run_plan", lambda plan, jobs, say: run_here(plan, 1, say))
    quiet: dict[str, Any] = {"directory": tmp_path, "say": lambda line: None}
    settings = {**TINY, "total_steps": 100}
    one = sweep("dqn", settings, seeds=1, **quiet)
    again = sweep("dqn", settings, seeds=1, **quiet)
    assert again["seconds"] > one["seconds"]  # the second call adds to the first
    other = sweep("dqn", settings, seeds=1, variants={"wide": {"hidden": [16]}}, **quiet)
    assert other["seconds"] < again["seconds"] + other["runs"]["wide"]["seconds"][0]


def test_every_run_has_a_directory_of_its_own() -> None:
    plan = make_plan("dqn", {}, {"a/b": {}, "a b": {}, "../c": {}}, [0, 1], Path("x"))
    paths = [Path(item.run_dir) for item in plan]
    assert len(set(paths)) == 6
    assert all(path.parts[0] == "x" and len(path.parts) == 3 for path in paths)
    assert [item.seed for item in plan] == [0, 0, 0, 1, 1, 1]  # all variants advance together


def test_a_variant_may_be_another_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlbook.sweep.run_plan", run_here)
    monkeypatch.chdir(tmp_path)
    small = {"env_id": "CartPole-v1", "eval_episodes": 1, "total_steps": 100, "eval_every": 100}
    Path("a.yaml").write_text(json.dumps({"algo": "dqn", **small}))
    words = ["sweep", "--config", "a.yaml", "--seeds", "1", "--out", "a.json", "--vary"]
    assert main([*words, "algo=dqn,drqn"]) == 0
    result = load_result("a.json")
    runs = result["runs"]
    assert [(name, run["algo"]) for name, run in runs.items()] == [
        ("algo=dqn", "dqn"),
        ("algo=drqn", "drqn"),
    ]
    assert result["algo"] == "dqn, drqn" and "NaN" not in Path("a.json").read_text()
    assert all(run["iqm"][1:] == [None, None] for run in runs.values())  # one seed has no interval
    assert "algo: drqn" in next(Path("runs").glob("*/algo=drqn/seed_0/config.yaml")).read_text()
    capsys.readouterr()
    for wrong, says in (
        ("algo=dqn,drqm", "There is no algorithm 'drqm'. Did you mean 'drqn'"),
        ("algo=drqn,dqn chunk_length=4", "DQN has no setting 'chunk_length'."),
        ("algo=r2d2,drqn", "a.json holds a sweep with other variants: choose another --out."),
    ):
        assert main([*words, *wrong.split()]) == 2
        err = capsys.readouterr().err
        assert says in err and err.count("\n") == 1


def test_settings_that_no_file_can_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="A sweep needs settings that a file can hold"):
        sweep("dqn", {**TINY, "env_kwargs": {"f": object()}}, directory=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_keys_that_a_file_would_turn_into_texts_are_refused(tmp_path: Path) -> None:
    settings = {**TINY, "env_kwargs": {"table": [{1: "a"}]}}
    with pytest.raises(ValueError, match="mappings have texts as keys"):
        sweep("dqn", settings, seeds=1, directory=tmp_path / "r")


def test_no_variant_has_the_name_of_a_file_of_the_sweep(tmp_path: Path) -> None:
    plan = make_plan("dqn", TINY, {"result.json": {}, "sweep.json": {"lr": 1}}, [0], tmp_path)
    assert {Path(item.run_dir).parent.name for item in plan} == {"result.json_", "sweep.json_"}


def test_a_sweep_with_tuples_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlbook.sweep.run_plan", run_here)
    settings = {**TINY, "total_steps": 100, "hidden": (8, 8)}
    results = [
        sweep("dqn", settings, seeds=1, directory=tmp_path, say=lambda line: None) for _ in range(2)
    ]
    assert results[0]["runs"] == results[1]["runs"]


@pytest.mark.parametrize("seeds", [0, -1, True, 2.5, [], [1, 1], [-1], ["a"], "3", None])
def test_bad_seeds_are_refused(seeds: Any) -> None:
    for resolve in (check_seeds, lambda seeds: resolve_seeds(None, seeds)):
        with pytest.raises(ValueError, match="`seeds` must be a number above 0, or a list"):
            resolve(seeds)


def test_seeds_count_from_the_first_or_are_listed() -> None:
    assert resolve_seeds(3, 2) == [3, 4] and resolve_seeds(None, 2) == resolve_seeds(0, 2) == [0, 1]
    assert resolve_seeds(None, [4, 2]) == [4, 2]
    with pytest.raises(ValueError, match="`seed` is the first of several, but `seeds` lists them"):
        resolve_seeds(0, [4, 2])
    with pytest.raises(ValueError, match=r"A sweep of 10,001 seeds would never end"):
        resolve_seeds(None, 10_001)
    with pytest.raises(ValueError, match="Setting 'seed' must be at least 0, not -1"):
        resolve_seeds(-1, 2)


def test_one_seed_has_no_interval() -> None:
    assert "one seed" in summary({"runs": {"a": {"final": [1.0]}}})


def test_the_interquartile_mean_leaves_out_a_quarter_on_each_side() -> None:
    scores = [100.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -100.0]
    middle, low, high = iqm_interval(scores)
    assert middle == 3.5 and low < middle < high
    assert iqm_interval(scores) == (middle, low, high)  # the bootstrap draws from its own seed
    assert iqm_interval([7.0, 7.0, 7.0]) == (7.0, 7.0, 7.0)
    assert np.isnan(iqm_interval([7.0])[1:]).all()


def test_the_bootstrap_interval_narrows_with_the_seeds() -> None:
    rng = np.random.default_rng(0)
    widths = [np.diff(iqm_interval(rng.normal(size=n).tolist())[1:])[0] for n in (10, 1_000)]
    assert 0 < widths[1] < widths[0] / 4


# The bar ----------------------------------------------------------------------------------------


def test_a_line_that_is_half_written_moves_no_bar(tmp_path: Path) -> None:
    assert last_step(tmp_path) == 0
    (tmp_path / "metrics.jsonl").write_text('{"global_step": 10}\n{"global_step": 20}\n')
    assert last_step(tmp_path) == 20
    (tmp_path / "metrics.jsonl").write_text('{"global_step": 10}\n{"globa')
    assert last_step(tmp_path) == 10
    (tmp_path / "metrics.jsonl").write_text('{"globa')
    assert last_step(tmp_path) == 0


def test_a_terminal_shows_one_bar_and_a_line_per_run(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(json.dumps({"algo": "dqn", **TINY}))
    words = ["sweep", "--config", "base.yaml", "--seeds", "2", "--run-dir", "runs"]
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    process = CHILDREN.Process(target=run_warm, args=(words, tmp_path, os.ttyname(slave)))
    process.start()
    shown = b""

    def read() -> None:
        nonlocal shown
        with contextlib.suppress(OSError):  # the other end is closed
            while piece := os.read(master, 4096):
                shown += piece

    reader = threading.Thread(target=read)
    reader.start()
    process.join()
    os.close(slave)
    reader.join()
    os.close(master)
    assert process.exitcode == 0
    text = shown.decode()
    assert text.count("[1/2] dqn, seed") == text.count("[2/2] dqn, seed") == 1
    bars = [line for line in text.replace("\n", "\r").split("\r") if line.startswith("sweep:")]
    assert "0/400" in bars[0] and "100%" in bars[-1] and "400/400" in bars[-1]


# Mistakes -------------------------------------------------------------------------------------

MISTAKES: list[tuple[str, str]] = [
    ("--seeds 0", "--seeds must be a whole number above 0, not '0': see `rlbook sweep --help`."),
    ("--seeds two", "--seeds must be a whole number above 0, not 'two'"),
    ("--jobs 0", "--jobs must be a whole number above 0"),
    ("--vary lrr=1,2", "DQN has no setting 'lrr'."),
    ("--vary lr=fast", "Setting 'lr' must be a number, not 'fast'."),
    ("--vary lr=", "'lr=' must be a setting and its values, as in lr=1e-3,3e-4."),
    ("--vary lr=[1", "'lr=[1' is not valid YAML"),
    ("--vary lr=1 --vary lr=2", "'lr=2' repeats a setting or a value: name each once."),
    ("--vary lr=1e-3,0.001", "'lr=1e-3' and 'lr=0.001' are the same settings: drop one."),
    ("--vary seed=1,2", "A variant cannot set 'seed': the sweep does."),
    ("--vary run_dir=a,b", "A variant cannot set 'run_dir': the sweep does."),
    ("--eval-every 0", "A sweep compares evaluations: 'eval_every' must be above 0."),
    ("--lr -1", "Setting 'lr' must be above 0, not -1.0."),
    ("--sedes 3", "`rlbook sweep` has no flag '--sedes'. Did you mean '--seeds'?"),
    ("--env-id OneStp-v0", "There is no environment 'OneStp-v0'."),
    ("--vary env_id=CartPole-v1,Pendulum-v1", "'Pendulum-v1' has vector observations"),
    ("--out x.txt", "x.txt cannot be a result: name a file NAME.json other than sweep.json."),
    ("--out sweep.json", "sweep.json cannot be a result: name a file NAME.json"),
    ("--out base.yaml/x.json", "Cannot write into base.yaml: File exists."),
    ("--run-dir base.yaml", "Cannot write into base.yaml: File exists."),
    ("--config base.yaml drqn", "The config is for 'dqn', not for 'drqn': name one of them."),
    ("--config typed.yaml", "Setting 'run_dir' must be"),
    ("--config true.yaml", "`seeds` must be a number above 0, or a list of different"),
    ("--config empty.yaml", "`variants` must hold at least one `name: {setting: value}`."),
    ("--seeds 99999999999", "A sweep of 99,999,999,999 seeds would never end"),
    ("--out notes.json", "notes.json is not a stored result: it stays as it is."),
    ("--seeds 2 --out x.json", "x.json holds a sweep with other variants: choose another --out."),
    ("--seeds 3 --out x.json", "x.json holds a sweep with other seeds: choose another --out."),
    ("--run-dir runs --lr 0.5", "holds a run with lr 0.001, not 0.5: choose another directory"),
    ("--config bad.yaml", "Variant 'a' must be settings as `name: value`."),
    ("--config none.yaml", "`variants` must hold at least one `name: {setting: value}`."),
    ("--config two.yaml --vary lr=1,2", "The config file has `variants` already"),
    ("--config two.yaml", "DQN has no setting 'lrr'."),
    ("--config seeds.yaml", "`seeds` must be a number above 0, or a list of different"),
    ("--config listed.yaml --seed 7", "`seed` is the first of several, but `seeds` lists them"),
    ("--config zero.yaml", "`seeds` must be a number above 0, or a list of different"),
    ("--config value.yaml", "Setting 'lr' must be a number, not 'fast'."),
    ("--backend slurm", "There is no backend 'slurm': use 'local' or 'ray'."),
    ("--backend ray", "needs Ray, which is not installed: `pip install 'rlbook[ray]'`."),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_each_mistake_is_one_sentence_before_anything_runs(
    line: str,
    message: str,
    swept: Swept,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    (tmp_path / "x.json").write_bytes((swept[0] / "x.json").read_bytes())
    run = tmp_path / "runs" / "dqn" / "seed_0"
    run.mkdir(parents=True)
    stored = (swept[0] / "runs" / "plain" / "seed_0" / "config.yaml").read_text()
    (run / "config.yaml").write_text(stored.replace("lr: 0.01", "lr: 0.001"))
    base = {"algo": "dqn", **TINY}
    files: dict[str, Any] = {
        "base.yaml": base,
        "bad.yaml": {**base, "variants": {"a": 1}},
        "none.yaml": {**base, "variants": {}},
        "listed.yaml": {**base, "seeds": [3, 4]},
        "two.yaml": {**base, "variants": {"a": {"lrr": 1}}},
        "seeds.yaml": {**base, "seeds": [1, 1]},
        "zero.yaml": {**base, "seeds": 0},
        "value.yaml": {**base, "variants": {"a": {"lr": "fast"}}},
        "typed.yaml": {**base, "run_dir": 5},
        "true.yaml": {**base, "seeds": True},
        "empty.yaml": {**base, "variants": None},
        "notes.json": {"my": "notes"},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    before = {str(p): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    words = line.split() if "--config" in line else ["--config", "base.yaml", *line.split()]
    assert main(["sweep", *words]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""
    assert {str(p): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def run_here(plan: list[Item], jobs: int, say: Callable[[str], None]) -> list[Item]:
    """Do the runs in this process: the plan and the files are the same."""
    for item in plan:
        run_item(item)
    return []


def test_named_variants_and_seeds_come_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    variants = {"all": None, "no double": {"double": False}}
    content = {"algo": "dqn", **TINY, "total_steps": 100, "seeds": [4], "variants": variants}
    Path("a.yaml").write_text(json.dumps(content))
    monkeypatch.setattr("rlbook.sweep.run_plan", run_here)
    assert main(["sweep", "--config", "a.yaml", "--out", "results/a.json"]) == 0
    result = load_result("results/a.json")
    assert result["command"] == "rlbook sweep --config a.yaml --out results/a.json"
    assert result["seeds"] == [4] and list(result["runs"]) == ["all", "no double"]
    assert result["runs"]["no double"]["settings"]["double"] is False
    assert Path("runs/sweep-dqn-rlbook-ObservationReward-v0/no-double/seed_4").is_dir()
    assert "The result is in results/a.json." in capsys.readouterr().out
