"""The root package: every public name of the algorithms, imported when it is asked for."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import assert_type

import pytest

import rlbook
import rlbook.dqn
import rlbook.run
from rlbook.agent import algorithms

OWNERS = {agent_class.__module__ for agent_class in algorithms().values()}
MODULES = sorted(module for module in OWNERS if module.startswith("rlbook."))


@pytest.mark.parametrize("module", ["rlbook.replay", *MODULES])
def test_every_public_name_is_in_the_root(module: str) -> None:
    chapter = importlib.import_module(module)
    missing = [name for name in chapter.__all__ if name not in rlbook.__all__]
    assert not missing, f"add to rlbook/__init__.pyi: {missing}"
    for name in chapter.__all__:
        assert getattr(rlbook, name) is getattr(chapter, name), f"{name} is that of another chapter"
        assert name in dir(rlbook)


def test_each_algorithm_has_its_class_settings_and_trainer() -> None:
    for name, agent_class in rlbook.ALGORITHMS.items():
        if not agent_class.__module__.startswith("rlbook."):
            continue  # one that another test has defined
        assert getattr(rlbook, agent_class.__name__) is agent_class
        assert getattr(rlbook, agent_class.config_class.__name__) is agent_class.config_class
        assert callable(getattr(rlbook, f"train_{name}"))


def test_the_example_of_the_readme_runs_when_it_learns_for_less_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code.replace("20_000", "20"), {})
    assert Path("agent.pt").exists()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="DQM"):
        rlbook.DQM  # type: ignore[attr-defined]  # noqa: B018


def test_nothing_heavy_is_imported_before_it_is_asked_for() -> None:
    code = "import sys, rlbook; assert 'torch' not in sys.modules; rlbook.DQN"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_type_checker_knows_the_names() -> None:  # mypy reads this file in `make types`
    agent = assert_type(rlbook.DQN.from_config("cartpole"), rlbook.dqn.DQN)
    config = rlbook.DQNConfig(total_steps=8, eval_every=0)
    result = assert_type(rlbook.train_dqn(config, progress=False), rlbook.run.RunResult)
    assert type(agent) is type(result.agent)
