"""The benchmarks run with today's code, and the stored numbers are those of today's script."""

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from test_results import ROOT

from rlbook.dqn import DQN
from rlbook.sac import SAC


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported; what it sets in the environment for itself is undone."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.delitem(sys.modules, "speed", raising=False)
    return importlib.import_module("speed")


def test_stored_numbers_have_the_parts_of_the_script(bench: ModuleType) -> None:
    stored = json.loads(Path(ROOT / "book" / "results" / "speed.json").read_text())
    assert set(bench.PARTS) <= set(stored)
    assert {"command", "versions", "machine", "created"} <= set(stored)
    assert "stable-baselines3" in stored["versions"] and "sbx-rl" in stored["versions"]


def test_one_contest_makes_a_new_file_and_leaves_no_cache(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[str] = []

    def contest(rounds: int) -> dict[str, Any]:
        caches.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert Path(caches[0]).is_dir() and caches[0]
        return {"what": "nothing"}

    monkeypatch.setitem(bench.ONE_BY_ONE, "peers/ppo", contest)
    monkeypatch.setattr(bench, "version", lambda name: "0")
    out = tmp_path / "new.json"
    monkeypatch.setattr(sys, "argv", ["speed.py", "--only", "peers/ppo", "--out", str(out)])
    bench.main()
    assert json.loads(out.read_text())["peers"] == {"ppo": {"what": "nothing"}}
    assert not Path(caches[0]).exists()


def test_bare_passes_are_those_of_todays_networks(bench: ModuleType) -> None:
    found = bench.measure_bare(rounds=1)
    assert set(found) == {"drqn", "r2d2", "redq", "drqv2"}
    assert all(part["works"]["bare passes"]["ms"][0] > 0 for part in found.values())


@pytest.mark.parametrize("whole", [True, False])
def test_contests_of_sac_run_with_our_agent(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """The other libraries are not installed here: a stand-in plays their part."""
    calls: list[str] = []
    theirs = SimpleNamespace(
        learn=lambda *_, **__: calls.append("learn"), train=lambda *_, **__: calls.append("train")
    )
    ours: list[SAC] = []

    def our_sac(hidden: tuple[int, ...], batch_size: int, compiled: bool) -> SAC:
        sizes: Any = {"hidden": hidden, "batch_size": batch_size, "learning_starts": 8}
        ours.append(SAC("Pendulum-v1", **sizes, eval_every=0))  # compiling would take long
        return ours[-1]

    peers = SimpleNamespace(
        LIBRARIES={bench.SB3: None}, our_sac=our_sac, their_sac=lambda *_: theirs
    )
    monkeypatch.setitem(sys.modules, "peers", peers)
    found = bench.measure_sac(rounds=1, hidden=(4,), batch=4, whole=whole)
    assert {"eager", "compiled", bench.SB3} <= set(found["works"])
    assert all(agent.updates >= 20 for agent in ours)
    assert calls.count("learn" if whole else "train") > 1


def test_the_stopwatch_sees_every_part_of_training_and_leaves_nothing_behind(
    bench: ModuleType,
) -> None:
    timing = importlib.import_module("timing")
    agent = DQN("CartPole-v1", learning_starts=64, eval_every=0, target_update_interval=1)
    methods = set(vars(agent))
    with timing.on_the_stopwatch(agent) as watch:
        agent.learn(200, progress=False)
    inside = {"forward", "loss", "backward", "optimiser", "target update", "sampling"}
    assert set(watch.spent) == inside | {"acting", "environment", "storing", "loop"}
    spent = dict(watch.spent)
    agent.learn(50, progress=False)
    left = set(vars(agent)) - methods
    assert dict(watch.spent) == spent and left <= {"directory", "training_state"}
