"""PPO: the clipped loss against NumPy, minibatches, the target KL, known values, exact resuming."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import assert_same
from rollouts import RUN, check_killed_before, check_killed_within_a_rollout
from torch import Tensor

from rlbook.cli import main
from rlbook.policy_gradient import A2C, RolloutBatch
from rlbook.ppo import PPO, PPOConfig, clipped_objective, ppo_loss, train_ppo
from rlbook.recurrent_ppo import RecurrentPPO, train_recurrent_ppo
from rlbook.run import Collector, RunResult, train
from rlbook.settings import make_config, read_settings, shipped_configs

SMALL: dict[str, Any] = {
    "hidden": (8,),
    "num_envs": 2,
    "num_steps": 8,
    "minibatch_size": 4,
    "epochs": 3,
    "eval_every": 0,
    "seed": 3,
}


def fill_rollout(agent: A2C) -> None:
    """Step until the rollout is full."""
    collector = Collector(agent)
    while not agent.rollout.full:
        collector.step()
    collector.envs.close()


# The loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        (1.5, 1.0, 1.2, 0.0),
        (1.1, 1.0, 1.1, 1.0),
        (0.5, 1.0, 0.5, 1.0),
        (1.5, -1.0, -1.5, -1.0),
        (0.9, -1.0, -0.9, -1.0),
        (0.5, -1.0, -0.8, 0.0),
    ],
)
def test_clipped_objective_by_hand(
    ratio: float, advantage: float, objective: float, slope: float
) -> None:
    rho = torch.tensor([ratio], requires_grad=True)
    found = clipped_objective(rho, torch.tensor([advantage]), 0.2)
    found.sum().backward()
    assert found.item() == pytest.approx(objective)
    assert rho.grad is not None and rho.grad.item() == pytest.approx(slope)


NAMES = (
    *("log_prob", "old_log_prob", "entropy", "value", "old_value"),
    *("advantage", "returns"),
)


def random_inputs(batch: int) -> dict[str, Tensor]:
    """Return inputs of the loss."""
    generator = torch.Generator().manual_seed(batch)
    tensors = torch.randn(len(NAMES), batch, generator=generator, dtype=torch.float64)
    return dict(zip(NAMES, tensors, strict=True))


@pytest.mark.parametrize("clip_value_loss", [False, True])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_loss_is_that_of_numpy(batch: int, clip_value_loss: bool) -> None:
    inputs = random_inputs(batch)
    loss, metrics = ppo_loss(
        **inputs,
        clip_range=0.3,
        value_coefficient=0.4,
        entropy_coefficient=0.03,
        clip_value_loss=clip_value_loss,
    )
    x = {name: tensor.numpy() for name, tensor in inputs.items()}
    objective, errors, kl, clipped = [], [], [], []
    for i in range(batch):  # one step at a time
        ratio = np.exp(x["log_prob"][i]) / np.exp(x["old_log_prob"][i])
        a = x["advantage"][i]
        objective.append(min(ratio * a, min(max(ratio, 0.7), 1.3) * a))
        kl.append(ratio - 1 - np.log(ratio))
        clipped.append(ratio < 0.7 or ratio > 1.3)
        candidates = [x["value"][i]]
        if clip_value_loss:
            moved = min(max(x["value"][i] - x["old_value"][i], -0.3), 0.3)
            candidates.append(x["old_value"][i] + moved)
        errors.append(max((value - x["returns"][i]) ** 2 for value in candidates))
    variance = max(np.var(x["returns"]), 1e-8)
    expected = {
        "loss": -np.mean(objective) + 0.4 * np.mean(errors) - 0.03 * x["entropy"].mean(),
        "policy_loss": -np.mean(objective),
        "value_loss": np.mean(errors),
        "entropy": x["entropy"].mean(),
        "approximate_kl": np.mean(kl),
        "clip_fraction": np.mean(clipped),
        "explained_variance": 1 - np.var(x["returns"] - x["old_value"]) / variance,
    }
    assert list(metrics) == list(expected)
    for name, number in expected.items():
        assert float(metrics[name]) == pytest.approx(number), name
    assert float(loss) == float(metrics["loss"])


@pytest.mark.parametrize("name", NAMES)
def test_loss_refuses_shapes_that_would_broadcast(name: str) -> None:
    inputs: dict[str, Any] = random_inputs(8)
    inputs[name] = inputs[name].unsqueeze(1)
    with pytest.raises(ValueError, match=name):
        ppo_loss(**inputs, clip_range=0.2, value_coefficient=0.5, entropy_coefficient=0.0)


def test_a_clip_range_may_be_a_tensor() -> None:
    inputs: dict[str, Any] = random_inputs(16)
    rest: dict[str, Any] = {"value_coefficient": 0.5, "entropy_coefficient": 0.0}
    rest["clip_value_loss"] = True
    one, _ = ppo_loss(**inputs, clip_range=0.25, **rest)
    two, _ = ppo_loss(**inputs, clip_range=torch.tensor(0.25, dtype=torch.float64), **rest)
    assert one == two


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_first_step_on_a_rollout_is_that_of_a2c(env_id: str) -> None:
    """While the ratio is 1, the clipped objective has the policy gradient as its gradient."""
    shared = {name: SMALL[name] for name in ("hidden", "num_envs", "num_steps", "seed")}
    a2c = A2C(env_id, **shared, normalize_advantages=True)
    ppo = PPO(env_id, **shared, minibatch_size=16)
    for agent in (a2c, ppo):
        fill_rollout(agent)
    assert_same(a2c.rollout.state_dict(), ppo.rollout.state_dict())
    batch = ppo.finish_rollout()
    metrics = ppo.compute_gradients(batch, torch.tensor(0.2))
    a2c.compute_gradients(batch)
    assert abs(metrics["approximate_kl"].item()) < 1e-6 and metrics["clip_fraction"] == 0
    for part in ("policy", "value_network"):
        pairs = zip(getattr(a2c, part).parameters(), getattr(ppo, part).parameters(), strict=True)
        for one, two in pairs:
            torch.testing.assert_close(one.grad, two.grad, atol=1e-6, rtol=1e-4)


# Epochs and minibatches


def test_each_epoch_has_each_step_once() -> None:
    agent = PPO("CartPole-v1", **SMALL)
    assert list(agent.batches()) == []  # not full yet
    fill_rollout(agent)
    whole = agent.finish_rollout()
    batches = list(agent.batches())
    assert len(batches) == 3 * 4 and all(len(batch) == 4 for batch in batches)
    assert agent.rollout.size == 0
    orders = []
    for epoch in range(3):
        seen = torch.cat([batch.obs for batch in batches[4 * epoch : 4 * epoch + 4]])
        orders.append([int((whole.obs == obs).all(dim=1).nonzero()[0]) for obs in seen])
        assert sorted(orders[-1]) == list(range(16))
    assert orders[0] != orders[1] != orders[2]
    first, i = batches[0], orders[0][:4]
    for name in ("action", "advantage", "returns", "log_prob", "value"):
        torch.testing.assert_close(getattr(first, name), getattr(whole, name)[i])


def test_old_values_and_log_probabilities_stay_those_of_collection() -> None:
    agent = PPO("Pendulum-v1", **SMALL, lr=1e-2)
    fill_rollout(agent)
    whole, seen = agent.finish_rollout(), []
    for batch in agent.batches():
        seen.append(batch)
        metrics = agent.update(batch).metrics
    assert metrics["approximate_kl"] > 0
    last = torch.cat([batch.log_prob for batch in seen[-4:]])
    torch.testing.assert_close(last.sort().values, whole.log_prob.sort().values)
    last = torch.cat([batch.value for batch in seen[-4:]])
    torch.testing.assert_close(last.sort().values, whole.value.sort().values)


def test_updates_are_counted_and_report() -> None:
    agent = PPO("CartPole-v1", **SMALL)
    result = agent.learn(32, progress=False)
    assert agent.updates == 2 * 3 * 4
    agent = PPO("CartPole-v1", **SMALL, log_every=16)
    line = agent.learn(32, progress=False).history[-1]
    assert {"loss", "policy_loss", "value_loss", "entropy", "approximate_kl"} <= set(line)
    assert {"clip_fraction", "explained_variance"} <= set(line)
    assert result.agent is not agent


def test_advantages_are_normalised_in_each_minibatch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def remember(*arguments: Any) -> Any:
        seen.append(arguments[5])
        return ppo_loss(*arguments)

    monkeypatch.setattr("rlbook.ppo.ppo_loss", remember)
    for wanted in (True, False):
        seen.clear()
        PPO("CartPole-v1", **SMALL, normalize_advantages=wanted).learn(16, progress=False)
        means = torch.stack([advantage.mean() for advantage in seen])
        assert len(seen) == 12 and bool((means.abs() < 1e-5).all()) == wanted


def test_target_kl_ends_the_epochs_of_a_rollout() -> None:
    settings = {**SMALL, "lr": 0.1, "max_grad_norm": None, "epochs": 8}
    agent = PPO("CartPole-v1", **settings, target_kl=1e-3)
    fill_rollout(agent)
    rollout, updates = agent.finish_rollout(), 0
    for batch in agent.batches():
        if updates % 4 == 0:  # four minibatches an epoch
            assert agent.kl_from(rollout) <= 1e-3
        agent.update(batch)
        updates += 1
    assert updates in (4, 8, 12, 16, 20) and agent.kl_from(rollout) > 1e-3
    assert agent.rollout.size == 0
    agent.learn(32, progress=False)
    assert agent.updates >= 2 * 4  # the next rollouts start anew
    patient = PPO("CartPole-v1", **settings, target_kl=1e3)
    patient.learn(32, progress=False)
    assert patient.updates == 2 * 8 * 4


def test_kl_of_a_rollout_is_that_of_numpy() -> None:
    agent = PPO("Pendulum-v1", **SMALL)
    fill_rollout(agent)
    rollout = agent.finish_rollout()
    assert abs(float(agent.kl_from(rollout))) < 1e-6
    rollout.log_prob += torch.linspace(-0.5, 0.5, 16)  # as if another policy had collected it
    log_ratio = -np.linspace(-0.5, 0.5, 16)
    expected = np.mean(np.exp(log_ratio) - 1 - log_ratio)
    assert float(agent.kl_from(rollout)) == pytest.approx(expected, abs=1e-5)


def test_clip_range_and_learning_rate_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    compute = PPO.compute_gradients

    def remember(agent: PPO, batch: RolloutBatch, clip_range: Tensor) -> Any:
        seen.append(float(clip_range))
        return compute(agent, batch, clip_range)

    monkeypatch.setattr(PPO, "compute_gradients", remember)
    settings = {**SMALL, "epochs": 1, "minibatch_size": 16, "total_steps": 64}
    decay: dict[str, Any] = {"clip_range_decay_from": 0.0, "lr_decay_from": 0.5}
    agent = PPO("CartPole-v1", **settings, **decay, lr=1e-3)
    train(agent, progress=False)
    np.testing.assert_allclose(seen, [0.15, 0.1, 0.05, 0.0], atol=1e-7)
    assert agent.optimizer.param_groups[0]["lr"] == 0


# Known values


PROBE: dict[str, Any] = {
    **{"hidden": (16,), "num_steps": 16, "minibatch_size": 32, "epochs": 4},
    **{"lr": 5e-3, "gamma": 0.9, "eval_every": 0, "seed": 0},
}


@pytest.mark.parametrize("clip_value_loss", [False, True])
def test_known_values(clip_value_loss: bool) -> None:
    two = PPO("rlbook/TwoStep-v0", **PROBE, clip_value_loss=clip_value_loss)
    two.learn(4_000, progress=False)
    values = two.values(np.array([[-1.0], [0.0]], np.float32))
    np.testing.assert_allclose(values, [0.9, 1.0], atol=0.05)


def test_truncation_still_bootstraps() -> None:
    settings = {**PROBE, "gamma": 0.8, "env_kwargs": {"continuous": True}}
    agent = PPO("rlbook/ConstantReward-v0", **settings)
    agent.learn(2_000, progress=False)
    assert agent.values(np.ones((1, 1), np.float32))[0] == pytest.approx(5, abs=0.25)


@pytest.mark.parametrize("continuous", [False, True])
def test_learns_which_action_is_right(continuous: bool) -> None:
    env_kwargs = {"continuous": continuous}
    agent = PPO("rlbook/ActionReward-v0", env_kwargs=env_kwargs, **PROBE, initial_std=0.5)
    agent.learn(2_500, progress=False)
    action, _ = agent.predict(np.array([[-1.0], [1.0]], np.float32))
    if continuous:
        np.testing.assert_allclose(action[:, 0], [-0.5, 0.5], atol=0.15)
    else:
        assert action.tolist() == [0, 1]


# Saving and resuming


KILLED: dict[type[PPO], dict[str, Any]] = {
    PPO: {**RUN, "epochs": 3, "clip_range_decay_from": 0.0},
    RecurrentPPO: {
        **{**RUN, "env_id": "rlbook/MaskedCartPole-v0", "epochs": 2, "clip_range_decay_from": 0.0},
        **{"lstm_units": 6, "num_steps": 8, "sequence_length": 4, "minibatch_size": 8},
        **{"total_steps": 160, "eval_every": 80, "checkpoint_every": 36},  # rollouts of 16 steps
    },
}


@pytest.mark.parametrize("agent_class", KILLED)
def test_a_run_that_is_killed_within_a_rollout_resumes_exactly(
    agent_class: type[PPO], tmp_path: Path
) -> None:
    check_killed_within_a_rollout(agent_class, KILLED[agent_class], tmp_path)


# The fifth of six updates of the seventh rollout, the third of four of the sixth.
@pytest.mark.parametrize(
    ("updates", "agent_class", "train_it"),
    [(40, PPO, train_ppo), (22, RecurrentPPO, train_recurrent_ppo)],
)
def test_a_run_that_is_killed_between_epochs_resumes_exactly(
    updates: int, agent_class: type[PPO], train_it: Callable[..., RunResult], tmp_path: Path
) -> None:
    settings = KILLED[agent_class]
    check_killed_before("update", updates, agent_class, train_it, settings, tmp_path)


# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"minibatch_size": 100},
            r"'minibatch_size' \(100\) must divide a rollout, .* \(1024\)\.$",
        ),
        ({"minibatch_size": 4096}, "must divide a rollout"),
        ({"minibatch_size": 1}, "'normalize_advantages' needs a 'minibatch_size' of at least two"),
        ({"target_kl": 0}, "'target_kl' must be above 0, not 0"),
        ({"clip_range": 0}, "'clip_range' must be above 0"),
        ({"epochs": 0}, "'epochs' must be at least 1"),
        ({"n_epochs": 3}, "PPO has no setting 'n_epochs'.* 'epochs'"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)
    if "minibatch_size" not in settings:
        return
    with pytest.raises(ValueError, match=message):
        PPO("CartPole-v1", **settings)


class ManySwitches(gym.Env):
    """Observations are vectors, and an action is several choices."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-1, 1, (2,))
        self.action_space = gym.spaces.MultiDiscrete([3, 3])


gym.register("tests/ManySwitches-v0", lambda **_: ManySwitches())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--env-id rlbook/PointReach-v0", "has image observations (Box"),
        ("--env-id tests/ManySwitches-v0", "MultiDiscrete actions (MultiDiscrete([3 3])), but ppo"),
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
    assert main(shlex.split(f"train ppo {flags}")) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_session_in_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = "--hidden 8 --num-steps 8 --minibatch-size 32 --epochs 2 --eval-every 0"
    for config, observation in (("cartpole", [0, 0, 0.1, 0]), ("pendulum", [1, 0, 0.5])):
        run = f"runs/{config}"
        assert (
            main(
                shlex.split(f"train ppo --config {config} {tiny} --run-dir {run} --total-steps 128")
            )
            == 0
        )
        assert main(shlex.split(f"resume {run} --total-steps 200")) == 0
        assert main(shlex.split(f"evaluate {run} --episodes 1")) == 0
        capsys.readouterr()
        assert main(["predict", run, "--observation", json.dumps(observation)]) == 0
        action = json.loads(capsys.readouterr().out)["action"]
        assert action in (0, 1) if config == "cartpole" else -2 <= action[0] <= 2


def test_shipped_configs_make_agents() -> None:
    names = [name for name in shipped_configs() if name.startswith("ppo/")]
    assert names == ["ppo/cartpole", "ppo/pendulum"]
    for name in names:
        settings = read_settings(shipped_configs()[name])
        assert settings.pop("algo") == "ppo"
        assert PPO(config=make_config(PPOConfig, settings)).config.rollout_size == 1024
