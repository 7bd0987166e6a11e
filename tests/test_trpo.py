"""TRPO: the Fisher matrix and its solver against NumPy, the trust region over a run, resuming."""

import copy
import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same
from rollouts import RUN, check_killed_before, check_killed_within_a_rollout
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

from rlbook.agent import Metrics
from rlbook.cli import main
from rlbook.policy_gradient import CategoricalPolicy, GaussianPolicy, RolloutBatch
from rlbook.run import Collector, train
from rlbook.settings import make_config, read_settings, shipped_configs
from rlbook.trpo import (
    TRPO,
    TRPOConfig,
    conjugate_gradient,
    fisher_product,
    flatten,
    largest_step,
    line_search,
    mean_kl,
    set_parameters,
    train_trpo,
    trpo_loss,
    value_loss,
)

SMALL: dict[str, Any] = {
    "hidden": (8,),
    "num_envs": 2,
    "num_steps": 8,
    "minibatch_size": 8,
    "value_epochs": 2,
    "eval_every": 0,
    "seed": 3,
}
BOTH = pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])


def filled(agent: TRPO) -> RolloutBatch:
    """Step until the rollout is full, and return it."""
    agent.rollout.clear()
    collector = Collector(agent)
    while not agent.rollout.full:
        collector.step()
    collector.envs.close()
    return agent.finish_rollout()


# The losses


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_losses_are_those_of_numpy(batch: int) -> None:
    x = np.random.default_rng(batch).normal(size=(5, batch))
    log_prob, old, advantage, value, returns = torch.from_numpy(x)
    surrogate = np.mean([np.exp(a) / np.exp(b) * c for a, b, c in zip(*x[:3], strict=True)])
    assert trpo_loss(log_prob, old, advantage).item() == pytest.approx(-surrogate)
    squares = [(v - y) ** 2 for v, y in zip(*x[3:], strict=True)]
    assert value_loss(value, returns).item() == pytest.approx(np.mean(squares))


@pytest.mark.parametrize("place", range(3))
def test_losses_refuse_shapes_that_would_broadcast(place: int) -> None:
    names = ("log_prob", "old_log_prob", "advantage")
    inputs = [torch.zeros(4) for _ in names]
    inputs[place] = inputs[place].unsqueeze(1)
    with pytest.raises(ValueError, match=names[place]):
        trpo_loss(*inputs)
    if place < 2:
        with pytest.raises(ValueError, match=("value", "returns")[place]):
            value_loss(*inputs[:2])


# The KL divergence


def test_kl_of_two_choices_by_hand() -> None:
    old, new = (Categorical(probs=torch.tensor([[p, 1 - p]])) for p in (0.5, 0.75))
    by_hand = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert mean_kl(old, new).item() == pytest.approx(by_hand, abs=1e-6)
    assert mean_kl(old, old) == 0 and mean_kl(new, old) != mean_kl(old, new)


def test_kl_of_gaussians_sums_over_dimensions_and_averages_over_states() -> None:
    rng = np.random.default_rng(0)
    means, stds = rng.normal(size=(2, 5, 3)), np.exp(rng.normal(size=(2, 5, 3)))
    old, new = (
        Independent(Normal(*torch.from_numpy(np.stack([m, s]))), 1)
        for m, s in zip(means, stds, strict=True)
    )
    (m, n), (s, t) = means, stds
    each = np.log(t / s) + (s**2 + (m - n) ** 2) / (2 * t**2) - 0.5
    assert mean_kl(old, new).item() == pytest.approx(each.sum(axis=1).mean())


# The Fisher matrix


def score_matrix(policy: nn.Module, obs: Tensor) -> np.ndarray:
    """Return the Fisher matrix as it is defined, the mean of outer products of score vectors."""
    parameters, rows = list(policy.parameters()), []
    for one in obs:
        distribution = policy(one.unsqueeze(0))
        for action, probability in enumerate(distribution.probs[0].tolist()):
            log_prob = distribution.log_prob(torch.tensor([action])).sum()
            score = torch.autograd.grad(log_prob, parameters, retain_graph=True)
            rows.append(math.sqrt(probability / len(obs)) * flatten(score).double().numpy())
    return np.array(rows).T @ np.array(rows)


def products(policy: nn.Module, obs: Tensor, damping: float = 0.0) -> Callable[[Tensor], Tensor]:
    """Return the products of the Fisher matrix of a policy at some observations."""
    with torch.no_grad():
        old = policy(obs)
    return fisher_product(mean_kl(old, policy(obs)), list(policy.parameters()), damping)


@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_two_backward_passes_give_the_explicit_fisher_matrix(damping: float) -> None:
    torch.manual_seed(0)
    policy, obs = CategoricalPolicy(3, 4, (5,), orthogonal=False), torch.randn(6, 3)
    product = products(policy, obs, damping)
    size = flatten(policy.parameters()).numel()
    found = torch.stack([product(row) for row in torch.eye(size)]).numpy()
    expected = score_matrix(policy, obs) + damping * np.eye(size)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.abs(expected).max() > 0.01


def test_the_fisher_matrix_of_a_gaussian_is_known() -> None:
    """For a mean and a log std it is diag(1 / std^2, 2)."""
    policy = GaussianPolicy(1, 1, (), initial_std=0.5)
    product = products(policy, torch.ones(4, 1))
    found = torch.stack([product(row) for row in torch.eye(3)])  # log std, weight, bias
    expected = torch.tensor([[2.0, 0, 0], [0, 4, 4], [0, 4, 4]])  # the mean is weight + bias
    torch.testing.assert_close(found, expected)


def test_the_fisher_matrix_predicts_the_kl_of_a_small_step() -> None:
    torch.manual_seed(1)
    policy, obs = GaussianPolicy(3, 2, (8,)), torch.randn(16, 3)
    with torch.no_grad():
        old = policy(obs)
    parameters = list(policy.parameters())
    product, start = products(policy, obs), flatten(parameters).detach()
    step = largest_step(product, torch.randn_like(start), target_kl=1e-4)
    set_parameters(parameters, start + step)
    assert mean_kl(old, policy(obs)).item() == pytest.approx(1e-4, rel=0.1)
    set_parameters(parameters, start)
    assert torch.equal(flatten(parameters), start)


# Conjugate gradients


@pytest.mark.parametrize("size", [1, 5, 40])
def test_conjugate_gradients_solve_what_numpy_solves(size: int) -> None:
    rng = np.random.default_rng(size)
    root = rng.normal(size=(size, size))
    matrix, b = root @ root.T + np.eye(size), rng.normal(size=size)
    found = conjugate_gradient(torch.from_numpy(matrix).mv, torch.from_numpy(b), 3 * size)
    np.testing.assert_allclose(found.numpy(), np.linalg.solve(matrix, b), rtol=1e-3, atol=1e-4)


def test_conjugate_gradients_need_as_many_steps_as_there_are_eigenvalues() -> None:
    matrix, b = torch.diag(torch.tensor([1.0, 1, 1, 7, 7, 7])), torch.ones(6)
    calls = 0

    def product(vector: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return matrix @ vector

    found = conjugate_gradient(product, b, 6)
    assert calls == 2
    torch.testing.assert_close(found, b / matrix.diag())


def test_one_iteration_is_the_plain_gradient() -> None:
    matrix, b = torch.tensor([[4.0, 1], [1, 3]]), torch.tensor([1.0, 2])
    found = conjugate_gradient(matrix.mv, b, 1)
    torch.testing.assert_close(found, b * (b @ b) / (b @ matrix @ b))


def test_no_gradient_is_no_step() -> None:
    zero = conjugate_gradient(torch.eye(3).mv, torch.zeros(3), 10)
    assert torch.equal(largest_step(torch.eye(3).mv, zero, 0.01), torch.zeros(3))


def test_the_largest_step_reaches_the_bound_to_second_order() -> None:
    matrix, direction = torch.tensor([[4.0, 1], [1, 3]]), torch.tensor([1.0, -2])
    step = largest_step(matrix.mv, direction, 0.02)
    assert (step @ matrix @ step / 2).item() == pytest.approx(0.02)
    assert (step / direction).std() == 0


# The line search


def search(**keywords: Any) -> tuple[float, int, list[float]]:
    """Search along a line on which the improvement is known; return what was tried, too."""
    tried: list[float] = []
    improvement, kl = keywords["improvement"], keywords["kl"]

    def attempt(fraction: float) -> tuple[Tensor, Tensor]:
        tried.append(fraction)
        return torch.tensor(improvement(fraction)), torch.tensor(kl(fraction))

    return *line_search(attempt, 0.01, 0.5, 4), tried


def test_line_search_takes_the_first_fraction_that_is_good() -> None:
    found = search(improvement=lambda x: x, kl=lambda x: 0.02 * x)
    assert found == (0.5, 2, [1.0, 0.5])  # the whole step is too far
    found = search(improvement=lambda x: 0.3 - x, kl=lambda x: 0.0)
    assert found == (0.25, 3, [1.0, 0.5, 0.25])  # half of it does not improve
    assert search(improvement=lambda x: x, kl=lambda x: 0.01)[:2] == (1.0, 1)


@pytest.mark.parametrize("bad", [-1.0, 0.0, math.nan])
def test_line_search_gives_up(bad: float) -> None:
    found = search(improvement=lambda x: bad, kl=lambda x: 0.0)
    assert found == (0.0, 4, [1.0, 0.5, 0.25, 0.125])
    assert search(improvement=lambda x: 1.0, kl=lambda x: math.nan)[0] == 0


# The step


@BOTH
def test_the_step_is_the_natural_gradient_of_numpy(env_id: str) -> None:
    agent = TRPO(env_id, **SMALL, cg_iterations=200, line_search=False, damping=0.1)
    batch = filled(agent)
    parameters = list(agent.policy.parameters())
    start = flatten(parameters).detach().clone()
    size = len(start)
    product = products(agent.policy, batch.obs)
    fisher = torch.stack([product(row) for row in torch.eye(size)]).double().numpy()
    fisher += 0.1 * np.eye(size)
    advantage = (batch.advantage - batch.advantage.mean()) / batch.advantage.std(correction=0)
    surrogate = (agent.policy(batch.obs).log_prob(batch.action) * advantage).mean()
    gradient = flatten(torch.autograd.grad(surrogate, parameters)).double().numpy()
    direction = np.linalg.solve(fisher, gradient)
    expected = math.sqrt(2 * 0.01 / (direction @ fisher @ direction)) * direction
    agent.update_policy(batch)
    moved = (flatten(parameters) - start).detach().numpy()
    np.testing.assert_allclose(moved, expected, atol=2e-4 * np.abs(expected).max())


@BOTH
def test_kl_stays_in_the_trust_region_over_a_run(
    env_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the metrics say, and what the policies before and after a step say themselves."""
    seen: list[Metrics] = []
    real = TRPO.update_policy

    def watched(agent: TRPO, batch: RolloutBatch) -> Metrics:
        with torch.no_grad():
            old = agent.policy(batch.obs)
        metrics = real(agent, batch)
        with torch.no_grad():
            torch.testing.assert_close(mean_kl(old, agent.policy(batch.obs)), metrics["kl"])
        seen.append(metrics)
        return metrics

    monkeypatch.setattr(TRPO, "update_policy", watched)
    settings = {**SMALL, "num_steps": 32, "target_kl": 0.05, "damping": 1e-3}
    TRPO(env_id, **settings).learn(64 * 60, progress=False)
    kl, improvement, accepted, steps = (
        np.array([float(metrics[name]) for metrics in seen])
        for name in ("kl", "improvement", "accepted", "line_search_steps")
    )
    assert len(kl) == 60 and kl.max() <= 0.05 and kl.max() > 0.03
    assert (improvement[accepted == 1] > 0).all() and (kl[accepted == 0] == 0).all()
    assert steps.max() > 1 and accepted.mean() > 0.8  # some steps had to be shortened


@BOTH
def test_without_the_line_search_steps_leave_the_region(env_id: str) -> None:
    settings = {**SMALL, "num_steps": 32, "target_kl": 0.05, "damping": 1e-3, "line_search": False}
    agent, kl = TRPO(env_id, **settings), []
    for _ in range(30):
        kl.append(float(agent.update(filled(agent)).metrics["kl"]))
    assert max(kl) > 0.05


@pytest.mark.parametrize("factor", [-100, torch.inf])
def test_a_step_that_never_improves_is_not_made(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = TRPO("CartPole-v1", **SMALL)
    batch = filled(agent)
    before = copy.deepcopy(agent.policy.state_dict())
    values = copy.deepcopy(agent.value_network.state_dict())
    monkeypatch.setattr("rlbook.trpo.largest_step", lambda product, x, target_kl: factor * x)
    metrics = agent.update(batch).metrics
    assert metrics["accepted"] == 0 and metrics["line_search_steps"] == 10
    assert metrics["kl"] == 0 and metrics["improvement"] == 0
    assert_same(before, agent.policy.state_dict())
    moved = agent.value_network.state_dict()
    assert not torch.equal(values["mlp.0.weight"], moved["mlp.0.weight"])


def test_equal_advantages_leave_the_policy_alone() -> None:
    agent = TRPO("CartPole-v1", **SMALL)
    batch = filled(agent)
    batch.advantage = torch.ones(16)
    before = copy.deepcopy(agent.policy.state_dict())
    metrics = agent.update(batch).metrics
    assert metrics["accepted"] == 0 and all(value.isfinite() for value in metrics.values())
    assert_same(before, agent.policy.state_dict())


def test_values_learn_by_their_own_optimiser() -> None:
    agent = TRPO("CartPole-v1", **SMALL)
    (group,) = agent.optimizer.param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in agent.value_network.parameters()}
    batch = filled(agent)
    before = copy.deepcopy(agent.policy.state_dict())
    agent.compute_gradients(batch)
    agent.optimizer.step()
    assert_same(before, agent.policy.state_dict())
    assert all(parameter.grad is None for parameter in agent.policy.parameters())


def test_each_epoch_shows_the_values_each_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, seen = TRPO("CartPole-v1", **SMALL), list[RolloutBatch]()
    real = agent.compute_gradients

    def remember(batch: RolloutBatch) -> Metrics:
        seen.append(batch)
        return real(batch)

    monkeypatch.setattr(agent, "compute_gradients", remember)
    batch = filled(agent)
    agent.update(batch)
    assert [len(minibatch) for minibatch in seen] == [8] * 4
    for epoch in (seen[:2], seen[2:]):
        returns = torch.cat([minibatch.returns for minibatch in epoch])
        assert torch.equal(returns.sort().values, batch.returns.sort().values)
        assert not torch.equal(returns, batch.returns)


def test_one_update_for_each_rollout_with_named_metrics() -> None:
    agent = TRPO("CartPole-v1", **SMALL, log_every=16)
    result = agent.learn(64, progress=False)
    assert agent.updates == 4 and agent.rollout.size == 0
    names = {"loss", "policy_loss", "value_loss", "kl", "improvement", "line_search_steps"}
    for line in result.history:
        assert names | {"accepted", "entropy", "explained_variance"} <= set(line)
        assert line["loss"] == pytest.approx(line["policy_loss"] + line["value_loss"])


def test_learning_rate_of_the_values_falls() -> None:
    agent = TRPO("CartPole-v1", **SMALL, total_steps=64, lr_decay_from=0.5, lr=1e-3)
    train(agent, progress=False)
    assert agent.optimizer.param_groups[0]["lr"] == 0


# Known values


PROBE: dict[str, Any] = {
    **{"hidden": (16,), "num_steps": 16, "minibatch_size": 32, "lr": 5e-3},
    **{"gamma": 0.9, "eval_every": 0, "seed": 0},
}


def test_known_values() -> None:
    two = TRPO("rlbook/TwoStep-v0", **PROBE)
    two.learn(4_000, progress=False)
    values = two.values(np.array([[-1.0], [0.0]], np.float32))
    np.testing.assert_allclose(values, [0.9, 1.0], atol=0.05)


def test_truncation_still_bootstraps() -> None:
    agent = TRPO("rlbook/ConstantReward-v0", **{**PROBE, "gamma": 0.8})
    agent.learn(2_000, progress=False)
    assert agent.values(np.ones((1, 1), np.float32))[0] == pytest.approx(5, abs=0.25)


@pytest.mark.parametrize("continuous", [False, True])
def test_learns_which_action_is_right(continuous: bool) -> None:
    env_kwargs = {"continuous": continuous}
    settings = {**PROBE, "target_kl": 0.05, "initial_std": 0.5}
    agent = TRPO("rlbook/ActionReward-v0", env_kwargs=env_kwargs, **settings)
    agent.learn(4_000, progress=False)
    action, _ = agent.predict(np.array([[-1.0], [1.0]], np.float32))
    if continuous:
        np.testing.assert_allclose(action[:, 0], [-0.5, 0.5], atol=0.15)
    else:
        assert action.tolist() == [0, 1]


# Saving and resuming


def test_a_run_that_is_killed_within_a_rollout_resumes_exactly(tmp_path: Path) -> None:
    check_killed_within_a_rollout(TRPO, {**RUN, "value_epochs": 2}, tmp_path)


def test_a_run_that_is_killed_within_an_update_resumes_exactly(tmp_path: Path) -> None:
    """The policy of a rollout has moved, and its values have not learned yet."""
    settings = {**RUN, "value_epochs": 2}
    check_killed_before("compute_gradients", 6, TRPO, train_trpo, settings, tmp_path)


# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_kl": 0}, "'target_kl' must be above 0, not 0"),
        ({"target_kl": -0.01}, "'target_kl' must be above 0"),
        ({"damping": -1}, "'damping' must be at least 0"),
        ({"cg_iterations": 0}, "'cg_iterations' must be at least 1"),
        ({"line_search_steps": 0}, "'line_search_steps' must be at least 1"),
        ({"line_search_shrink": 1}, "'line_search_shrink' must be below 1"),
        ({"minibatch_size": 100}, r"'minibatch_size' \(100\) must divide a rollout, .* \(1024\)"),
        ({"entropy_coefficient": 0.1}, "TRPO has no setting 'entropy_coefficient'"),
        ({"clip_range": 0.2}, "TRPO has no setting 'clip_range'"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TRPO("CartPole-v1", **settings)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--env-id rlbook/PointReach-v0", "image observations"),
        ("--minibatch-size 100", "must divide a rollout"),
        ("--target-kl 0", "Setting 'target_kl' must be above 0, not 0.0."),
    ],
)
def test_mistakes_in_the_shell_are_one_sentence(
    flags: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(f"train trpo {flags}")) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_session_in_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = "--hidden 8 --num-steps 8 --minibatch-size 32 --value-epochs 2 --eval-every 0"
    for config, observation in (("cartpole", [0, 0, 0.1, 0]), ("pendulum", [1, 0, 0.5])):
        run = f"runs/{config}"
        train_it = f"train trpo --config {config} {tiny} --run-dir {run} --total-steps 128"
        assert main(shlex.split(train_it)) == 0
        assert main(shlex.split(f"resume {run} --total-steps 200")) == 0
        assert main(shlex.split(f"evaluate {run} --episodes 1")) == 0
        capsys.readouterr()
        assert main(["predict", run, "--observation", json.dumps(observation)]) == 0
        action = json.loads(capsys.readouterr().out)["action"]
        assert action in (0, 1) if config == "cartpole" else -2 <= action[0] <= 2


def test_shipped_configs_make_agents() -> None:
    names = [name for name in shipped_configs() if name.startswith("trpo/")]
    assert names == ["trpo/cartpole", "trpo/pendulum"]
    for name in names:
        settings = read_settings(shipped_configs()[name])
        assert settings.pop("algo") == "trpo"
        agent = TRPO(config=make_config(TRPOConfig, settings))
        assert agent.config.rollout_size in (1024, 2048)
