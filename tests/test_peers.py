"""Agents stand where those of Stable-Baselines3 do."""

import itertools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import rlbook
from rlbook.agent import Agent
from rlbook.envs import make_env

evaluation = pytest.importorskip("stable_baselines3.common.evaluation", reason="extra: peers")
env_util = pytest.importorskip("stable_baselines3.common.env_util")

SMALL: dict[str, dict[str, Any]] = {
    "dqn": {"env_id": "CartPole-v1", "hidden": (16,), "learning_starts": 50},
    "drqn": {"env_id": "rlbook/MaskedCartPole-v0", "hidden": (16,), "learning_starts": 50},
    "r2d2": {"env_id": "rlbook/MaskedCartPole-v0", "hidden": (16,), "learning_starts": 50},
    "sac": {"env_id": "Pendulum-v1", "hidden": (16,), "learning_starts": 50},
}


def trained(name: str) -> Agent:
    """Train a small agent, just enough that its actions depend on what it sees."""
    agent = rlbook.ALGORITHMS[name](**SMALL[name], eval_every=0, seed=1)
    agent.learn(200, progress=False)
    return agent


def played(agent: Agent, seeds: list[int]) -> list[tuple[float, int]]:
    """Play episodes one after another, as anybody would; return their returns and lengths."""
    env, found = make_env(agent.config.env_id), []
    for seed in seeds:
        obs, _ = env.reset(seed=seed)
        state, total, length, done = None, 0.0, 0, False
        while not done:
            action, state = agent.predict(obs, state)
            obs, reward, terminated, truncated, _ = env.step(action)
            total, length, done = total + float(reward), length + 1, terminated or truncated
        found.append((total, length))
    env.close()
    return found


class Numbered(gym.Wrapper[Any, Any, Any, Any]):
    """Seeds its episodes one after another, whoever resets it."""

    def __init__(self, env: gym.Env, first: int = 0) -> None:
        super().__init__(env)
        self.seeds = itertools.count(first)

    def reset(self, **_: Any) -> Any:
        return self.env.reset(seed=next(self.seeds))


@pytest.mark.parametrize("name", list(SMALL))
def test_evaluate_policy_plays_the_episodes_that_we_play(name: str) -> None:
    agent = trained(name)
    env = Numbered(make_env(agent.config.env_id))
    with pytest.warns(UserWarning, match="Monitor"):
        returns, lengths = evaluation.evaluate_policy(
            agent, env, n_eval_episodes=3, return_episode_rewards=True
        )
    ours = played(agent, [0, 1, 2])
    assert lengths == [length for _, length in ours]
    np.testing.assert_allclose(returns, [total for total, _ in ours], rtol=1e-4)


@pytest.mark.parametrize("name", ["dqn", "drqn"])
def test_evaluate_policy_plays_several_environments_side_by_side(name: str) -> None:
    agent, firsts = trained(name), iter([0, 10, 20])
    envs = env_util.make_vec_env(
        lambda: Numbered(make_env(agent.config.env_id), next(firsts)), n_envs=3
    )
    returns, lengths = evaluation.evaluate_policy(
        agent, envs, n_eval_episodes=6, return_episode_rewards=True
    )
    ours = played(agent, [0, 1, 10, 11, 20, 21])  # theirs come in the order in which they end
    assert sorted(lengths) == sorted(length for _, length in ours)
    assert len(set(lengths)) > 1  # or all would begin together
    np.testing.assert_allclose(sorted(returns), sorted(total for total, _ in ours), rtol=1e-4)


def test_exploring_is_asked_for_in_their_words() -> None:
    agent = trained("dqn")
    agent.global_step = 0  # epsilon is 1
    obs = np.zeros((200, 4), np.float32)
    assert set(agent.predict(obs, deterministic=False)[0].tolist()) == {0, 1}
    assert len(set(agent.predict(obs, deterministic=True)[0].tolist())) == 1
