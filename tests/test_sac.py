"""SAC: its density, its critics, its losses, its bounds, and a run that is cut off and resumed."""

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
from critics import random_loss_inputs
from helpers import assert_same_run
from scipy.integrate import quad
from torch import Tensor

from rlbook.cli import main
from rlbook.redq import REDQ
from rlbook.replay import Batch
from rlbook.run import resume
from rlbook.sac import (
    SAC,
    ActionScale,
    Critics,
    NoiseSource,
    SACConfig,
    SACModel,
    log_slope,
    policy_loss,
    policy_slopes,
    sac_loss,
    squashed_sample,
    temperature_slope,
    train_sac,
)
from rlbook.settings import make_config, read_settings, shipped_configs

SMALL: dict[str, Any] = {
    "hidden": (16, 16),
    "batch_size": 32,
    "warmup_steps": 64,
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


def test_slope_has_finite_gradients() -> None:
    u = torch.tensor([-40.0, -5.0, 0.0, 5.0, 40.0], requires_grad=True)
    log_slope(u).sum().backward()
    assert u.grad is not None
    torch.testing.assert_close(u.grad, -2 * torch.tanh(u.detach()), atol=1e-5, rtol=1e-5)


# The critics


def test_chosen_critics_are_columns_of_all() -> None:
    critics = Critics(3, 2, (8, 8), members=5)
    obs, action, chosen = torch.randn(4, 3), torch.randn(4, 2), torch.tensor([3, 0])
    torch.testing.assert_close(critics(obs, action, chosen), critics(obs, action)[:, chosen])


def test_critics_that_only_judge_get_no_gradient() -> None:
    critics = Critics(3, 2, (8, 8), members=2)
    action = torch.randn(4, 2, requires_grad=True)
    critics(torch.randn(4, 3), action, learn=False).sum().backward()
    assert action.grad is not None and action.grad.abs().sum() > 0
    assert all(weight.grad is None for weight in critics.parameters())


def test_policy_listens_to_the_smaller_critic() -> None:
    model, q = SACModel(3, 2, (8,)), torch.randn(6, 2)
    torch.testing.assert_close((model.share(q) * q).sum(dim=1), q.min(dim=1).values)
    assert torch.equal(model.share(torch.zeros(4, 2)).sum(dim=1), torch.ones(4))  # a tie is one


# The losses


def test_loss_is_that_of_numpy() -> None:
    for batch in (1, 7, 64):
        inputs = random_loss_inputs(batch, batch, 2, 2)
        loss, metrics = sac_loss(**inputs)
        x = {name: value.numpy() for name, value in inputs.items()}
        soft = x["next_q"].min(axis=1) - x["alpha"] * x["next_log_prob"]
        y = x["reward"] + x["discount"] * np.where(x["terminated"], 0, soft)
        errors = x["q"] - y[:, None]
        assert float(loss) == pytest.approx((errors**2).mean(0).sum())
        assert float(metrics["q_mean"]) == pytest.approx(x["q"].mean())
        assert float(metrics["target_mean"]) == pytest.approx(y.mean())
        assert float(metrics["td_error_abs"]) == pytest.approx(np.abs(errors).mean())


@pytest.mark.parametrize("name", ["reward", "discount", "terminated", "next_log_prob"])
def test_loss_refuses_shapes_that_would_broadcast(name: str) -> None:
    inputs = random_loss_inputs(0, 8, 2, 2)
    inputs[name] = inputs[name].unsqueeze(1)
    with pytest.raises(ValueError, match=name):
        sac_loss(**inputs)


def test_loss_refuses_values_of_another_batch() -> None:
    inputs = random_loss_inputs(0, 8, 2, 2)
    with pytest.raises(ValueError, match="next_q"):
        sac_loss(**{**inputs, "next_q": inputs["next_q"].t()})
    with pytest.raises(ValueError, match="log_prob"):
        policy_loss(torch.zeros(8), torch.zeros(8, 1), torch.tensor(1.0))


@pytest.mark.parametrize(("entropy", "sign"), [(-3.0, 1), (1.0, -1)])
def test_temperature_rises_while_entropy_is_too_low(entropy: float, sign: int) -> None:
    slope = temperature_slope(entropy, target_entropy=-1.0)
    assert math.copysign(1, -slope) == sign  # the step is against the slope


def test_slopes_of_the_policy_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    mean, log_std, noise = torch.randn(3, 8, 2, dtype=torch.float64)
    mean, log_std = mean.requires_grad_(), log_std.requires_grad_()
    action, log_prob = squashed_sample(mean, log_std, noise)
    q, alpha = (action.square() + action.prod(dim=1, keepdim=True)).sum(dim=1), 0.3
    (q_slope,) = torch.autograd.grad(q.sum(), action, retain_graph=True)
    expected = torch.autograd.grad(policy_loss(q, log_prob, alpha), [mean, log_std])
    with torch.no_grad():
        found = policy_slopes(action, log_std.exp() * noise, q_slope, alpha) / len(noise)
    torch.testing.assert_close(found, torch.cat(expected, dim=1))


# The agent


@pytest.mark.parametrize(("low", "high"), [(-2.0, 2.0), (3.0, 3.5), (-1e6, 10.0), (0.1, 0.7)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_any_finite_bounds(low: float, high: float, dtype: str) -> None:
    agent = probe_agent(low=low, high=high, action_dtype=dtype)
    agent.learn(120, progress=False)  # the probe asserts that actions are in its space
    stored = agent.replay.rows["action"][: len(agent.replay)]
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
    assert not agent.replay.rows["terminated"].any()
    agent = probe_agent(length=3, terminates=True)
    agent.learn(12, progress=False)
    np.testing.assert_array_equal(np.flatnonzero(agent.replay.rows["terminated"]), [2, 5, 8, 11])


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
    learned = [*agent.model.parameters(), agent.temperature.log_alpha]
    before = [weight.detach().clone() for weight in learned]
    result = agent.update(agent.sample())
    after = [*agent.model.parameters(), agent.temperature.log_alpha]
    moved = [bool((a != b).any()) for a, b in zip(after, before, strict=True)]
    assert all(moved)
    assert math.isfinite(result.loss)
    brief = ["loss", "policy_loss", "entropy", "alpha"]
    assert list(result.brief) == brief
    assert list(result.metrics) == [*brief, "q_mean", "target_mean", "td_error_abs"]


def autograd_gradients(agent: SAC, batch: Batch, noise: Tensor) -> list[Tensor]:
    """The gradients of critics, actor and temperature, from the losses by autograd alone."""
    model, alpha = agent.model, agent.temperature.alpha()
    log_alpha = agent.temperature.log_alpha.clone().requires_grad_()
    next_noise, noise = noise.chunk(2)
    with torch.no_grad():
        next_action, next_log_prob = squashed_sample(*model.policy(batch.next_obs), next_noise)
        next_q = agent.target(batch.next_obs, next_action, agent.choose_critics())
    q = model.critics(batch.obs, batch.action)
    reward, discount, terminated = batch.reward, batch.discount, batch.terminated
    loss, _ = sac_loss(q, reward, discount, terminated, next_q, next_log_prob, alpha)
    action, log_prob = squashed_sample(*model.policy(batch.obs), noise)
    values = model.critics(batch.obs, action, learn=False)
    value = values.amin(dim=1) if agent.name == "sac" else values.mean(dim=1)
    total = loss + policy_loss(value, log_prob, alpha)
    total = total - log_alpha * (log_prob.detach() + agent.temperature.target_entropy).mean()
    return list(torch.autograd.grad(total, [model.critics.weights, model.actor.weights, log_alpha]))


@pytest.mark.parametrize("agent_class", [SAC, REDQ])
@pytest.mark.parametrize("wide", [False, True])
def test_update_follows_the_gradient_of_the_losses(agent_class: type[SAC], wide: bool) -> None:
    settings = {**SMALL, "policy_delay": 1, "updates_per_step": 1, "initial_alpha": 0.2}
    agent = agent_class("Pendulum-v1", **settings)
    agent.learn(64, progress=False)
    if wide:  # the log std of some actions is held at its limit
        agent.model.actor.weights.data[:, -1] = 2.0
    batch, state = agent.sample(), agent.noise.state_dict()
    noise = torch.empty(2 * len(batch.reward), 1).normal_(generator=agent.noise.generator)
    expected = autograd_gradients(agent, batch, noise)
    agent.noise.load_state_dict(state)
    agent.update(batch)
    parts = [agent.model.critics.weights, agent.model.actor.weights, agent.temperature.log_alpha]
    for part, gradient in zip(parts, expected, strict=True):
        assert part.grad is not None
        torch.testing.assert_close(part.grad, gradient, atol=1e-5, rtol=1e-4)


def test_fixed_temperature_stays() -> None:
    agent = probe_agent({"learn_alpha": False, "initial_alpha": 0.25})
    result = agent.learn(100, progress=False)
    assert result.agent.updates > 0
    assert float(agent.temperature.log_alpha.exp()) == pytest.approx(0.25)


def test_greedy_actions_need_no_chance_and_random_ones_own_it() -> None:
    agent = probe_agent()
    agent.global_step = 1_000  # past the warm-up
    torch.manual_seed(1)
    first = agent.predict(np.zeros((3, 1)))[0]
    torch.manual_seed(2)
    np.testing.assert_array_equal(first, agent.predict(np.zeros((3, 1)))[0])
    assert first.shape == (3, 1)
    noisy = [agent.predict(np.zeros((3, 1)), explore=True)[0] for _ in range(2)]
    assert (noisy[0] != noisy[1]).all()
    twin = probe_agent()
    twin.global_step = 1_000
    np.testing.assert_array_equal(noisy[0], twin.predict(np.zeros((3, 1)), explore=True)[0])


def test_updates_per_step_counts_environment_steps() -> None:
    settings = {"updates_per_step": 3, "num_envs": 2}
    agent = probe_agent(settings)
    agent.learn(100, progress=False)
    assert agent.updates == 3 * (100 - SMALL["warmup_steps"])


def test_save_and_load(tmp_path: Path) -> None:
    agent = probe_agent()
    agent.learn(90, progress=False)
    agent.save(tmp_path / "agent.pt")
    again = SAC.load(tmp_path / "agent.pt")
    obs = np.linspace(-1, 1, 5)[:, None]
    np.testing.assert_array_equal(agent.predict(obs)[0], again.predict(obs)[0])
    first, second = agent.update(agent.sample()), again.update(again.sample())
    assert first.metrics == second.metrics  # buffer, optimiser, noise and temperature came along


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
    with pytest.raises(ValueError, match=rf"{broken} that is not finite.* step 2"):
        probe_agent(broken=broken).learn(10, progress=False)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("updates_per_step", 0, "at least 1, not 0"),
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


def shell_mistake(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a line that is wrong and return the one sentence that says so."""
    code = main(shlex.split(line))
    out, err = capsys.readouterr()
    assert code == 2 and err.count("\n") == 1 and "Traceback" not in err
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
        ("--updates-per-step 0", "Setting 'updates_per_step' must be at least 1, not 0."),
        ("--policy-delay 0", "Setting 'policy_delay' must be at least 1, not 0."),
        ("--initial-alpha 0", "Setting 'initial_alpha' must be above 0, not 0.0."),
        ("--env-id Probe-v0 --env-kwargs '{broken: reward}'", "reward that is not finite, step 2"),
        ("--env-id Probe-v0 --env-kwargs '{broken: observation}'", "not finite, step 2"),
    ],
)
def test_mistakes_in_the_shell_are_one_sentence(
    algo: str, flags: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in shell_mistake(f"train {algo} {flags}", capsys)


def test_a_session_in_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = "--hidden 8 --batch-size 16 --warmup-steps 32 --eval-every 0"
    for algo in ("sac", "redq"):
        extra = "--num-critics 3 --updates-per-step 2" if algo == "redq" else ""
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
    agent = SAC(config=make_config(SACConfig, {**settings, "warmup_steps": 130, "eval_every": 0}))
    agent.learn(135, progress=False)
    assert agent.updates == 5


def test_noise_is_drawn_on_the_cpu_so_that_any_device_can_load_it() -> None:
    noise = NoiseSource(0, torch.device("meta"))
    assert noise.normal(2, 3).device.type == "meta"
    assert noise.state_dict()["generator"].numel() == torch.Generator().get_state().numel()
