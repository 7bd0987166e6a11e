"""REDQ: the random subset, the loss, the ensemble, the counting of updates, and resuming."""

import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critics import random_loss_inputs
from helpers import assert_same_run
from scipy.stats import chisquare

from rlbook.cli import main
from rlbook.redq import REDQ, REDQConfig, REDQModel, random_subset, redq_loss, train_redq
from rlbook.run import resume
from rlbook.sac import SAC, policy_loss, sac_loss
from rlbook.settings import make_config, read_settings, shipped_configs

SMALL: dict[str, Any] = {
    "env_id": "Pendulum-v1",
    "hidden": (16, 16),
    "batch_size": 32,
    "warmup_steps": 64,
    "buffer_size": 2_000,
    "eval_every": 0,
    "num_critics": 4,
    "updates_per_step": 3,
    "policy_delay": 3,
}


# The random subset


def test_subset_is_distinct_and_in_range() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in range(1, 6):
        for _ in range(50):
            subset = random_subset(5, size, generator).tolist()
            assert len(subset) == len(set(subset)) == size
            assert set(subset) <= set(range(5))


def test_subset_is_uniform_over_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = dict.fromkeys(combinations(range(5), 2), 0)
    for _ in range(5_000):
        first, second = sorted(random_subset(5, 2, generator).tolist())
        counts[first, second] += 1
    assert chisquare(list(counts.values())).pvalue > 1e-3


def test_one_subset_serves_a_whole_update(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = REDQ(**SMALL)
    agent.learn(64, progress=False)
    seen: list[torch.Tensor] = []
    real = agent.target.values

    def values(*columns: Any, chosen: Any) -> Any:
        seen.append(chosen)
        return real(*columns, chosen=chosen)

    monkeypatch.setattr(agent.target, "values", values)
    for _ in range(30):
        agent.update(agent.sample())
    assert len(seen) == 30 and all(chosen.shape == (2,) for chosen in seen)
    assert len({tuple(sorted(chosen.tolist())) for chosen in seen}) > 3


# The loss


@pytest.mark.parametrize(("critics", "subset"), [(10, 2), (5, 1), (3, 3), (1, 1)])
def test_loss_is_that_of_numpy(critics: int, subset: int) -> None:
    inputs = random_loss_inputs(critics, 32, critics, subset)
    loss, metrics = redq_loss(**inputs)
    x = {name: value.numpy() for name, value in inputs.items()}
    expected, errors = 0.0, []
    for i in range(critics):  # summed over critics, the mean over the batch
        squares = []
        for b in range(32):
            soft = min(x["next_q"][b]) - x["alpha"] * x["next_log_prob"][b]
            y = x["reward"][b] + (0 if x["terminated"][b] else x["discount"][b] * soft)
            squares.append((x["q"][b, i] - y) ** 2)
            errors.append(abs(x["q"][b, i] - y))
        expected += float(np.mean(squares))
    assert float(loss) == pytest.approx(expected)
    assert float(metrics["td_error_abs"]) == pytest.approx(np.mean(errors))
    assert float(metrics["q_std"]) == pytest.approx(x["q"].std(axis=1).mean())
    assert float(metrics["q_mean"]) == pytest.approx(x["q"].mean())


def test_two_of_two_critics_are_sac_exactly() -> None:
    inputs = random_loss_inputs(0, 64, 2, 2)
    assert torch.equal(redq_loss(**inputs)[0], sac_loss(**inputs)[0])


def test_critics_of_two_of_two_learn_as_in_sac() -> None:
    both = {k: v for k, v in SMALL.items() if k != "num_critics"}
    both |= {"updates_per_step": 1, "policy_delay": 1}
    sac, redq = SAC(**both), REDQ(**both, num_critics=2, subset_size=2)
    for agent in (sac, redq):
        agent.learn(64, progress=False)
    redq.load_state_dict(sac.state_dict())
    losses = [agent.update(agent.sample()).loss for agent in (sac, redq)]
    assert losses[0] == losses[1]
    pairs = zip(sac.model.critics.parameters(), redq.model.critics.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", ["reward", "discount", "terminated", "next_log_prob"])
def test_loss_refuses_shapes_that_would_broadcast(name: str) -> None:
    inputs = random_loss_inputs(0, 8, 4, 2)
    inputs[name] = inputs[name].unsqueeze(1)
    with pytest.raises(ValueError, match=name):
        redq_loss(**inputs)


# The model


def test_model_has_one_value_per_critic_and_bounded_actions() -> None:
    model = REDQModel(3, 2, (16, 16), num_critics=7)
    obs, noise = torch.randn(5, 3), 100 * torch.randn(5, 2)
    draw = model.draw(obs, noise)
    action, log_prob = draw.action, draw.log_prob
    assert model.critics(obs, action).shape == (5, 7)
    assert log_prob.shape == (5,)
    assert action.abs().max() <= 1 and torch.isfinite(log_prob).all()


def test_policy_maximises_the_mean_of_all_critics() -> None:
    model = REDQModel(3, 2, (16,), num_critics=7)
    obs, action, log_prob = torch.randn(5, 3), torch.rand(5, 2), torch.randn(5)
    q = model.critics(obs, action).detach()
    expected = np.mean(0.2 * log_prob.numpy() - q.numpy().mean(axis=1))
    loss = policy_loss((model.share(q) * q).sum(dim=1), log_prob, torch.tensor(0.2))
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_policy_can_be_asked_to_climb_the_lowest_critic_as_in_sac() -> None:
    agent = REDQ(**SMALL, policy_value="lowest")
    q = torch.tensor([[3.0, 1.0, 2.0, 4.0], [0.0, 5.0, 6.0, 7.0]])
    assert agent.model.share(q).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    with pytest.raises(ValueError, match="'policy_value' must be one of 'mean', 'lowest'"):
        REDQ(**SMALL, policy_value="highest")


def test_critics_start_apart() -> None:
    agent = REDQ(**SMALL)
    first = agent.model.critics.weights
    assert len(first) == 4 and all((first[0] != other).any() for other in first[1:])


# The agent


def test_updates_per_step_and_policy_delay() -> None:
    agent = REDQ(**SMALL)
    agent.learn(64, progress=False)
    actor = [weight.detach().clone() for weight in agent.model.actor.parameters()]
    policies = []
    for _ in range(6):
        result = agent.update(agent.sample())
        agent.updates += 1
        pairs = list(zip(agent.model.actor.parameters(), actor, strict=True))
        policies.append(any(bool((a != b).any()) for a, b in pairs))
        actor = [weight.detach().clone() for weight in agent.model.actor.parameters()]
        assert ("policy_loss" in result.metrics) == policies[-1]
    assert policies == [False, False, True, False, False, True]
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
        ({"updates_per_step": 0}, "'updates_per_step' must be at least 1, not 0"),
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
    assert (config.num_critics, config.subset_size, config.updates_per_step) == (10, 2, 20)
