"""What stands between environment and network: statistics that belong to the agent."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.wrappers import NormalizeReward
from helpers import assert_same, assert_same_run
from test_law import ALGORITHMS, SMALL, learned, make

import rlbook
from rlbook.agent import Agent, Transition
from rlbook.envs import derive_seed, make_env
from rlbook.preprocess import CLIP, RunningStatistics, has_channels_last
from rlbook.run import Collector, Run, RunDirectory, resume, train

BOTH = {"normalize_observations": True, "normalize_rewards": True}
VECTORS = [name for name, agent_class in ALGORITHMS.items() if agent_class.observations == "vector"]
EACH = pytest.mark.parametrize("name", VECTORS)


def record(agent: Agent) -> tuple[list[np.ndarray], list[Transition]]:
    """Keep what an agent is given to act on, and what it is given to store."""
    acted: list[np.ndarray] = []
    stored: list[Transition] = []
    act, observe = agent.act, agent.observe

    def recording_act(obs: np.ndarray, *rest: Any, **keywords: Any) -> Any:
        acted.append(obs.copy())
        return act(obs, *rest, **keywords)

    def recording_observe(transition: Transition) -> None:
        stored.append(copy.deepcopy(transition))
        observe(transition)

    agent.act, agent.observe = recording_act, recording_observe  # type: ignore[method-assign]
    return acted, stored


@EACH
def test_the_loop_gives_the_same_standardised_arrays_to_act_and_to_observe(name: str) -> None:
    agent = make(name, **BOTH)
    acted, stored = record(agent)
    collector, raw = Collector(agent), []
    for _ in range(40):
        raw.append(collector.obs.copy())
        collector.step()
        for batch in agent.batches():
            agent.update(batch)
    collector.envs.close()
    seen = np.concatenate(raw).astype(np.float64)
    counted = agent.preprocessing.statistics["observations"]
    assert counted.count == len(seen)
    np.testing.assert_allclose(counted.mean, seen.mean(axis=0), atol=1e-9)
    np.testing.assert_allclose(counted.variance, seen.var(axis=0), atol=1e-9)
    for given, transition in zip(acted, stored, strict=True):
        assert np.array_equal(given, transition.obs)
        assert given.dtype == transition.reward.dtype == np.float32
        assert np.abs(given).max() <= CLIP
    last = np.clip((raw[-1] - seen.mean(axis=0)) / np.sqrt(seen.var(axis=0) + 1e-8), -CLIP, CLIP)
    np.testing.assert_allclose(acted[-1], last, rtol=1e-5, atol=1e-6)


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return() -> None:
    """Gymnasium's wrapper scales them in the same way, but for a variance that begins at 1."""
    agent = rlbook.SAC("Pendulum-v1", normalize_rewards=True, seed=1, gamma=0.9)
    _, stored = record(agent)
    collector = Collector(agent)
    theirs = NormalizeReward(make_env("Pendulum-v1"), gamma=0.9)
    theirs.reset(seed=derive_seed(1, "envs", 0, 0))
    raw = make_env("Pendulum-v1")
    raw.reset(seed=derive_seed(1, "envs", 0, 0))
    discounted, returns = 0.0, []
    for _ in range(150):
        collector.step()
        _, their_reward, *_ = theirs.step(stored[-1].action[0])
        _, reward, *_ = raw.step(stored[-1].action[0])
        discounted = 0.9 * discounted + float(reward)
        returns.append(discounted)
    collector.envs.close()
    expected = float(reward) / np.sqrt(np.var(returns) + 1e-8)
    assert stored[-1].reward == pytest.approx(expected, rel=1e-5)
    assert stored[-1].reward == pytest.approx(their_reward, rel=0.01)


@EACH
def test_evaluations_are_frozen_and_in_the_rewards_of_the_environment(name: str) -> None:
    agent = learned(make(name, **BOTH))
    before = copy.deepcopy(agent.state_dict())
    evaluation = agent.evaluate(episodes=2)
    assert_same(agent.state_dict(), before)
    longest = evaluation.lengths.max()
    if agent.config.env_id == "Pendulum-v1":
        assert evaluation.mean < -CLIP * 10
    else:
        assert np.array_equal(evaluation.returns, evaluation.lengths) and longest > 1


@EACH
def test_predict_applies_the_statistics(name: str) -> None:
    agent = learned(make(name, **BOTH))
    env = make_env(agent.config.env_id)
    obs, _ = env.reset(seed=1)
    start = np.ones(1, dtype=bool)
    expected, _ = agent.act(agent.preprocessing.prepare(obs[None]), None, start, explore=False)
    assert np.array_equal(agent.predict(obs)[0], expected[0])
    assert not np.allclose(agent.preprocessing.prepare(obs[None])[0], obs)


@EACH
def test_statistics_are_saved_copied_and_pickled_with_the_agent(name: str, tmp_path: Path) -> None:
    agent = learned(make(name, **BOTH))
    agent.save(tmp_path / "agent.pt")
    loaded = rlbook.load(tmp_path / "agent.pt")
    for twin in (loaded, copy.deepcopy(agent), pickle.loads(pickle.dumps(agent))):
        assert_same(twin.preprocessing.state_dict(), agent.preprocessing.state_dict())
        twin.preprocessing.update(np.ones((1, *(agent.observation_space.shape or ()))))
    count = agent.preprocessing.statistics["observations"].count
    assert count == 40  # the copies counted for themselves


@EACH
def test_a_run_with_statistics_resumes_exactly(name: str, tmp_path: Path) -> None:
    settings = {**SMALL[name], **BOTH, "checkpoint_every": 24, "total_steps": 64, "log_every": 8}
    settings |= {"eval_every": 32, "eval_episodes": 1}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(ALGORITHMS[name](**settings, run_dir=str(whole)), progress=False)
    agent = ALGORITHMS[name](**settings, run_dir=str(parts))
    with RunDirectory.create(str(parts), agent) as directory:
        run = Run(agent, directory, progress=False)
        while agent.global_step < 36:  # in mid-episode
            run.step()
        run.save()
        run.close("stopped")
    resume(parts, progress=False)
    assert_same_run(whole, parts)


def test_images_are_not_standardised() -> None:
    with pytest.raises(ValueError, match="'normalize_observations' is for vectors"):
        make("drqv2", normalize_observations=True)
    agent = learned(make("drqv2", normalize_rewards=True))
    assert agent.preprocessing.statistics["returns"].count == 40


def test_a_compiled_agent_sees_standardised_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: real(function, backend="aot_eager", **options)
    )
    monkeypatch.setattr(torch._dynamo.config, "trace_autograd_ops", False)
    eager, compiled = (learned(make("dqn", compile=on, **BOTH)) for on in (False, True))
    assert_same(compiled.preprocessing.state_dict(), eager.preprocessing.state_dict())


def test_statistics_survive_numbers_far_from_zero() -> None:
    values = 1e6 + np.random.default_rng(1).normal(0, 0.1, (5_000, 2)).astype(np.float64)
    statistics = RunningStatistics((2,))
    for value in values:
        statistics.update(value[None])
    np.testing.assert_allclose(statistics.variance, values.var(axis=0), rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "last"),
    [((84, 84, 9), True), ((40, 60, 3), True), ((9, 84, 84), False), ((18, 16, 16), False)],
)
def test_channels_are_last_only_where_that_axis_is_the_shortest(
    shape: tuple[int, ...], last: bool
) -> None:
    """A stack of six small colour frames has more channels than pixels a side."""
    assert has_channels_last(Box(0, 255, shape, np.uint8)) == last
