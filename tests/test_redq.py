"""REDQ: the random subset, the loss, the counting of updates, and resuming."""

import copy
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critics import gradients, random_loss_inputs
from helpers import assert_same, assert_same_run
from scipy.stats import chisquare

from rlbook.cli import main
from rlbook.redq import REDQ, REDQConfig, random_subset, train_redq
from rlbook.run import resume
from rlbook.sac import SAC, critic_loss, sac_target
from rlbook.settings import make_config, read_settings, shipped_configs

SMALL: dict[str, Any] = {
    "env_id": "Pendulum-v1",
    "hidden": (16, 16),
    "batch_size": 32,
    "learning_starts": 64,
    "buffer_size": 2_000,
    "eval_every": 0,
    "num_critics": 4,
    "gradient_steps": 3,
    "policy_delay": 3,
}


# The random subset


def test_subset_is_distinct_and_in_range() -> None:
    generator = np.random.default_rng(0)
    for size in range(1, 6):
        for _ in range(50):
            subset = random_subset(5, size, generator).tolist()
            assert len(subset) == len(set(subset)) == size
            assert set(subset) <= set(range(5))


def test_subset_is_uniform_over_pairs() -> None:
    generator = np.random.default_rng(0)
    counts = dict.fromkeys(combinations(range(5), 2), 0)
    for _ in range(5_000):
        first, second = sorted(random_subset(5, 2, generator).tolist())
        counts[first, second] += 1
    assert chisquare(list(counts.values())).pvalue > 1e-3


def test_one_subset_serves_a_whole_update(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = REDQ(**SMALL)
    agent.learn(64, progress=False)
    seen: list[torch.Tensor] = []
    real = agent.target_critics.forward

    def forward(obs: Any, action: Any, chosen: Any) -> Any:
        seen.append(chosen)
        return real(obs, action, chosen)

    monkeypatch.setattr(agent.target_critics, "forward", forward)
    for _ in range(30):
        agent.update(agent.sample())
    assert len(seen) == 30 and all(chosen.shape == (2,) for chosen in seen)
    assert len({tuple(sorted(chosen.tolist())) for chosen in seen}) > 3


# The loss


@pytest.mark.parametrize(("critics", "subset"), [(10, 2), (5, 1), (3, 3), (1, 1)])
def test_loss_is_that_of_numpy(critics: int, subset: int) -> None:
    q, inputs = random_loss_inputs(critics, 32, critics, subset)
    loss, metrics = critic_loss(q, sac_target(**inputs))
    x = {name: value.numpy() for name, value in inputs.items()}
    expected, errors = 0.0, []
    for i in range(critics):  # summed over critics, the mean over the batch
        squares = []
        for b in range(32):
            soft = min(x["next_q"][b]) - x["alpha"] * x["next_log_prob"][b]
            y = x["reward"][b] + (0 if x["terminated"][b] else x["discount"][b] * soft)
            squares.append((float(q[b, i]) - y) ** 2)
            errors.append(abs(float(q[b, i]) - y))
        expected += float(np.mean(squares))
    assert float(loss) == pytest.approx(expected)
    assert float(metrics["td_error_abs"]) == pytest.approx(np.mean(errors))
    assert float(metrics["q_std"]) == pytest.approx(q.numpy().std(axis=1).mean())


def test_target_is_the_minimum_of_the_chosen_critics() -> None:
    agent = REDQ(**SMALL)
    agent.learn(64, progress=False)
    batch, noise = agent.sample(), agent.sample_noise(32)
    targets = []
    for chosen in ([0, 1], [2, 3], [0, 1, 2, 3]):
        metrics = agent.critic_gradients(batch, noise, torch.tensor(chosen))
        targets.append(float(metrics["target_mean"]))
    assert targets[0] != targets[1] and targets[2] <= min(targets[:2])


def test_two_of_two_critics_on_the_minimum_are_sac_exactly() -> None:
    both = {k: v for k, v in SMALL.items() if k != "num_critics"}
    both |= {"gradient_steps": 1, "policy_delay": 1}
    sac, redq = SAC(**both), REDQ(**both, num_critics=2, subset_size=2, actor_value="min")
    sac.learn(64, progress=False)
    redq.load_state_dict(sac.state_dict())
    redq.choose_critics = lambda: None  # type: ignore[method-assign,assignment,return-value]
    for _ in range(3):
        losses = [agent.update(agent.sample()).metrics["loss"] for agent in (sac, redq)]
        assert losses[0] == losses[1]
    assert_same(sac.state_dict(), redq.state_dict())


# The actor


def test_actor_maximises_the_mean_of_all_critics() -> None:
    q = torch.tensor([[3.0, 1.0, 2.0, 4.0], [0.0, 5.0, 6.0, 7.0]])
    assert REDQ(**SMALL).actor_value(q).tolist() == [2.5, 4.5]
    assert REDQ(**SMALL, actor_value="min").actor_value(q).tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="'actor_value' must be one of 'mean', 'min'"):
        REDQ(**SMALL, actor_value="max")


def test_every_critic_of_the_ensemble_teaches_the_actor() -> None:
    agent = REDQ(**SMALL)
    obs, noise = torch.randn(32, 3), agent.sample_noise(32)
    agent.actor_gradients(obs, noise)
    before = gradients(agent.actor)
    for i in range(agent.config.num_critics):
        agent.actor_optimizer.zero_grad()
        agent.critics.state_dict()["weights.2"][i] *= 2  # the last layer of one critic
        agent.actor_gradients(obs, noise)
        now = gradients(agent.actor)
        assert any((a != b).any() for a, b in zip(before, now, strict=True))
        before = now


# The agent


def test_gradient_steps_and_policy_delay() -> None:
    agent = REDQ(**SMALL)
    agent.learn(64, progress=False)
    moved = []
    for _ in range(6):
        before = copy.deepcopy(agent.actor.state_dict())
        metrics = agent.update(agent.sample()).metrics
        agent.updates += 1
        now = agent.actor.state_dict()
        moved.append(any(not torch.equal(before[name], now[name]) for name in now))
        assert ("actor_loss" in metrics) == moved[-1]
    assert moved == [False, False, True, False, False, True]
    agent = REDQ(**SMALL)
    agent.learn(70, progress=False)
    assert agent.updates == 3 * 6


def test_train_redq_reports_step_and_evaluation(tmp_path: Path) -> None:
    settings = {**SMALL, "total_steps": 80, "eval_every": 40, "eval_episodes": 1}
    result = train_redq(REDQConfig(**settings, run_dir=str(tmp_path / "a")), progress=False)
    assert result.metrics["global_step"] == 80
    assert math.isfinite(result.metrics["eval_return_mean"])
    assert result.checkpoint is not None
    assert isinstance(REDQ.load(result.checkpoint), REDQ)
    with pytest.raises(ValueError, match="holds a redq agent"):
        from rlbook.dqn import DQN

        DQN.load(result.checkpoint)


def test_resumed_run_is_identical(tmp_path: Path) -> None:
    settings = {**SMALL, "checkpoint_every": 30, "log_every": 10}

    def config(name: str, total: int) -> REDQConfig:
        return REDQConfig(**settings, run_dir=str(tmp_path / name), total_steps=total)

    train_redq(config("whole", 120), progress=False)
    train_redq(config("cut", 90), progress=False)
    resume(tmp_path / "cut", total_steps=120, progress=False)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_critics": 2, "subset_size": 3}, r"\(3\) must not exceed 'num_critics' \(2\)"),
        ({"gradient_steps": 0}, "'gradient_steps' must be at least 1, not 0"),
        ({"num_critics": 0}, "'num_critics' must be at least 1"),
        ({"subset_size": 0}, "'subset_size' must be at least 1"),
        ({"policy_delay": 0}, "'policy_delay' must be at least 1"),
        ({"num_critic": 3}, "Did you mean 'num_critics'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REDQ("Pendulum-v1", **settings)


def test_too_large_a_subset_in_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "redq", "--num-critics", "3", "--subset-size", "4"]) == 2
    message = "Setting 'subset_size' (4) must not exceed 'num_critics' (3).\n"
    assert capsys.readouterr() == ("", message)


def test_discrete_actions_name_dqn() -> None:
    with pytest.raises(ValueError, match=r"discrete actions .* try dqn"):
        REDQ("CartPole-v1")


def test_shipped_configs_make_agents() -> None:
    settings = read_settings(shipped_configs()["redq/pendulum"])
    assert settings.pop("algo") == "redq"
    assert REDQ(config=make_config(REDQConfig, settings)).config.total_steps == 2_500
    settings = read_settings(shipped_configs()["redq/hopper"])
    assert settings.pop("algo") == "redq"
    config = make_config(REDQConfig, settings)
    assert (config.num_critics, config.subset_size, config.gradient_steps) == (10, 2, 20)
