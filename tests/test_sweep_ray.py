"""Sweeps on Ray: the same numbers as without it, whatever happens to a worker."""

import importlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import TINY, warm_workers

from rlbook.cluster import as_task, connect, import_ray, knock, run_on_ray, why_it_ended
from rlbook.progress import Interrupted
from rlbook.sweep import Item, make_plan, read_outcome, run_item, sweep
from rlbook.tune import tune

pytest.importorskip("ray", reason="Ray is not installed: pip install 'rlbook[ray]'")


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A Ray of two cores, without its dashboard."""
    found = import_ray()
    with pytest.MonkeyPatch.context() as patch:
        # 15 otherwise: on a busy machine never
        patch.setenv("RAY_worker_niceness", "0")
        found.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield found
        found.shutdown()


def holder(run_dir: str) -> int | None:
    """Return the process that holds the lock of a run."""
    lock = str(Path(run_dir, "lock").absolute())
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == lock:
                return int(link.parts[2])
        except OSError:
            continue
    return None


def when_checkpointed(item: Item, number: signal.Signals, whom: str) -> threading.Thread:
    """Send a signal to the worker of a run, or to this process, after its first checkpoint."""

    def send() -> None:
        while not list(Path(item.run_dir).glob("checkpoints/*.pt")):
            time.sleep(0.02)
        pid = holder(item.run_dir) if whom == "worker" else os.getpid()
        assert pid is not None
        os.kill(pid, number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_both_backends_give_the_same_numbers_bit_for_bit(ray: Any, tmp_path: Path) -> None:
    variants: dict[str, dict[str, Any]] = {"plain": {}, "wide": {"hidden": [16]}}
    said: list[str] = []
    with warm_workers():
        local, remote = (
            sweep(
                "dqn",
                TINY,
                variants=variants,
                seeds=1,
                directory=tmp_path / backend,
                backend=backend,
                say=said.append,
            )
            for backend in ("local", "ray")
        )
    for name in variants:
        for key in ("settings", "steps", "returns", "final"):
            assert local["runs"][name][key] == remote["runs"][name][key]
    files = sorted((tmp_path / "local").glob("*/*/metrics.jsonl"))
    assert len(files) == 2
    for file in files:
        twin = tmp_path / "ray" / file.relative_to(tmp_path / "local")
        assert twin.read_bytes() == file.read_bytes()
    assert [line[:5] for line in said[3:5]] == ["[1/2]", "[2/2]"]
    said.clear()
    keywords: dict[str, Any] = {"variants": variants, "seeds": 1, "backend": "ray"}
    sweep("dqn", TINY, directory=tmp_path / "ray", say=said.append, **keywords)
    assert said[0] == "2 of 2 runs are finished already." and len(said) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_whose_worker_is_killed_goes_on_from_its_checkpoint(
    number: signal.Signals, ray: Any, tmp_path: Path
) -> None:
    settings = {**TINY, "total_steps": 3_000, "log_every": 1_000}
    cut, whole = (make_plan("dqn", settings, {n: {}}, [0], tmp_path)[0] for n in ("cut", "whole"))
    killer = when_checkpointed(cut, number, "worker")
    said: list[str] = []
    assert run_on_ray([cut], say=said.append) == []
    killer.join()
    assert said[0].startswith("[1/1] cut, seed 0: return") and len(said) == 1
    # The seconds of a killed process are lost: those of the note are of the second one alone.
    assert json.loads(Path(cut.run_dir, "sweep.json").read_text())["finished"] is True
    assert run_item(whole).returns == run_item(cut).returns
    one, two = (Path(item.run_dir, "metrics.jsonl").read_bytes() for item in (cut, whole))
    assert one == two


def test_a_run_that_raises_is_reported_and_not_repeated(ray: Any, tmp_path: Path) -> None:
    plan = make_plan("dqn", TINY, {"bad": {"lr": 1e30}}, [0], tmp_path)
    said: list[str] = []
    assert run_on_ray(plan, say=said.append) == plan
    assert len(said) == 1 and "bad, seed 0: failed: " in said[0]
    assert "The run stopped at step" in said[0] and "Traceback" not in said[0]
    log = Path(plan[0].run_dir, "log.txt").read_text()
    assert log.startswith("Traceback") and "The run stopped at step" in log


def test_ctrl_c_lets_the_runs_write_their_checkpoints(ray: Any, tmp_path: Path) -> None:
    (item,) = make_plan("dqn", {**TINY, "total_steps": 1_000_000}, {"long": {}}, [0], tmp_path)
    sender = when_checkpointed(item, signal.SIGINT, "me")
    with pytest.raises(Interrupted, match="Stopped with 1 of 1 runs unfinished"):
        run_on_ray([item], say=print)
    sender.join()
    assert holder(item.run_dir) is None and read_outcome(item.run_dir) is None
    assert json.loads(Path(item.run_dir, "sweep.json").read_text())["finished"] is False


def test_a_disk_that_is_not_shared_is_noticed(ray: Any, tmp_path: Path) -> None:
    item = Item("dqn", "dqn", 0, str(tmp_path / "elsewhere"), TINY)
    why = why_it_ended(ray, ray.put("an outcome"), item, patience=0.3)
    assert why.endswith("give --run-dir a directory on a disk that all machines share")


def test_what_a_network_disk_shows_late_is_waited_for(ray: Any, tmp_path: Path) -> None:
    (item,) = make_plan("dqn", TINY, {"late": {}}, [0], tmp_path)
    run_item(item)
    hidden = Path(item.run_dir).rename(tmp_path / "hidden")
    threading.Timer(0.5, lambda: hidden.rename(item.run_dir)).start()
    assert why_it_ended(ray, ray.put("an outcome"), item) == ""


def test_a_damaged_run_is_one_sentence_and_stops_no_other(ray: Any, tmp_path: Path) -> None:
    (item,) = make_plan("dqn", TINY, {"damaged": {}}, [0], tmp_path)
    run_item(item)
    Path(item.run_dir, "metrics.jsonl").write_text("")
    assert "metrics.jsonl is damaged" in why_it_ended(ray, ray.put("an outcome"), item)


def test_a_cluster_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**keywords: Any) -> None:
        raise ConnectionError("a long story")

    monkeypatch.setenv("RAY_ADDRESS", "auto")  # a word that only Ray can read
    nowhere = SimpleNamespace(is_initialized=lambda: False, init=init)
    with pytest.raises(ValueError, match="There is no Ray cluster at auto: start one"):
        connect(nowhere)


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "[::1]:{}", "[::1]:9{}"])
def test_an_address_without_an_answer_is_noticed_at_once(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        knock(f"127.0.0.1:{port}")  # somebody is there
    monkeypatch.setenv("RAY_ADDRESS", form.format(port))  # and now nobody is
    started = list[dict[str, Any]]()
    here = SimpleNamespace(is_initialized=lambda: False, init=lambda **k: started.append(k))
    with pytest.raises(ValueError, match=r"There is no Ray cluster at .*: start one"):
        connect(here)
    assert not started


@pytest.mark.parametrize("alive", [True, False])
def test_a_cluster_that_died_and_left_its_address_is_not_waited_for(
    alive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("TEMP", str(tmp_path / "other"))  # Ray does not look there
    started = list[dict[str, Any]]()
    here = SimpleNamespace(is_initialized=lambda: False, init=lambda **k: started.append(k))
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "ray").mkdir()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        if not alive:
            server.close()
        connect(here)
    assert [keywords["address"] for keywords in started] == [None if alive else "local"]


def test_a_task_names_its_directory_in_full() -> None:
    task = as_task(Item("dqn", "dqn", 0, "runs/a/seed_0", TINY))
    assert task["run_dir"] == str(Path.cwd() / "runs/a/seed_0")


def test_ray_does_the_runs_of_a_search_and_gives_the_same_scores(tmp_path: Path, ray: Any) -> None:
    settings = {**TINY, "hidden": [8]}
    space = {"lr": {"low": 1e-4, "high": 1e-2, "log": True}}
    found = []
    for backend in ("local", "ray"):
        place: dict[str, Any] = {"directory": tmp_path / backend, "backend": backend, "jobs": 1}
        with warm_workers():
            result = tune("dqn", settings, space=space, trials=2, say=lambda line: None, **place)
        found.append([(t["state"], t["settings"], t["score"]) for t in result["trials"]])
    assert found[0] == found[1] and found[0][0][0] == "complete"


def test_ray_sweeps_an_algorithm_of_ones_own_in_an_environment_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray: Any
) -> None:
    (tmp_path / "ray_things.py").write_text(
        "from rlbook.dqn import DQN\nfrom rlbook.envs import ObservationReward\n\n\n"
        "def make_mine():\n    return ObservationReward()\n\n\n"
        "class Mine(DQN):\n    name = 'mine'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("ray_things")
    place: dict[str, Any] = {"seeds": 1, "directory": tmp_path / "s", "backend": "ray"}
    settings = {**TINY, "env_id": mine.make_mine}
    found = sweep(mine.Mine, settings, say=lambda line: None, **place)
    assert list(found["runs"]) == ["ray_things:mine"] and found["env_id"] == "ray_things:make_mine"
