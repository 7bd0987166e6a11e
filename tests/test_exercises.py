"""Each chapter has exercises, each with a solution that runs; a planted bug is found and mended."""

import importlib
import random
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exercises import ROOT, Exercise, exercises, repairs, run_exercise
from matplotlib import pyplot as plt

import rlbook.agent
import rlbook.cli
from rlbook.agent import Agent
from rlbook.run import RunResult, train

MODULES = (ROOT / "rlbook" / "chapters.txt").read_text(encoding="utf-8").split()
CHAPTERS = [*MODULES, "basics", "speed", "timeline"]  # these three export nothing
EXERCISES = {name: exercises(name) for name in CHAPTERS}
ALL = [
    pytest.param(name, exercise, id=f"{name}-{exercise.number}")
    for name, found in EXERCISES.items()
    for exercise in found
]
PLANTED = [param for param in ALL if param.values[1].planted]  # type: ignore[union-attr]
SHORT = 500  # steps of each training: what long training shows, the reader sees


@pytest.fixture
def chapter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    """A place to run solutions: the folder of the book, no screen, and no traces left behind."""
    monkeypatch.chdir(ROOT / "book")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    plt.close("all")
    assert rlbook.ALGORITHMS  # all are registered before the table is copied
    monkeypatch.setattr(rlbook.agent, "REGISTRY", dict(rlbook.agent.REGISTRY))
    monkeypatch.setattr(rlbook.cli, "COMMANDS", dict(rlbook.cli.COMMANDS))
    learn = rlbook.agent.Agent.learn

    def learn_a_little(agent: Any, steps: int, progress: bool = True, callbacks: Any = ()) -> Any:
        return learn(agent, min(steps, SHORT), progress, callbacks)

    monkeypatch.setattr(rlbook.agent.Agent, "learn", learn_a_little)
    place = types.ModuleType("chapter_under_test")
    monkeypatch.setitem(sys.modules, place.__name__, place)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return place


def train_a_little(
    agent: Agent, progress: bool = True, callbacks: Any = (), until: int | None = None
) -> RunResult:
    """Train as `train` does, but not for long."""
    end = min(until or agent.config.total_steps, agent.global_step + SHORT)
    return train(agent, progress, callbacks, end)


def fill(place: types.ModuleType, name: str) -> types.ModuleType:
    """Give a place the names of a module, if the chapter has one."""
    if name not in MODULES:
        return place
    module = importlib.import_module(f"rlbook.{name}")
    names = {key: value for key, value in vars(module).items() if not key.startswith("__")}
    vars(place).update(names)
    if names.get("train") is train:
        vars(place)["train"] = train_a_little
    return place


@pytest.mark.parametrize("name", CHAPTERS)
def test_chapter_has_four_exercises_and_a_planted_bug(name: str) -> None:
    found = EXERCISES[name]
    assert [exercise.number for exercise in found] == list(range(1, len(found) + 1))
    assert len(found) >= 4
    assert any(exercise.planted for exercise in found)
    assert not [exercise.number for exercise in found if not exercise.solution], "no code that runs"


@pytest.mark.parametrize(("name", "exercise"), ALL)
def test_solution_runs(name: str, exercise: Exercise, chapter: types.ModuleType) -> None:
    run_exercise(exercise, fill(chapter, name))


@pytest.mark.parametrize(("name", "exercise"), PLANTED)
def test_planted_bug_fails_before_its_repair_and_passes_after(
    name: str, exercise: Exercise, chapter: types.ModuleType
) -> None:
    """The solution defines the wrong piece anew; without that, one of its asserts fails."""
    assert repairs(exercise), "the solution defines nothing anew that came with the exercise"
    with pytest.raises(AssertionError):
        run_exercise(exercise, fill(chapter, name), repaired=False)
