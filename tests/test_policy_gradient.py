"""Policies, GAE, rollouts and A2C: against NumPy, on known values, cut off and resumed."""

import copy
import json
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import assert_same, assert_same_run, in_child, run_until
from scipy.stats import chisquare, multivariate_normal
from torch import Tensor, nn
from torch.distributions import Beta, Categorical, Distribution, Independent, Normal

from rlbook.agent import Transition
from rlbook.cli import main
from rlbook.envs import Mistake
from rlbook.policy_gradient import (
    A2C,
    A2CConfig,
    CategoricalPolicy,
    GaussianPolicy,
    RolloutBatch,
    RolloutBuffer,
    TanhMLP,
    ValueNetwork,
    a2c_loss,
    explained_variance,
    gae,
    normalize,
    sample_action,
    train_a2c,
)
from rlbook.run import Collector, resume, train
from rlbook.settings import make_config, read_settings, shipped_configs

SMALL: dict[str, Any] = {
    "hidden": (8,),
    "num_envs": 2,
    "num_steps": 4,
    "eval_every": 0,
    "seed": 3,
}


class Odd(gym.Env[Any, Any]):
    """Spaces that A2C has to refuse or to take care of."""

    def __init__(self, kind: str) -> None:
        self.observation_space: gym.Space = gym.spaces.Box(-1, 1, (2,))
        self.action_space: gym.Space = gym.spaces.Discrete(2)
        if kind == "image":
            self.observation_space = gym.spaces.Box(0, 255, (3, 8, 8), np.uint8)
        elif kind == "many":
            self.action_space = gym.spaces.MultiDiscrete([3, 3])
        elif kind == "whole":
            self.action_space = gym.spaces.Box(0, 5, (1,), np.int8)
        elif kind == "shifted":
            self.action_space = gym.spaces.Discrete(3, start=5)
        elif kind == "far":
            self.action_space = gym.spaces.Box(100, 200, (1,))
        elif kind == "unbounded":
            self.action_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def reset(self, **keywords: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=keywords.get("seed"))
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action} is not in {self.action_space}"
        return np.zeros(2, np.float32), 1.0, False, True, {}


@pytest.fixture(scope="module", autouse=True)
def register_odd() -> Iterator[None]:
    """Let agents make these environments by id."""
    gym.register("Odd-v0", lambda **keywords: Odd(**keywords), disable_env_checker=True)
    yield
    del gym.registry["Odd-v0"]


def collect(agent: A2C) -> RolloutBatch:
    """Step until a rollout is full, and return what the agent would learn from."""
    collector = Collector(agent)
    while not agent.rollout.full:
        collector.step()
    collector.envs.close()
    return next(agent.batches())


# The policies


def test_policies_are_the_distributions_of_scipy_and_numpy() -> None:
    torch.manual_seed(0)
    obs = torch.randn(5, 3)
    policy = CategoricalPolicy(3, 4, (8,), orthogonal=False)
    logits = policy.mlp(obs).detach().double().numpy()
    probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    action = torch.tensor([0, 1, 2, 3, 1])
    found = policy(obs)
    np.testing.assert_allclose(
        found.log_prob(action).detach(), np.log(probability[np.arange(5), action]), rtol=1e-5
    )
    entropy = -(probability * np.log(probability)).sum(axis=1)
    np.testing.assert_allclose(found.entropy().detach(), entropy, rtol=1e-5)
    np.testing.assert_array_equal(found.mode, probability.argmax(axis=1))

    gaussian = GaussianPolicy(3, 2, (8,), orthogonal=False, initial_std=0.5)
    mean = gaussian.mlp(obs).detach().numpy()
    action = torch.randn(5, 2)
    for i in range(5):
        exact = multivariate_normal(mean[i], 0.25 * np.eye(2))
        assert gaussian(obs).log_prob(action)[i].item() == pytest.approx(
            exact.logpdf(action[i].numpy()), rel=1e-4
        )
        assert gaussian(obs).entropy()[i].item() == pytest.approx(exact.entropy(), rel=1e-4)
    np.testing.assert_allclose(gaussian(obs).mode.detach(), mean)


def test_samples_have_the_probabilities_of_the_policy() -> None:
    probability = torch.tensor([0.1, 0.2, 0.7])
    many = Categorical(probs=probability.expand(20_000, 3))
    counts = np.bincount(sample_action(many, np.random.default_rng(0)), minlength=3)
    assert chisquare(counts, 20_000 * probability.numpy().astype(np.float64)).pvalue > 1e-3
    mean, std = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])
    gaussian = Independent(Normal(mean.expand(20_000, 2), std.expand(20_000, 2)), 1)
    samples = sample_action(gaussian, np.random.default_rng(0))
    torch.testing.assert_close(samples.mean(dim=0), mean, atol=0.08, rtol=0)
    torch.testing.assert_close(samples.std(dim=0), std, atol=0.05, rtol=0)


def test_sampling_owns_its_randomness() -> None:
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    found = Categorical(logits=torch.zeros(50, 4))
    one, two = (sample_action(found, np.random.default_rng(1)) for _ in range(2))
    assert torch.equal(one, two) and torch.equal(before, torch.random.get_rng_state())


def test_orthogonal_weights_keep_lengths_and_start_undecided() -> None:
    mlp = TanhMLP((4, 64, 64, 2), last_gain=0.01)
    first, middle, last = (layer for layer in mlp if isinstance(layer, nn.Linear))
    torch.testing.assert_close(first.weight.t() @ first.weight, 2 * torch.eye(4))
    torch.testing.assert_close(
        middle.weight @ middle.weight.t(), 2 * torch.eye(64), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(last.weight @ last.weight.t(), 1e-4 * torch.eye(2))
    assert all(not layer.bias.any() for layer in (first, middle, last))
    probabilities = CategoricalPolicy(4, 2, (64, 64))(torch.randn(100, 4)).probs
    assert (probabilities - 0.5).abs().max() < 0.02
    assert ValueNetwork(4, (8,))(torch.zeros(3, 4, dtype=torch.uint8)).shape == (3,)
    plain = TanhMLP((4, 64, 2), 0.01, orthogonal=False)
    bias, weight = plain.get_parameter("0.bias"), plain.get_parameter("2.weight")
    assert bias.any() and weight.abs().max() > 0.02


# GAE


def reference_gae(
    reward: np.ndarray,
    value: np.ndarray,
    next_value: np.ndarray,
    terminated: np.ndarray,
    ended: np.ndarray,
    gamma: float,
    gae_lambda: float,
) -> np.ndarray:
    """Write the sum out, for each step by itself: no recursion, in 64 bits."""
    advantage = np.zeros(reward.shape)
    for t, i in np.ndindex(*reward.shape):
        for k in range(t, len(reward)):
            follows = 0.0 if terminated[k, i] else gamma * next_value[k, i]
            td_error = reward[k, i] + follows - value[k, i]
            advantage[t, i] += (gamma * gae_lambda) ** (k - t) * td_error
            if ended[k, i]:
                break
    return advantage


@pytest.mark.parametrize("gae_lambda", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(("time", "envs"), [(1, 1), (1, 4), (20, 1), (17, 3)])
def test_gae_is_that_of_numpy(time: int, envs: int, gae_lambda: float) -> None:
    rng = np.random.default_rng(time + envs)
    reward, value, next_value = rng.normal(size=(3, time, envs))
    terminated = rng.random((time, envs)) < 0.15
    ended = terminated | (rng.random((time, envs)) < 0.15)
    arrays = (reward, value, next_value, terminated, ended)
    expected = reference_gae(*arrays, 0.9, gae_lambda)
    rewards, values, next_values, stops, ends = (torch.from_numpy(array) for array in arrays)
    found = gae(rewards, values, next_values, stops, ends, 0.9, gae_lambda)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def column(*numbers: float) -> Tensor:
    """Return numbers as (time, 1)."""
    return torch.tensor(numbers).unsqueeze(1)


def test_truncation_bootstraps_with_the_last_observation_and_termination_with_nothing() -> None:
    reward, value, next_value = column(1, 1, 1), column(5, 6, 7), column(6, 100, 9)
    no, second = torch.zeros(3, 1, dtype=torch.bool), column(0, 1, 0).bool()
    cut = gae(reward, value, next_value, no, second, gamma=1.0, gae_lambda=1.0)
    assert cut.flatten().tolist() == [1 + 1 + 100 - 5, 1 + 100 - 6, 1 + 9 - 7]
    over = gae(reward, value, next_value, second, second, gamma=1.0, gae_lambda=1.0)
    assert over.flatten().tolist() == [1 + 1 - 5, 1 - 6, 1 + 9 - 7]


@pytest.mark.parametrize("name", ["value", "next_value", "terminated", "ended"])
def test_gae_refuses_shapes_that_would_broadcast(name: str) -> None:
    flags = torch.zeros(4, 2, dtype=torch.bool)
    inputs = {
        "reward": torch.zeros(4, 2),
        "value": torch.zeros(4, 2),
        "next_value": torch.zeros(4, 2),
        "terminated": flags,
        "ended": flags,
    }
    inputs[name] = inputs[name][:, :1]
    with pytest.raises(ValueError, match=rf"^{name} and reward must both be \(time, envs\)"):
        gae(**inputs, gamma=0.9, gae_lambda=0.9)
    flat = {key: tensor.flatten() for key, tensor in inputs.items()}
    with pytest.raises(ValueError, match="must both be"):
        gae(**flat, gamma=0.9, gae_lambda=0.9)


# The rollout


def step(t: int, **changes: Any) -> Transition:
    """Return step t of two environments."""
    no = np.zeros(2, dtype=bool)
    obs = np.full((2, 1), float(t), np.float32)
    step = Transition(obs, no, np.full(2, float(t)), obs + 1, no, no, no, None)
    for name, value in changes.items():
        setattr(step, name, np.array(value))
    return step


def small_rollout(num_steps: int = 3) -> RolloutBuffer:
    """Return an empty rollout of two environments."""
    return RolloutBuffer(num_steps, 2, gym.spaces.Box(-9, 9, (1,)), gym.spaces.Discrete(4))


def test_rollout_is_time_first_and_knows_when_it_is_full() -> None:
    rollout = small_rollout()
    for t in range(3):
        assert not rollout.full
        rollout.add(step(t), np.array([t, t + 1]), np.array([0.5, 1.5]))
    assert rollout.full
    tensors = rollout.tensors(torch.device("cpu"))
    assert tensors["obs"].shape == (3, 2, 1)
    assert tensors["action"].tolist() == [[0, 1], [1, 2], [2, 3]]
    with pytest.raises(ValueError, match="The rollout is full"):
        rollout.add(step(3), np.zeros(2), np.zeros(2))
    rollout.clear()
    rollout.add(step(7), np.zeros(2), np.zeros(2))
    assert tensors["obs"][0].tolist() == [[0.0], [0.0]]  # what was returned is not overwritten


def test_ends_of_all_kinds_are_ends() -> None:
    rollout = small_rollout(4)
    zeros = np.zeros(2)
    rollout.add(step(0, terminated=[True, False], truncated=[False, True]), zeros, zeros)
    rollout.add(step(1, episode_start=[True, True]), zeros, zeros)
    rollout.add(step(2, episode_start=[False, True]), zeros, zeros)  # `learn` again
    assert rollout.ended[:3].tolist() == [[True, True], [False, True], [False, False]]
    assert rollout.terminated[:3].tolist() == [[True, False], [False, False], [False, False]]


def test_rollout_survives_a_round_trip_and_refuses_another_shape() -> None:
    rollout, other = small_rollout(), small_rollout()
    for t in range(2):
        rollout.add(step(t), np.array([1, 2]), np.ones(2))
    other.load_state_dict(copy.deepcopy(rollout.state_dict()))
    assert_same(rollout.state_dict(), other.state_dict())
    with pytest.raises(ValueError, match=r"A rollout of \(3, 2, 1\) was stored, not \(4, 2, 1\)"):
        small_rollout(4).load_state_dict(rollout.state_dict())


def test_advantages_of_an_agent_are_those_of_numpy() -> None:
    agent = A2C("CartPole-v1", **{**SMALL, "num_steps": 60}, gamma=0.9, gae_lambda=0.8)
    batch, r = collect(agent), agent.rollout
    assert r.terminated.any()
    with torch.no_grad():
        value, next_value = (
            agent.value_network(torch.from_numpy(x)).numpy() for x in (r.obs, r.next_obs)
        )
        distribution = agent.policy(torch.from_numpy(r.obs))
        log_prob = distribution.log_prob(torch.from_numpy(r.action)).flatten()
    expected = reference_gae(r.reward, value, next_value, r.terminated, r.ended, 0.9, 0.8)
    np.testing.assert_allclose(batch.advantage, expected.flatten(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(batch.returns, (expected + value).flatten(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch.log_prob, log_prob)
    assert torch.equal(batch.obs.view(60, 2, 4), torch.from_numpy(r.obs))
    assert len(batch) == 120 and len(batch[torch.tensor([3, 5])]) == 2


def test_a_checkpoint_ends_an_episode_and_still_bootstraps() -> None:
    settings = {**SMALL, "num_steps": 6, "checkpoint_every": 8, "gamma": 0.9}
    agent = A2C("rlbook/ConstantReward-v0", env_kwargs={"limit": 100}, **settings)
    batch, r = collect(agent), agent.rollout
    assert r.ended[:, 0].tolist() == [False, False, False, True, False, False]
    assert not r.terminated.any()
    td_error = r.reward + 0.9 * agent.values(r.next_obs.reshape(-1, 1)).reshape(6, 2)
    td_error = td_error - agent.values(r.obs.reshape(-1, 1)).reshape(6, 2)
    np.testing.assert_allclose(batch.advantage.view(6, 2)[3], td_error[3], rtol=1e-5)


def test_learn_called_again_does_not_join_two_episodes() -> None:
    agent = A2C("rlbook/ConstantReward-v0", env_kwargs={"limit": 100}, **{**SMALL, "num_steps": 6})
    agent.learn(6, progress=False)  # three steps of each
    agent.training_state = None  # as if the environment were another
    agent.learn(4, progress=False)
    assert agent.rollout.size == 5
    assert agent.rollout.ended[:5, 0].tolist() == [False, False, True, False, False]


# The loss


def random_inputs(batch: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return inputs of the loss."""
    generator = torch.Generator().manual_seed(batch)
    names = ("log_prob", "entropy", "value", "advantage", "returns")
    return dict(zip(names, torch.randn(5, batch, generator=generator, dtype=dtype), strict=True))


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_loss_is_that_of_numpy(batch: int) -> None:
    inputs = random_inputs(batch)
    loss, metrics = a2c_loss(**inputs, value_coefficient=0.4, entropy_coefficient=0.03)
    x = {name: tensor.numpy() for name, tensor in inputs.items()}
    policy_loss = -np.mean(x["log_prob"] * x["advantage"])
    value_loss = np.mean((x["value"] - x["returns"]) ** 2)
    variance = max(np.var(x["returns"]), 1e-8)
    expected = {
        "loss": policy_loss + 0.4 * value_loss - 0.03 * x["entropy"].mean(),
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": x["entropy"].mean(),
        "explained_variance": 1 - np.var(x["returns"] - x["value"]) / variance,
    }
    assert list(metrics) == list(expected)
    for name, number in expected.items():
        assert float(metrics[name]) == pytest.approx(number), name
    assert float(loss) == float(metrics["loss"])


@pytest.mark.parametrize("name", ["log_prob", "entropy", "value", "advantage", "returns"])
def test_loss_refuses_shapes_that_would_broadcast(name: str) -> None:
    inputs = random_inputs(8)
    inputs[name] = inputs[name].unsqueeze(1)
    with pytest.raises(ValueError, match=name):
        a2c_loss(**inputs, value_coefficient=0.5, entropy_coefficient=0.0)


def test_normalised_advantages_and_explained_variance() -> None:
    advantage = torch.tensor([1.0, 2.0, 3.0, 6.0])
    found = normalize(advantage)
    assert found.mean().abs() < 1e-6 and found.std(correction=0).item() == pytest.approx(1)
    assert normalize(torch.ones(3)).tolist() == [0, 0, 0]
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.full((3,), 2.0), returns) == 0
    assert explained_variance(torch.ones(3), torch.ones(3)).isfinite()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_gradients_are_those_of_the_equations(env_id: str) -> None:
    agent = A2C(
        env_id, **SMALL, orthogonal_init=False, normalize_advantages=True, entropy_coefficient=0.1
    )
    batch = collect(agent)
    output = agent.policy.mlp(batch.obs)  # type: ignore[operator]
    if env_id == "CartPole-v1":
        log = output - output.exp().sum(dim=1, keepdim=True).log()
        log_prob = log.gather(1, batch.action.unsqueeze(1)).squeeze(1)
        entropy = -(log.exp() * log).sum(dim=1)
    else:
        log_std = agent.policy.log_std
        assert isinstance(log_std, Tensor)
        z = (batch.action - output) / log_std.exp()
        log_prob = (-0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(dim=1)
        entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum().expand(len(batch))
    a = batch.advantage
    a = (a - a.mean()) / a.std(correction=0)
    value = agent.value_network(batch.obs)
    loss = -(log_prob * a).mean() + 0.5 * ((value - batch.returns) ** 2).mean()
    loss = loss - 0.1 * entropy.mean()
    parameters = [*agent.policy.parameters(), *agent.value_network.parameters()]
    expected = torch.autograd.grad(loss, parameters)
    agent.compute_gradients(batch)
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-4)


# The agent


def test_gaussian_actions_are_clipped_for_the_environment_alone() -> None:
    agent = A2C("Pendulum-v1", **{**SMALL, "num_steps": 50}, initial_std=5.0)
    collector = Collector(agent)
    played = []
    while not agent.rollout.full:
        collector.step()
        played.append(collector.actions[-1])
    collector.envs.close()
    stored = agent.rollout.action
    assert np.abs(stored).max() > 4  # as sampled
    np.testing.assert_array_equal(np.clip(stored, -2, 2), np.array(played))
    batch = next(agent.batches())
    with torch.no_grad():
        mean = agent.policy(batch.obs).mean.numpy().flatten()
    z = (batch.action.numpy().flatten() - mean) / 5
    exact = -0.5 * z**2 - math.log(5) - 0.5 * math.log(2 * math.pi)
    np.testing.assert_allclose(batch.log_prob, exact, rtol=1e-4)


def test_a_question_between_acting_and_observing_changes_nothing() -> None:
    agent = A2C("CartPole-v1", **SMALL)
    obs = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    actions, _ = agent.act(obs, None, np.ones(2, dtype=bool), explore=True)
    for deterministic in (True, False):
        agent.predict(np.zeros((2, 4), np.float32), deterministic=deterministic)
    np.testing.assert_array_equal(agent.as_sampled(actions), actions)


def test_torques_that_were_not_sampled_last_are_not_stored() -> None:
    agent, obs = A2C("Pendulum-v1", **SMALL), np.zeros((2, 3), np.float32)
    actions, _ = agent.act(obs, None, np.ones(2, dtype=bool), explore=True)
    agent.predict(obs)
    np.testing.assert_array_equal(np.clip(agent.as_sampled(actions), -2, 2), actions)
    agent.predict(obs, deterministic=False)
    with pytest.raises(Mistake, match="not those that it sampled last"):
        agent.as_sampled(actions)


class BetaPolicy(nn.Module):
    """The same Beta distribution everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = nn.Parameter(torch.tensor([2.0, 5.0]))

    def forward(self, obs: torch.Tensor) -> Independent:
        """Return torques between 0 and 1."""
        shape = self.shape.expand(len(obs), 1, 2)
        return Independent(Beta(shape[..., 0], shape[..., 1]), 1)


def test_a_policy_of_another_kind_is_sampled_as_it_is() -> None:
    distribution = BetaPolicy()(torch.zeros(4_000, 3))
    torch.manual_seed(1)
    found = [sample_action(distribution, np.random.default_rng(7)) for _ in range(2)]
    assert torch.equal(*found)  # from the generator of the agent, not from torch's
    assert found[0].min() > 0 and found[0].max() < 1
    assert abs(found[0].mean() - 2 / 7) < 0.01
    assert abs(found[0].std() - math.sqrt(10 / (49 * 8))) < 0.01

    class BetaA2C(A2C):
        def make_policy(self) -> nn.Module:
            return BetaPolicy()

    agent = BetaA2C("Pendulum-v1", **SMALL)
    agent.learn(64, progress=False)
    assert agent.updates > 0


@pytest.mark.parametrize("kind", ["shifted", "unbounded"])
def test_actions_arrive_in_the_space_of_the_environment(kind: str) -> None:
    agent = A2C("Odd-v0", env_kwargs={"kind": kind}, **SMALL)
    agent.learn(16, progress=False)  # the environment asserts that actions are in its space
    assert agent.updates == 2
    action, _ = agent.predict(np.zeros(2, np.float32))
    assert agent.action_space.contains(action)
    if kind == "shifted":
        assert set(np.unique(agent.rollout.action)) <= {0, 1, 2}


@pytest.mark.filterwarnings("error")
def test_bounds_that_the_gaussian_does_not_reach_get_a_warning() -> None:
    """Otherwise every action would be the nearer bound, whatever the agent learns."""
    with pytest.warns(UserWarning, match=r"starts around 0: wrap it in .*RescaleAction"):
        A2C("Odd-v0", env_kwargs={"kind": "far"}, **SMALL)
    A2C("Odd-v0", env_kwargs={"kind": "unbounded"}, **SMALL)
    A2C("Odd-v0", env_kwargs={"kind": "far"}, **SMALL, initial_std=50.0)


def test_greedy_actions_are_the_likeliest_and_others_are_sampled() -> None:
    agent = A2C("CartPole-v1", **SMALL, orthogonal_init=False)
    obs = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    greedy = agent.predict(obs)[0]
    probabilities = agent.probabilities(obs)
    np.testing.assert_array_equal(greedy, probabilities.argmax(axis=1))
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    assert (agent.predict(obs, deterministic=False)[0] != greedy).any()
    with pytest.raises(ValueError, match="have a density"):
        A2C("Pendulum-v1", **SMALL).probabilities(np.zeros((1, 3), np.float32))


def test_one_update_of_each_rollout_moves_both_networks_and_reports() -> None:
    agent = A2C("CartPole-v1", **SMALL)
    agent.learn(7, progress=False)  # the eighth step of all fills the rollout
    assert agent.updates == 1 and agent.global_step == 8 and agent.rollout.size == 0
    agent.learn(24, progress=False)
    assert agent.updates == 4
    before = copy.deepcopy(agent)
    metrics = agent.update(collect(agent)).metrics
    names = ["loss", "policy_loss", "value_loss", "entropy", "explained_variance"]
    assert list(metrics) == names
    assert all(value.isfinite() and value.shape == () for value in metrics.values())
    for part in ("policy", "value_network"):
        pairs = zip(
            getattr(agent, part).parameters(), getattr(before, part).parameters(), strict=True
        )
        assert all(bool((a != b).any()) for a, b in pairs), part


def test_learning_rate_falls_and_gradients_are_clipped() -> None:
    settings = {**SMALL, "lr": 1e-2, "lr_decay_from": 0.0, "total_steps": 80}
    agent = A2C("CartPole-v1", **settings, max_grad_norm=1e-3)
    train(agent, progress=False)
    assert agent.optimizer.param_groups[0]["lr"] == 0
    agent.global_step = 40
    agent.update(collect(agent))
    assert agent.optimizer.param_groups[0]["lr"] == pytest.approx(0.4e-2)  # at step 48 of 80
    parameters = [*agent.policy.parameters(), *agent.value_network.parameters()]
    norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-2)


PROBE: dict[str, Any] = {
    **{"hidden": (16,), "num_steps": 8, "lr": 1e-2},
    **{"gamma": 0.9, "eval_every": 0, "seed": 0},
}


@pytest.mark.parametrize(  # what a state is worth does not depend on the kind of action
    ("name", "continuous", "states", "values"),
    [
        ("OneStep", True, [1.0], [1.0]),
        ("TwoStep", False, [-1.0, 0.0], [0.9, 1.0]),
        ("ObservationReward", True, [-1.0, 1.0], [-1.0, 1.0]),
        ("ConstantReward", False, [1.0], [10.0]),  # cut off every 10 steps
    ],
)
def test_known_values(
    name: str, continuous: bool, states: list[float], values: list[float]
) -> None:
    agent = A2C(f"rlbook/{name}-v0", env_kwargs={"continuous": continuous}, **PROBE)
    agent.learn(16_000 if name == "ConstantReward" else 6_000, progress=False)
    found = agent.values(np.array(states, np.float32)[:, None])
    np.testing.assert_allclose(found, values, atol=0.5 if name == "ConstantReward" else 0.05)


def test_a_cut_off_episode_is_worth_less_if_cutting_off_counts_as_an_end() -> None:
    agent = A2C("rlbook/ConstantReward-v0", **PROBE, bootstrap_truncated=False)
    agent.learn(16_000, progress=False)
    # Seen at 1 to 10 steps before the end, all alike: a mean of 1, 1.9, 2.71, ...
    values = [sum(0.9**k for k in range(left)) for left in range(1, 11)]
    assert agent.values(np.ones((1, 1), np.float32))[0] == pytest.approx(np.mean(values), abs=0.7)


@pytest.mark.parametrize("continuous", [False, True])
def test_learns_which_action_is_right(continuous: bool) -> None:
    env_kwargs = {"continuous": continuous}
    agent = A2C("rlbook/ActionReward-v0", env_kwargs=env_kwargs, **PROBE, initial_std=0.5)
    agent.learn(8_000, progress=False)
    action, _ = agent.predict(np.array([[-1.0], [1.0]], np.float32))
    if continuous:
        np.testing.assert_allclose(action[:, 0], [-0.5, 0.5], atol=0.15)
    else:
        assert action.tolist() == [0, 1]


def test_reward_scale_multiplies_what_is_stored() -> None:
    agent = A2C("CartPole-v1", **SMALL, reward_scale=0.25)
    collect(agent)
    assert (agent.rollout.reward == 0.25).all()


def test_networks_can_be_replaced() -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(1, 16), nn.LayerNorm(16), nn.ReLU())
            self.logits = nn.Linear(16, 2)

        def forward(self, obs: Tensor) -> Distribution:
            assert obs.ndim == 2  # never (time, envs, inputs)
            return Categorical(logits=self.logits(self.layers(obs)))

    class Mine(A2C):
        def make_policy(self) -> nn.Module:
            return Policy()

        def make_value_network(self) -> nn.Module:
            return nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1), nn.Flatten(0))

    agent = Mine("rlbook/ActionReward-v0", **PROBE)
    agent.learn(8_000, progress=False)
    assert agent.predict(np.array([[-1.0], [1.0]], np.float32))[0].tolist() == [0, 1]


# Saving and resuming


def test_save_and_load_in_the_middle_of_a_rollout(tmp_path: Path) -> None:
    agent = A2C("Pendulum-v1", **SMALL)
    agent.learn(20, progress=False)
    assert agent.rollout.size == 2
    agent.save(tmp_path / "agent.pt")
    again = A2C.load(tmp_path / "agent.pt")
    assert_same(agent.state_dict(), again.state_dict())
    for one in (agent, again):
        one.learn(20, progress=False)
    assert_same(agent.state_dict(), again.state_dict())


RUN: dict[str, Any] = {
    **SMALL,
    "env_id": "Pendulum-v1",
    "num_steps": 5,
    "total_steps": 120,
    "eval_every": 60,
    "eval_episodes": 1,
    "log_every": 20,
    "checkpoint_every": 24,  # rollouts have 10 steps
}


def test_a_run_that_is_killed_within_a_rollout_resumes_exactly(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    note = tmp_path / "calls"
    assert in_child(run_until, None, A2C, {**RUN, "run_dir": str(whole)}, note) == 0
    calls = int(note.read_text())
    settings = {**RUN, "run_dir": str(cut)}
    assert in_child(run_until, int(0.6 * calls), A2C, settings, note) == -9
    assert in_child(run_until, int(0.3 * calls), A2C, settings, note) == -9
    assert in_child(run_until, None, A2C, settings, note) == 0
    assert_same_run(whole, cut)


def test_a_longer_run_goes_on_from_a_partial_rollout(tmp_path: Path) -> None:
    def config(name: str, steps: int) -> A2CConfig:
        return A2CConfig(**{**RUN, "total_steps": steps, "run_dir": str(tmp_path / name)})

    whole = train_a2c(config("whole", 120), progress=False)
    train_a2c(config("half", 72), progress=False)  # a checkpoint, and seven rollouts of ten steps
    longer = resume(tmp_path / "half", total_steps=120, progress=False)
    assert_same(whole.agent.state_dict(), longer.agent.state_dict())


# Bad input


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("image", "has image observations .* but a2c needs vector observations"),
        ("many", r"MultiDiscrete actions \(.*\), but a2c needs .* or continuous"),
        ("whole", "has actions that are not real numbers"),
    ],
)
def test_spaces_that_do_not_fit_get_a_sentence(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        A2C("Odd-v0", env_kwargs={"kind": kind}, **SMALL)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_a2c_is_named_where_another_algorithm_does_not_fit() -> None:
    from rlbook.dqn import DQN
    from rlbook.sac import SAC

    with pytest.raises(ValueError, match=r"try .*\ba2c\b.*\bsac\b"):
        DQN("Pendulum-v1")
    with pytest.raises(ValueError, match=r"try dqn.* or a2c"):
        SAC("CartPole-v1")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_steps": 0}, "'num_steps' must be at least 1, not 0"),
        ({"gae_lambda": 1.1}, "'gae_lambda' must be at most 1"),
        ({"initial_std": 0}, "'initial_std' must be above 0"),
        ({"entropy_coefficient": -1}, "'entropy_coefficient' must be at least 0"),
        ({"num_steps": 1, "num_envs": 1, "normalize_advantages": True}, "at least two steps"),
        ({"batch_size": 4}, "A2C has no setting 'batch_size'"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        A2CConfig(**settings)


def test_a_session_in_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = "--hidden 8 --num-steps 4 --eval-every 0 --run-dir runs/a --total-steps 64"
    assert main(shlex.split(f"train a2c --config cartpole {tiny}")) == 0
    assert main(shlex.split("resume runs/a --total-steps 96")) == 0
    assert main(shlex.split("evaluate runs/a --episodes 1")) == 0
    capsys.readouterr()
    assert main(["predict", "runs/a", "--observation", "[0, 0, 0.1, 0]"]) == 0
    assert json.loads(capsys.readouterr().out)["action"] in (0, 1)


def test_shipped_configs_make_agents() -> None:
    names = [name for name in shipped_configs() if name.startswith("a2c/")]
    assert names == ["a2c/cartpole"]
    settings = read_settings(shipped_configs()["a2c/cartpole"])
    assert settings.pop("algo") == "a2c"
    A2C(config=make_config(A2CConfig, settings))
