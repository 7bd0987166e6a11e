"""An exported policy is the agent's own, for every algorithm, and says so when it could not be."""

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from test_law import ALGORITHMS, SMALL, learned

from rlbook.agent import Agent
from rlbook.cli import main
from rlbook.dqn import DQN
from rlbook.export import export_onnx, numpy_values
from rlbook.pixels import PointReach
from rlbook.sac import SAC

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'rlbook[onnx]'")


class Shifted(gym.Env[np.ndarray, Any]):
    """Actions that are numbered from 5, or between bounds that differ; observations in 64 bits."""

    def __init__(self, continuous: bool = False) -> None:
        self.observation_space = gym.spaces.Box(-2.0, 2.0, (3,), np.float64)
        bounds = np.array([-3.0, 1.0], np.float32), np.array([-1.0, 9.0], np.float32)
        discrete = gym.spaces.Discrete(4, start=5)
        self.action_space = gym.spaces.Box(*bounds) if continuous else discrete

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return self.observation_space.sample(), float(np.sum(action)), False, True, {}


class ChannelsLast(PointReach):
    """Pictures as (height, width, channels)."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = gym.spaces.Box(0, 255, (24, 24, 3), np.uint8)

    def observation(self) -> np.ndarray:
        return super().observation().transpose(1, 2, 0)


gym.register("rlbook-tests/ChannelsLast-v0", f"{__name__}:ChannelsLast", max_episode_steps=20)
gym.register("rlbook-tests/Shifted-v0", f"{__name__}:Shifted")
SHIFTED: dict[str, Any] = {"env_id": "rlbook-tests/Shifted-v0"}
BETWEEN_BOUNDS = {**SHIFTED, "env_kwargs": {"continuous": True}}
# Each algorithm once. Those whose policy another one has, too, are tried where more is to be done.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ALGORITHMS},
    "r2d2": ("r2d2", SHIFTED),
    "ppo": ("ppo", {**BETWEEN_BOUNDS, "initial_std": 9.0}),
    "trpo": ("trpo", {"env_id": "CartPole-v1"}),
    "redq": ("redq", BETWEEN_BOUNDS),
    "drqv2": ("drqv2", {"env_id": "rlbook-tests/ChannelsLast-v0"}),
    "scaled": ("dqn", {"observation_scale": (0.5, 2.0, 1.0, 3.0)}),
    "no memory": ("drqn", {"carry_state": False}),
    "normalised": ("dqn", {"normalize_observations": True}),
    "one-hot": ("dqn", {"env_id": "FrozenLake-v1"}),
}


def sequences(agent: Agent, steps: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return observations (steps, batch, ...) and where episodes start."""
    rng, space = np.random.default_rng(0), agent.preprocessing.env_space
    space.seed(0)
    obs = np.stack([[space.sample() for _ in range(batch)] for _ in range(steps)])
    start = rng.random((steps, batch)) < 0.1
    start[0] = True
    return obs.astype(space.dtype), start


@pytest.mark.parametrize("case", list(CASES))
def test_a_thousand_observations_get_the_actions_of_predict(case: str, tmp_path: Path) -> None:
    name, changes = CASES[case]
    agent = learned(ALGORITHMS[name](**{**SMALL[name], **changes}))
    export_onnx(agent, tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    names = [each.name for each in session.get_inputs()]
    steps, batch = (50, 20) if "episode_start" in names else (1, 1000)
    obs, start = sequences(agent, steps, batch)
    state, fed = None, {}
    for each in session.get_inputs():
        if each.name.startswith("state"):
            fed[each.name] = np.zeros((batch, *each.shape[1:]), np.float32)
    for t in range(steps):
        expected, state = agent.predict(obs[t], state, start[t])
        given = {"obs": obs[t], "episode_start": start[t], **fed}
        actions, *rest = session.run(None, {name: given[name] for name in names})
        assert actions.dtype == expected.dtype and actions.shape == expected.shape
        if actions.dtype.kind == "i":
            assert np.array_equal(actions, expected)
        else:
            np.testing.assert_allclose(actions, expected, rtol=1e-4, atol=1e-5)
            low, high = agent.action_space.low, agent.action_space.high  # type: ignore[attr-defined]
            assert (actions >= low).all() and (actions <= high).all()
        assert len(rest) == len(state or ())
        for i, (part, wanted) in enumerate(zip(rest, state or (), strict=True)):
            np.testing.assert_allclose(part, wanted.numpy(), rtol=1e-3, atol=1e-5)
            fed[f"state_{i}"] = part


def test_the_batch_may_have_any_size(tmp_path: Path) -> None:
    agent = DQN(**SMALL["dqn"])
    export_onnx(agent, tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    assert session.get_inputs()[0].shape == ["batch", 4]
    for size in (1, 2, 17):
        (actions,) = session.run(None, {"obs": np.zeros((size, 4), np.float32)})
        assert actions.shape == (size,)


def test_metadata_says_what_the_file_holds(tmp_path: Path) -> None:
    agent = learned(ALGORITHMS["drqn"](**SMALL["drqn"]))
    told = export_onnx(agent, tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    found = session.get_modelmeta().custom_metadata_map
    assert told.items() <= found.items()
    assert found["algo"] == "drqn" and found["env_id"] == "rlbook/MaskedCartPole-v0"
    assert found["global_step"] == "40"
    assert list(json.loads(found["inputs"])) == [each.name for each in session.get_inputs()]
    assert list(json.loads(found["outputs"])) == [each.name for each in session.get_outputs()]
    assert json.loads(found["inputs"])["obs"] == "float32 (batch, 2)"


def test_exporting_changes_nothing_in_the_agent_and_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    agent = learned(SAC(**SMALL["sac"]))
    found = list(numpy_values(agent, {id(agent)}))
    assert found
    export_onnx(agent, tmp_path / "policy.onnx")
    assert all(getattr(owner, name) is value for owner, name, value in found)
    assert tuple(capfd.readouterr()) == ("", "")
    agent.learn(20, progress=False)


class OwnAgent(DQN):
    """An algorithm of somebody else's, in NumPy."""

    name: ClassVar[str] = "own_export"
    weights: Any = {}  # noqa: RUF012

    def build(self) -> None:
        super().build()
        self.table = np.array([1, 0])

    def act(self, obs: Any, state: Any, episode_start: Any, explore: bool) -> tuple[Any, Any]:
        return self.table[(obs @ self.weights["all"][0] > 0).astype(np.int64)], state


class Random(DQN):
    """Never acts without chance."""

    name: ClassVar[str] = "random_export"

    def act(self, obs: Any, state: Any, episode_start: Any, explore: bool) -> tuple[Any, Any]:
        return torch.randint(0, 2, (len(obs),)).numpy(), state


class Branching(DQN):
    """Looks at a value in Python."""

    name: ClassVar[str] = "branching_export"

    def act(self, obs: Any, state: Any, episode_start: Any, explore: bool) -> tuple[Any, Any]:
        return np.full(len(obs), 1 if obs[0, 0] > 0 else 0), state


def test_a_user_s_own_act_is_exported_as_it_is(tmp_path: Path) -> None:
    agent = OwnAgent(**SMALL["dqn"])
    factors = np.array([1.0, -2.0, 0.5, 3.0], np.float32)
    agent.weights = {"all": [factors]}
    export_onnx(agent, tmp_path / "policy.onnx")
    obs, _ = sequences(agent, 1, 1000)
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    (actions,) = session.run(None, {"obs": obs[0]})
    assert np.array_equal(actions, obs[0] @ factors <= 0)
    agent.weights = {"all": (factors,)}  # a tuple cannot be changed
    with pytest.raises(ValueError, match="reads an array that is not an attribute"):
        export_onnx(agent, tmp_path / "policy.onnx")


@pytest.mark.parametrize("agent_class", [Random, Branching])
def test_what_cannot_be_traced_is_one_sentence_and_leaves_no_file(
    agent_class: type[DQN], tmp_path: Path
) -> None:
    agent = agent_class(**SMALL["dqn"])
    with pytest.raises(ValueError, match=rf"^{agent.name} cannot be exported: [^\n]*\.$") as told:
        export_onnx(agent, tmp_path / "policy.onnx")
    assert list(tmp_path.iterdir()) == []
    assert agent_class is Random or "`return np.full(len(obs)" in str(told.value)


def test_mistakes_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    DQN(**SMALL["dqn"]).save("agent.pt")
    (tmp_path / "folder.onnx").mkdir()
    for words, said in [
        ("agent.pt --out policy.pt", "must end in .onnx, not be 'policy.pt'"),
        ("agent.pt --out folder.onnx", "must end in .onnx, not be 'folder.onnx'"),
        ("agent.pt --out absent/policy.onnx", "There is no directory absent"),
        ("agent.bt", "There is no checkpoint agent.bt"),
        ("folder.onnx", "not a run directory"),
    ]:
        assert main(["export", *words.split()]) == 2
        out, err = capsys.readouterr()
        assert said in err and err.count("\n") == 1 and not out
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert main(["export", "agent.pt"]) == 2
    assert "`pip install 'rlbook[onnx]'`" in capsys.readouterr().err
