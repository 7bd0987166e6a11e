"""The examples run as a stranger would run them, only shorter."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_dqn_cartpole_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(EXAMPLES / "dqn_cartpole.py"))["main"]
    score = main(steps=1_500)
    said = capsys.readouterr().out
    assert f"after {score:.1f} (95 % interval" in said and "push to the" in said
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind


@pytest.mark.parametrize("name", ["drqn_cartpole", "r2d2_cartpole", "recurrent_ppo_cartpole"])
def test_cartpole_without_velocities_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    score = main(steps=1_200)
    assert f"after 1,200 steps: {score:.1f} (95 % interval" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind


@pytest.mark.parametrize("name", ["a2c_cartpole", "ppo_cartpole", "trpo_cartpole"])
def test_policies_for_cartpole_run(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    score = main(total_steps=1_100)
    said = capsys.readouterr().out
    assert f"{score:.0f} ± " in said and "falls to the right: push left" in said
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind


@pytest.mark.parametrize("name", ["sac_pendulum", "redq_pendulum"])
def test_pendulum_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    score = main(total_steps=270)
    assert f"{score:.0f} ± " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind
