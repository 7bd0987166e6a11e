"""SAC: its density, networks, losses, bounds and update, and a run that is cut off and resumed."""

import copy
import json
import math
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from critics import gradients, random_loss_inputs
from helpers import assert_same_run
from scipy.integrate import quad
from torch import Tensor, nn

from rlbook.cli import main
from rlbook.progress import RunFailed
from rlbook.redq import REDQ
from rlbook.run import resume
from rlbook.sac import (
    SAC,
    ActionScale,
    Actor,
    Critics,
    SACConfig,
    actor_loss,
    alpha_loss,
    critic_loss,
    log_det_tanh,
    sac_target,
    squashed_sample,
    train_sac,
)
from rlbook.settings import make_config, read_settings, shipped_configs

SMALL: dict[str, Any] = {
    "hidden": (16, 16),
    "batch_size": 32,
    "learning_starts": 64,
    "buffer_size": 2_000,
    "eval_every": 0,
}


class Probe(gym.Env[np.ndarray, np.ndarray]):
    """One constant observation; what else happens is said by keywords."""

    def __init__(
        self,
        low: float = -1.0,
        high: float = 1.0,
        best: float | None = None,
        length: int = 5,
        terminates: bool = False,
        broken: str = "",
        action_dtype: str = "float32",
    ) -> None:
        self.observation_space = gym.spaces.Box(-1, 1, (1,))
        dtype: Any = np.dtype(action_dtype).type
        bounds = np.array([[low], [high]], dtype)
        self.action_space = gym.spaces.Box(*bounds, dtype=dtype)
        self.best, self.length, self.terminates, self.broken = best, length, terminates, broken

    def reset(self, **keywords: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=keywords.get("seed"))
        self.steps = 0
        return np.full(1, 0.5, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action} is out of bounds"
        self.steps += 1
        reward = 1.0 if self.best is None else -float((action[0] - self.best) ** 2)
        obs = np.full(1, 0.5, np.float32)
        if self.steps == 3 and self.broken == "reward":
            reward = math.nan
        if self.steps == 3 and self.broken == "observation":
            obs[0] = np.inf
        over = self.steps == self.length
        return obs, reward, over and self.terminates, over and not self.terminates, {}


@pytest.fixture(scope="module", autouse=True)
def register_probe() -> Iterator[None]:
    """Let agents make the probe by its id."""
    gym.register("Probe-v0", lambda **keywords: Probe(**keywords), disable_env_checker=True)
    yield
    del gym.registry["Probe-v0"]


def probe_agent(settings: dict[str, Any] | None = None, **keywords: Any) -> SAC:
    """A small agent on the probe with these keywords."""
    return SAC("Probe-v0", env_kwargs=keywords, **{**SMALL, **(settings or {})})


# The squashed Gaussian


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_prob_is_that_of_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    mean, log_std, noise = torch.randn(3, 200, 4, generator=generator, dtype=dtype)
    action, log_prob = squashed_sample(mean, log_std, noise)
    base = torch.distributions.Normal(mean.double(), log_std.double().exp())
    squashed = torch.distributions.TransformedDistribution(
        base, [torch.distributions.TanhTransform(cache_size=0)]
    )
    u = mean.double() + log_std.double().exp() * noise.double()
    inside = (u.abs() < 6).all(dim=1)  # beyond, atanh(tanh(u)) loses the digits, not we
    expected = squashed.log_prob(u.tanh()).sum(dim=1)
    torch.testing.assert_close(action, u.tanh().to(dtype))
    tolerance = 2e-4 if dtype == torch.float32 else 1e-6
    torch.testing.assert_close(
        log_prob.double()[inside], expected[inside], atol=tolerance, rtol=tolerance
    )
    assert inside.sum() > 100


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -1.0), (-2.0, 0.3), (0.0, 1.0)])
def test_density_integrates_to_one(mean: float, log_std: float) -> None:
    def density(a: float) -> float:
        u = torch.atanh(torch.tensor(a, dtype=torch.float64))
        noise = (u - mean) / math.exp(log_std)
        vectors = [torch.full((1, 1), float(x), dtype=torch.float64) for x in (mean, log_std)]
        return float(squashed_sample(vectors[0], vectors[1], noise.reshape(1, 1))[1].exp())

    # The tails pile up at the bounds: tell the quadrature where.
    edges = [-1 + 1e-12, -1 + 1e-6, -1 + 1e-3, -0.9, 0, 0.9, 1 - 1e-3, 1 - 1e-6, 1 - 1e-12]
    total = sum(quad(density, *pair, limit=200)[0] for pair in pairwise(edges))
    assert total == pytest.approx(1, abs=1e-3)


def test_log_prob_next_to_the_bounds_in_float32() -> None:
    u = torch.tensor([[-30.0], [-9.5], [9.5], [15.0], [30.0]])
    action, log_prob = squashed_sample(u, torch.zeros_like(u), torch.zeros_like(u))
    assert (action.abs() == 1).any(), "tanh rounds to 1 here: the case is the one that we mean"
    exact = -0.5 * math.log(2 * math.pi) - 2 * (math.log(2) - u.double().abs())[:, 0]
    exact = exact + 2 * torch.log1p(torch.exp(-2 * u.double().abs()))[:, 0]
    torch.testing.assert_close(log_prob.double(), exact, atol=1e-5, rtol=1e-6)
    naive = torch.log(1 - action.square())
    assert torch.isinf(naive).any()  # what the textbook formula would have given


def test_log_det_of_tanh_has_finite_gradients() -> None:
    u = torch.tensor([-40.0, -5.0, 0.0, 5.0, 40.0], requires_grad=True)
    log_det_tanh(u).sum().backward()
    assert u.grad is not None
    torch.testing.assert_close(u.grad, -2 * torch.tanh(u.detach()), atol=1e-5, rtol=1e-5)


# The networks


def test_actor_clamps_its_log_standard_deviation() -> None:
    actor = Actor(3, 2, (8, 8))
    mean, log_std = actor(1e4 * torch.randn(64, 3))
    assert mean.shape == log_std.shape == (64, 2)
    assert log_std.min() == -20 and log_std.max() == 2
    assert actor(torch.zeros(1, 3, dtype=torch.uint8))[0].dtype == torch.float32  # bytes, too


@pytest.mark.parametrize("hidden", [(), (8,), (8, 6)])
def test_critics_are_separate_networks(hidden: tuple[int, ...]) -> None:
    critics = Critics(3, 2, hidden, num_critics=4)
    obs, action = torch.randn(5, 3), torch.randn(5, 2)
    q = critics(obs, action)
    assert q.shape == (5, 4)
    for i in range(4):  # one by one, with ordinary layers
        x = torch.cat([obs, action], dim=1)
        for weight, bias in zip(critics.weights, critics.biases, strict=True):
            x = x if weight is critics.weights[0] else x.relu()
            x = nn.functional.linear(x, weight[i].t(), bias[i, 0])
        torch.testing.assert_close(q[:, i], x.squeeze(1))


def test_chosen_critics_are_columns_of_all() -> None:
    critics = Critics(3, 2, (8, 8), num_critics=5)
    obs, action, chosen = torch.randn(4, 3), torch.randn(4, 2), torch.tensor([3, 0])
    torch.testing.assert_close(critics(obs, action, chosen), critics(obs, action)[:, chosen])


def test_critics_start_like_linear_layers_and_apart() -> None:
    torch.manual_seed(0)
    critics, linear = Critics(30, 2, (64, 64), num_critics=8), nn.Linear(32, 8 * 64)
    assert len(list(critics.parameters())) == 6
    for weight, bias in zip(critics.weights, critics.biases, strict=True):
        bound = 1 / math.sqrt(weight.shape[1])
        assert 0.9 * bound < weight.abs().max() <= bound and bias.abs().max() <= bound
        assert all((weight[0] != other).any() for other in weight[1:])
    assert critics.weights[0].std().item() == pytest.approx(linear.weight.std().item(), rel=0.05)


class NormedActor(nn.Module):
    """An actor of somebody else, with layer normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 16), nn.LayerNorm(16), nn.ReLU())
        self.mean, self.log_std = nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(obs)
        return self.mean(features), self.log_std(features).clamp(-5, 2)


class NormedCritics(nn.Module):
    """Critics of somebody else: a list of networks with layer normalisation."""

    def __init__(self, num_critics: int) -> None:
        super().__init__()
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(2, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))
            for _ in range(num_critics)
        )

    def forward(self, obs: Tensor, action: Tensor, chosen: Tensor | None = None) -> Tensor:
        x = torch.cat([obs, action], dim=1)
        q = torch.cat([network(x) for network in self.networks], dim=1)
        return q if chosen is None else q[:, chosen]


@pytest.mark.parametrize("parent", [SAC, REDQ])
def test_networks_can_be_replaced(parent: type[SAC]) -> None:
    class Normed(parent):  # type: ignore[valid-type,misc]
        def make_actor(self) -> nn.Module:
            return NormedActor()

        def make_critics(self) -> nn.Module:
            return NormedCritics(self.config.num_critics)

    keywords = {"best": 2.0, "low": -1.0, "high": 3.0, "length": 1, "terminates": True}
    own = {"gradient_steps": 1, "policy_delay": 1, "lr": 3e-3}
    agent = Normed("Probe-v0", env_kwargs=keywords, **{**SMALL, **own})
    agent.learn(500, progress=False)
    action, _ = agent.predict(np.full(1, 0.5))
    assert action[0] == pytest.approx(2.0, abs=0.3)


# The losses


def test_losses_are_those_of_numpy() -> None:
    for batch in (1, 7, 64):
        q, inputs = random_loss_inputs(batch, batch, 2, 2)
        target = sac_target(**inputs)
        loss, metrics = critic_loss(q, target)
        x = {name: value.numpy() for name, value in inputs.items()}
        soft = x["next_q"].min(axis=1) - x["alpha"] * x["next_log_prob"]
        y = x["reward"] + x["discount"] * np.where(x["terminated"], 0, soft)
        errors = q.numpy() - y[:, None]
        np.testing.assert_allclose(target.numpy(), y)
        assert float(loss) == pytest.approx((errors**2).mean(0).sum())
        assert float(metrics["loss"]) == float(loss)
        assert float(metrics["q_mean"]) == pytest.approx(q.numpy().mean())
        assert float(metrics["q_std"]) == pytest.approx(q.numpy().std(axis=1).mean())
        assert float(metrics["target_mean"]) == pytest.approx(y.mean())
        assert float(metrics["td_error_abs"]) == pytest.approx(np.abs(errors).mean())


@pytest.mark.parametrize("name", ["reward", "discount", "terminated", "next_log_prob"])
def test_target_refuses_shapes_that_would_broadcast(name: str) -> None:
    _, inputs = random_loss_inputs(0, 8, 2, 2)
    inputs[name] = inputs[name].unsqueeze(1)
    with pytest.raises(ValueError, match=name):
        sac_target(**inputs)


def test_losses_refuse_shapes_that_would_broadcast() -> None:
    q, inputs = random_loss_inputs(0, 8, 2, 2)
    with pytest.raises(ValueError, match="reward"):
        sac_target(**{**inputs, "next_q": inputs["next_q"].t()})
    with pytest.raises(ValueError, match="next_q"):
        sac_target(**{**inputs, "next_q": inputs["next_q"][:, 0]})
    with pytest.raises(ValueError, match="target"):
        critic_loss(q, torch.zeros(8, 1))
    with pytest.raises(ValueError, match="q must be"):
        critic_loss(q[:, 0], torch.zeros(8))
    with pytest.raises(ValueError, match="log_prob"):
        actor_loss(torch.zeros(8), torch.zeros(8, 1), 1.0)
    with pytest.raises(ValueError, match="value"):
        actor_loss(torch.zeros(8, 1), torch.zeros(8), 1.0)
    with pytest.raises(ValueError, match="log_prob"):
        alpha_loss(torch.zeros(()), torch.zeros(8, 1), -1.0)


@pytest.mark.parametrize(("entropy", "sign"), [(-3.0, 1), (1.0, -1)])
def test_entropy_coefficient_rises_while_entropy_is_too_low(entropy: float, sign: int) -> None:
    log_alpha, log_prob = torch.zeros((), requires_grad=True), torch.full((4,), -entropy)
    alpha_loss(log_alpha, log_prob.requires_grad_(), target_entropy=-1.0)[0].backward()
    assert log_alpha.grad is not None and log_prob.grad is None
    assert math.copysign(1, -log_alpha.grad.item()) == sign  # the step is against the gradient


# The agent


@pytest.mark.parametrize(("low", "high"), [(-2.0, 2.0), (3.0, 3.5), (-1e6, 10.0), (0.1, 0.7)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_any_finite_bounds(low: float, high: float, dtype: str) -> None:
    agent = probe_agent(low=low, high=high, action_dtype=dtype)
    agent.learn(120, progress=False)  # the probe asserts that actions are in its space
    stored = agent.replay.storage["action"][: len(agent.replay)]
    assert np.abs(stored).max() <= 1 + 1e-5 and stored.std() > 0.1
    action, _ = agent.predict(np.full(1, 0.5))
    assert agent.action_space.contains(action)


def test_scale_goes_there_and_back() -> None:
    bounds = np.array([[-2.0, 0.0], [2.0, 10.0]])
    scale = ActionScale(gym.spaces.Box(*bounds, dtype=np.float64))
    normal = np.array([[-1.0, -1.0], [0.0, 0.0], [1.0, 0.5]])
    np.testing.assert_allclose(scale.to_env(normal), np.array([[-2, 0], [0, 5], [2, 7.5]]))
    np.testing.assert_allclose(scale.from_env(scale.to_env(normal)), normal)


def test_truncation_still_bootstraps() -> None:
    agent = probe_agent(length=3)
    agent.learn(12, progress=False)
    assert not agent.replay.storage["terminated"].any()
    agent = probe_agent(length=3, terminates=True)
    agent.learn(12, progress=False)
    np.testing.assert_array_equal(np.flatnonzero(agent.replay.storage["terminated"]), [2, 5, 8, 11])


@pytest.mark.parametrize(("terminates", "value"), [(False, 2.0), (True, 1.0)])
def test_value_of_a_constant_reward(terminates: bool, value: float) -> None:
    settings = {"gamma": 0.5, "lr": 5e-3, "tau": 0.05, "initial_alpha": 1e-6, "learn_alpha": False}
    agent = probe_agent(settings, length=1, terminates=terminates)
    agent.learn(500, progress=False)
    q = agent.q_values(np.full((1, 1), 0.5), np.zeros((1, 1)))
    np.testing.assert_allclose(q, value, atol=0.05)


def test_learns_the_best_action_of_a_bandit() -> None:
    agent = probe_agent({"lr": 3e-3}, low=-1.0, high=3.0, best=2.0, length=1, terminates=True)
    agent.learn(700, progress=False)
    action, _ = agent.predict(np.full(1, 0.5))
    assert action[0] == pytest.approx(2.0, abs=0.3)


def test_one_update_moves_all_parts_and_reports() -> None:
    agent = probe_agent()
    agent.learn(64, progress=False)
    before = copy.deepcopy(agent)
    metrics = agent.update(agent.sample()).metrics
    for part in ("actor", "critics", "target_critics", "temperature"):
        pairs = zip(
            getattr(agent, part).parameters(), getattr(before, part).parameters(), strict=True
        )
        assert all(bool((a != b).any()) for a, b in pairs), part
    of_critics = ["loss", "q_mean", "q_std", "target_mean", "td_error_abs"]
    assert list(metrics) == [*of_critics, "actor_loss", "entropy", "alpha"]
    assert all(value.isfinite() and not value.requires_grad for value in metrics.values())
    assert all(value.shape == () for value in metrics.values())


@pytest.mark.parametrize("agent_class", [SAC, REDQ])
def test_gradients_are_those_of_the_equations(agent_class: type[SAC]) -> None:
    agent = agent_class("Pendulum-v1", **SMALL, initial_alpha=0.2)
    agent.learn(64, progress=False)
    batch, alpha = agent.sample(), agent.temperature().detach()
    next_noise, noise = agent.sample_noise(32), agent.sample_noise(32)
    chosen = agent.choose_critics()

    def sample(obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = agent.actor(obs)
        gaussian = torch.distributions.Normal(mean, log_std.exp())
        tanh = torch.distributions.TanhTransform(cache_size=1)
        action = tanh(mean + log_std.exp() * noise)
        policy = torch.distributions.TransformedDistribution(gaussian, [tanh])
        return action, policy.log_prob(action).sum(dim=1)

    with torch.no_grad():
        next_action, next_log_prob = sample(batch.next_obs, next_noise)
        next_q = agent.target_critics(batch.next_obs, next_action)
        next_q = next_q if chosen is None else next_q[:, chosen]
        soft = next_q.min(dim=1).values - alpha * next_log_prob
        y = batch.reward + batch.discount * (1 - batch.terminated.float()) * soft
    q = agent.critics(batch.obs, batch.action)
    loss = sum((q[:, i] - y).square().mean() for i in range(q.shape[1]))
    expected = torch.autograd.grad(loss, list(agent.critics.parameters()))
    agent.critic_gradients(batch, next_noise, chosen)
    torch.testing.assert_close(gradients(agent.critics), list(expected), atol=1e-5, rtol=1e-4)

    agent.critic_optimizer.zero_grad()
    action, log_prob = sample(batch.obs, noise)
    q = agent.critics(batch.obs, action)
    value = q.min(dim=1).values if agent_class is SAC else q.mean(dim=1)
    loss = (alpha * log_prob - value).mean()
    expected = torch.autograd.grad(loss, list(agent.actor.parameters()))
    agent.actor_gradients(batch.obs, noise)
    torch.testing.assert_close(gradients(agent.actor), list(expected), atol=1e-5, rtol=1e-4)
    assert not gradients(agent.critics), "the actor's loss is not the critics' business"
    (slope,) = gradients(agent.temperature)
    torch.testing.assert_close(slope, -log_prob.detach().mean() + 1)  # entropy minus its target


def test_actor_learns_from_the_critics_after_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = probe_agent()
    agent.learn(64, progress=False)
    seen: dict[str, list[Tensor]] = {}

    def watch(name: str) -> None:
        method = getattr(agent, name)

        def watched(*arguments: Any) -> Any:
            seen[name] = [p.detach().clone() for p in agent.critics.parameters()]
            return method(*arguments)

        monkeypatch.setattr(agent, name, watched)

    watch("critic_gradients")
    watch("actor_gradients")
    agent.update(agent.sample())
    after = list(agent.critics.parameters())
    pairs = zip(seen["critic_gradients"], seen["actor_gradients"], after, strict=True)
    for before, middle, end in pairs:
        assert (before != middle).any() and torch.equal(middle, end)


def test_targets_move_the_fraction_tau() -> None:
    agent = probe_agent({"tau": 0.25})
    agent.learn(64, progress=False)
    before = [p.clone() for p in agent.target_critics.parameters()]
    agent.update(agent.sample())
    parts = zip(before, agent.critics.parameters(), agent.target_critics.parameters(), strict=True)
    for old, critic, target in parts:
        torch.testing.assert_close(target, 0.75 * old + 0.25 * critic.detach())
        assert not target.requires_grad


def test_fixed_entropy_coefficient_stays() -> None:
    agent = probe_agent({"learn_alpha": False, "initial_alpha": 0.25})
    result = agent.learn(100, progress=False)
    assert result.agent.updates > 0
    assert agent.temperature().item() == pytest.approx(0.25)
    assert result.agent.update(agent.sample()).metrics["alpha"] == pytest.approx(0.25)


def test_greedy_actions_are_not_random_and_sampled_ones_own_their_generator() -> None:
    agent = probe_agent()
    agent.global_step = 1_000  # past the random steps
    torch.manual_seed(1)
    first = agent.predict(np.zeros((3, 1)))[0]
    torch.manual_seed(2)
    np.testing.assert_array_equal(first, agent.predict(np.zeros((3, 1)))[0])
    assert first.shape == (3, 1)
    noisy = [agent.predict(np.zeros((3, 1)), deterministic=False)[0] for _ in range(2)]
    assert (noisy[0] != noisy[1]).all()
    twin = probe_agent()
    twin.global_step = 1_000
    np.testing.assert_array_equal(noisy[0], twin.predict(np.zeros((3, 1)), deterministic=False)[0])


def test_gradient_steps_are_counted_by_environment_steps() -> None:
    settings = {"gradient_steps": 3, "num_envs": 2}
    agent = probe_agent(settings)
    agent.learn(100, progress=False)
    assert agent.updates == 3 * (100 - SMALL["learning_starts"])


def test_save_and_load(tmp_path: Path) -> None:
    agent = probe_agent()
    agent.learn(90, progress=False)
    agent.save(tmp_path / "agent.pt")
    again = SAC.load(tmp_path / "agent.pt")
    obs = np.linspace(-1, 1, 5)[:, None]
    np.testing.assert_array_equal(agent.predict(obs)[0], again.predict(obs)[0])
    first, second = agent.update(agent.sample()), again.update(again.sample())
    assert first.metrics == second.metrics  # buffer, optimisers, generator, coefficient came along


def crash_at(monkeypatch: pytest.MonkeyPatch, updates: int) -> None:
    """Let the process 'die' in the middle of a run."""
    real = SAC.update

    def update(self: SAC, batch: Any) -> Any:
        if self.updates == updates:
            raise MemoryError("the power went out")
        return real(self, batch)

    monkeypatch.setattr(SAC, "update", update)


def test_resumed_run_is_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SMALL, "eval_every": 100, "eval_episodes": 2, "log_every": 50, "total_steps": 320}

    def config(name: str) -> SACConfig:
        run_dir = str(tmp_path / name)
        return SACConfig(env_id="Pendulum-v1", checkpoint_every=80, run_dir=run_dir, **settings)

    whole = train_sac(config("whole"), progress=False)
    with monkeypatch.context() as patch:
        crash_at(patch, updates=150)
        with pytest.raises(MemoryError):
            train_sac(config("cut"), progress=False)
    again = resume(tmp_path / "cut", progress=False)
    assert again.metrics == whole.metrics
    assert_same_run(tmp_path / "whole", tmp_path / "cut")  # buffer and noise included
    last = (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()[-1]
    assert {"global_step", "eval_return_mean"} <= json.loads(last).keys()


# Bad input


@pytest.mark.parametrize(
    "bounds", [{"low": -np.inf}, {"high": np.inf}, {"low": -np.inf, "high": np.inf}]
)
def test_unbounded_actions_are_refused(bounds: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'Probe-v0' has actions without finite bounds") as error:
        probe_agent(**bounds)
    assert "\n" not in str(error.value)


def test_actions_that_cannot_vary_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot vary"):
        probe_agent(low=1.0, high=1.0)
    with pytest.raises(ValueError, match="cannot vary"):
        probe_agent(low=0, high=5, action_dtype="int8")


def test_discrete_actions_name_dqn() -> None:
    with pytest.raises(ValueError, match=r"discrete actions .* try dqn"):
        SAC("CartPole-v1")


@pytest.mark.parametrize("broken", ["reward", "observation"])
def test_numbers_that_are_not_finite_name_the_step(broken: str) -> None:
    with pytest.raises(RunFailed, match=rf"{broken} that is not finite.* step 2"):
        probe_agent(broken=broken).learn(10, progress=False)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gradient_steps", 0, "at least 1, not 0"),
        ("tau", 0, "above 0"),
        ("lr", -1, "above 0"),
        ("gamma", 1.5, "at most 1"),
        ("initial_alpha", 0, "above 0"),
        ("hidden", [0], "at least 1"),
        ("batch_size", 10**9, "must not exceed 'buffer_size'"),
        ("target_entropy", "low", "must be"),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SACConfig(**{name: value})


def shell_mistake(line: str, capsys: pytest.CaptureFixture[str], expected_code: int = 2) -> str:
    """Run a line that is wrong and return the one sentence that says so."""
    code = main(shlex.split(line))
    out, err = capsys.readouterr()
    assert code == expected_code and err.count("\n") == 1 and "Traceback" not in err
    assert "Done" not in out
    return str(err)


@pytest.mark.parametrize("algo", ["sac", "redq"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--env-id CartPole-v1", "discrete actions (Discrete(2))"),
        ("--env-id CartPole-v1", "try dqn"),
        ("--env-id Probe-v0 --env-kwargs '{low: -.inf}'", "without finite bounds on both sides"),
        ("--env-id Probe-v0 --env-kwargs '{high: .inf}'", "without finite bounds on both sides"),
        ("--env-id Probe-v0 --env-kwargs '{low: 1.0}'", "cannot vary between real bounds"),
        ("--gradient-steps 0", "Setting 'gradient_steps' must be at least 1, not 0."),
        ("--policy-delay 0", "Setting 'policy_delay' must be at least 1, not 0."),
        ("--initial-alpha 0", "Setting 'initial_alpha' must be above 0, not 0.0."),
    ],
)
def test_mistakes_in_the_shell_are_one_sentence(
    algo: str,
    flags: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in shell_mistake(f"train {algo} {flags}", capsys)


@pytest.mark.parametrize("broken", ["reward", "observation"])
def test_a_broken_environment_ends_the_run_in_the_shell(
    broken: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    line = f"train sac --env-id Probe-v0 --env-kwargs '{{broken: {broken}}}'"
    assert f"{broken} that is not finite, step 2" in shell_mistake(line, capsys, expected_code=1)


def test_a_session_in_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = "--hidden 8 --batch-size 16 --learning-starts 32 --eval-every 0"
    for algo in ("sac", "redq"):
        extra = "--num-critics 3 --gradient-steps 2" if algo == "redq" else ""
        run = f"--run-dir runs/{algo} --total-steps 40"
        assert main(shlex.split(f"train {algo} --config pendulum {tiny} {extra} {run}")) == 0
        assert main(shlex.split(f"resume runs/{algo} --total-steps 45")) == 0
        assert main(shlex.split(f"evaluate runs/{algo} --episodes 1")) == 0
        capsys.readouterr()
        assert main(["predict", f"runs/{algo}", "--observation", "[1, 0, 0.5]"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert -2 <= answer["action"][0] <= 2
        assert len(answer["q_values"]) == (2 if algo == "sac" else 3)  # one of each critic


def test_shipped_pendulum_config_makes_an_agent() -> None:
    settings = read_settings(shipped_configs()["sac/pendulum"])
    assert settings.pop("algo") == "sac"
    assert SAC(config=make_config(SACConfig, settings)).config.total_steps == 10_000


def test_shipped_hopper_config_trains() -> None:
    pytest.importorskip("mujoco")
    pytest.importorskip("imageio")  # Gymnasium's renderer imports it
    settings = read_settings(shipped_configs()["sac/hopper"])
    assert settings.pop("algo") == "sac"
    agent = SAC(
        config=make_config(SACConfig, {**settings, "learning_starts": 130, "eval_every": 0})
    )
    agent.learn(135, progress=False)
    assert agent.updates == 5
