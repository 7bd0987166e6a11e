"""Recurrent PPO: sequences and masks, hidden states, gradients against a loop, exact resuming."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same
from torch import Tensor, nn

import rlbook.recurrent_ppo
from rlbook.cli import main
from rlbook.policy_gradient import normalize
from rlbook.ppo import PPO, ppo_loss
from rlbook.recurrent_ppo import (
    LSTMNetwork,
    RecurrentPPO,
    RecurrentPPOConfig,
    SequenceBatch,
    pad_sequences,
    sequence_mask,
    where_sequences_begin,
)
from rlbook.run import Collector
from rlbook.settings import make_config, read_settings, shipped_configs

SMALL: dict[str, Any] = {
    "hidden": (8,),
    "lstm_units": 6,
    "num_envs": 3,
    "num_steps": 24,
    "sequence_length": 8,
    "minibatch_size": 24,
    "epochs": 2,
    "eval_every": 0,
    "seed": 3,
}
MASKED = "rlbook/MaskedCartPole-v0"  # random episodes of some twenty steps
KINDS = pytest.mark.parametrize("env_id", [MASKED, "Pendulum-v1"])


def filled(agent: RecurrentPPO, before: int = 0) -> RecurrentPPO:
    """Step until the rollout is full, after some steps that it does not hold."""
    collector = Collector(agent)
    for _ in range(before):
        collector.step()
    agent.rollout.clear()
    while not agent.rollout.full:
        collector.step()
    collector.envs.close()
    return agent


def gradients(agent: RecurrentPPO, batch: SequenceBatch) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the metrics of a batch and the gradients of all parameters."""
    agent.optimizer.zero_grad()
    metrics = agent.compute_gradients(batch, torch.tensor(0.2))
    networks = (agent.policy, agent.value_network)
    return metrics, [p.grad.clone() for network in networks for p in network.parameters()]


def assert_close(one: list[Tensor], two: list[Tensor]) -> None:
    """Compare gradients up to rounding."""
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# Sequences and their mask


def test_mask_and_padding_by_hand() -> None:
    first = torch.tensor([True, False, False, True, True, False])
    mask = sequence_mask(first)
    assert mask.tolist() == [[True, True, True], [True, False, False], [True, True, False]]
    padded = pad_sequences(torch.arange(1, 7), mask)
    assert padded.tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
    assert padded[mask].tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("seed", range(5))
def test_padding_keeps_each_step_and_its_order(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(40, generator=generator) < 0.3
    first[0] = True
    steps = torch.randn(40, 3, generator=generator)
    mask = sequence_mask(first)
    padded = pad_sequences(steps, mask)
    assert mask.shape[0] == int(first.sum()) and bool(mask.any(dim=0).all())
    expected: list[list[Tensor]] = []
    for step, begins in zip(steps, first, strict=True):  # the plain way
        expected += [[]] if begins else []
        expected[-1].append(step)
    for row, valid, sequence in zip(padded, mask, expected, strict=True):
        torch.testing.assert_close(row[valid], torch.stack(sequence), rtol=0, atol=0)
        assert not row[~valid].any()
    assert torch.equal(padded[mask], steps)


@pytest.mark.parametrize("length", [1, 4, 12])
def test_sequences_begin_every_few_steps_and_after_an_end(length: int) -> None:
    ended = torch.rand(12, 3, generator=torch.Generator().manual_seed(0)) < 0.3
    first = where_sequences_begin(ended, length)
    for t in range(12):
        for env in range(3):
            expected = t % length == 0 or bool(ended[t - 1, env])
            assert bool(first[t, env]) == expected


# The model


def network_of(units: int, seed: int = 0) -> LSTMNetwork:
    torch.manual_seed(seed)
    return LSTMNetwork(3, units, nn.Linear(units, 2), (1.0, 2.0, 0.5))


def by_cells(network: LSTMNetwork, obs: Tensor, state: Any, first: Tensor) -> Tensor:
    """The slow and plain way: one step of an LSTM after the other, from the state of each start."""
    scale, outputs = torch.tensor([1.0, 2.0, 0.5]), []
    for i, x in enumerate(obs):
        if first[i]:
            hidden, cell = (part[i : i + 1] for part in state)
        hidden, cell = torch.lstm_cell(
            (x * scale).unsqueeze(0), (hidden, cell), *network.lstm.parameters()
        )
        outputs.append(network.head(hidden.squeeze(0)))
    return torch.stack(outputs)


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.5, 1.0])
def test_forward_and_gradient_equal_a_loop_of_cells(chance: float) -> None:
    network = network_of(4)
    obs, first = torch.randn(30, 3), torch.rand(30) < chance
    first[0] = True
    state = torch.randn(30, 4), torch.randn(30, 4)
    found = []
    for output in (network(obs, state, first), by_cells(network, obs, state, first)):
        network.zero_grad()
        output.square().mean().backward()
        gradient = [p.grad.clone() for p in network.parameters() if p.grad is not None]
        found.append([output.detach(), *gradient])
    assert_close(*found)


def test_steps_one_by_one_equal_a_sequence() -> None:
    network = network_of(4)
    obs, first = torch.randn(20, 3), torch.zeros(20, dtype=torch.bool)
    first[0] = True
    state, outputs = network.initial_state(1), []
    for x in obs:
        output, state = network.step(x.unsqueeze(0), state)
        outputs.append(output)
    zeros = torch.zeros(20, 4), torch.zeros(20, 4)
    torch.testing.assert_close(torch.cat(outputs), network(obs, zeros, first))
    torch.testing.assert_close(network(obs)[0], outputs[0][0])  # alone, each begins an episode


def test_the_forget_bias_opens_the_forget_gate_alone() -> None:
    torch.manual_seed(0)
    opened = LSTMNetwork(3, 4, nn.Linear(4, 2), forget_bias=1.5)
    torch.manual_seed(0)
    plain = LSTMNetwork(3, 4, nn.Linear(4, 2))
    for name, parameter in plain.named_parameters():
        moved = opened.get_parameter(name) - parameter
        expected = torch.zeros_like(moved)
        if name == "lstm.bias_ih_l0":
            expected[4:8] = 1.5
        torch.testing.assert_close(moved, expected)
    with torch.no_grad():  # with no input and no output left, the cell alone says what is kept
        for parameter in opened.lstm.parameters():
            parameter.zero_()
        opened.lstm.get_parameter("bias_ih_l0")[4:8] = 1.5
        _, (_, cell) = opened.step(torch.zeros(1, 3), (torch.zeros(1, 4), torch.ones(1, 4)))
    torch.testing.assert_close(cell, torch.full((1, 4), 1.5).sigmoid())


def test_one_lstm_step_is_that_of_numpy() -> None:
    network = network_of(4)
    obs, (hidden, cell) = torch.randn(5, 3), (torch.randn(5, 4), torch.randn(5, 4))
    output, (hidden_after, cell_after) = network.step(obs, (hidden, cell))
    w, u, b, c = (p.detach().numpy() for p in network.lstm.parameters())
    x = obs.numpy() * np.array([1, 2, 0.5], np.float32)
    z_i, z_f, g, z_o = np.split(x @ w.T + hidden.numpy() @ u.T + b + c, 4, axis=1)

    def sigmoid(z: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-z))

    new_cell = sigmoid(z_f) * cell.numpy() + sigmoid(z_i) * np.tanh(g)
    new_hidden = sigmoid(z_o) * np.tanh(new_cell)
    np.testing.assert_allclose(cell_after.detach().numpy(), new_cell, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(hidden_after.detach().numpy(), new_hidden, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(output, network.head(hidden_after))


def test_nothing_leaks_from_one_episode_into_the_next() -> None:
    network = network_of(4)
    obs, first = torch.randn(12, 3, requires_grad=True), torch.zeros(12, dtype=torch.bool)
    first[0] = first[5] = True
    state = torch.zeros(12, 4), torch.zeros(12, 4)
    network(obs, state, first)[5:].square().sum().backward()
    assert obs.grad is not None
    assert not obs.grad[:5].any() and bool(obs.grad[5:].any(dim=1).all())
    other = obs.detach().clone()
    other[:5] = torch.randn(5, 3)
    torch.testing.assert_close(network(obs, state, first)[5:], network(other, state, first)[5:])


# The rollout


@KINDS
def test_stored_states_are_those_that_acted(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, seen = RecurrentPPO(env_id, **SMALL), []
    act = RecurrentPPO.act

    def remember(self: Any, obs: Any, state: Any, episode_start: Any, explore: bool) -> Any:
        carried = torch.cat(self.carried_state(state, episode_start), dim=1)
        with torch.no_grad():
            parts = carried.split(6, dim=1)
            distribution, _ = self.policy.step(torch.as_tensor(obs), parts[:2])
            value, _ = self.value_network.step(torch.as_tensor(obs), parts[2:])
        result = act(self, obs, state, episode_start, explore)
        log_prob = distribution.log_prob(torch.as_tensor(self.as_sampled(result[0])))
        seen.append((carried, episode_start.copy(), log_prob, value))
        return result

    monkeypatch.setattr(RecurrentPPO, "act", remember)
    filled(agent, before=10)
    states, starts, log_probs, values = map(list, zip(*seen[-24:], strict=True))
    stored = torch.from_numpy(agent.rollout.state)
    assert torch.equal(stored, torch.stack(states))
    start = torch.from_numpy(np.stack(starts))
    assert not stored[start].any() and bool(stored[~start].any(dim=1).all())
    batch = agent.finish_rollout()  # one environment after another
    for found, there in ((batch.log_prob, log_probs), (batch.value, values)):
        torch.testing.assert_close(found.view(3, 24).T, torch.stack(there), rtol=1e-4, atol=1e-6)
    assert torch.equal(batch.state.view(3, 24, 24).transpose(0, 1), stored)


@pytest.mark.parametrize("env_id", [MASKED, "rlbook/ConstantReward-v0"])
def test_advantages_are_those_of_a_loop_through_each_environment(env_id: str) -> None:
    """Truncation bootstraps with the value of the true last observation, after its episode."""
    agent = filled(RecurrentPPO(env_id, **SMALL, gamma=0.9, gae_lambda=0.8), before=7)
    rollout, batch = agent.rollout, agent.finish_rollout()
    assert rollout.ended.any()
    assert rollout.terminated.any() == (env_id == MASKED)
    for env in range(3):
        state: Any = torch.from_numpy(rollout.state[0, env]).unsqueeze(0).split(6, dim=1)[2:]
        values, next_values = [], []
        for t in range(24):
            with torch.no_grad():
                obs = torch.from_numpy(rollout.obs[t, [env]])
                after = torch.from_numpy(rollout.next_obs[t, [env]])
                value, state = agent.value_network.step(obs, state)
                next_value, _ = agent.value_network.step(after, state)
            values.append(value.item())
            next_values.append(next_value.item())
            if rollout.ended[t, env]:
                state = agent.value_network.initial_state(1)
        following, expected = 0.0, []
        for t in reversed(range(24)):
            bootstrap = 0.0 if rollout.terminated[t, env] else next_values[t]
            error = rollout.reward[t, env] + 0.9 * bootstrap - values[t]
            following = error + 0.72 * (0.0 if rollout.ended[t, env] else following)
            expected.append(following)
        found = batch.advantage.view(3, 24)[env]
        np.testing.assert_allclose(found, expected[::-1], rtol=1e-4, atol=1e-5)
        returns = np.array(expected[::-1]) + values
        np.testing.assert_allclose(batch.returns.view(3, 24)[env], returns, rtol=1e-4, atol=1e-5)


def test_a_second_call_of_learn_begins_new_episodes() -> None:
    agent = RecurrentPPO(MASKED, **SMALL)
    agent.learn(15, progress=False)  # five steps of each environment
    collector = Collector(agent)
    while not agent.rollout.full:
        collector.step()
    collector.envs.close()
    assert agent.rollout.ended[4].all() and not agent.rollout.state[5].any()
    assert agent.finish_rollout().first.view(3, 24)[:, 5].all()


# Minibatches


def test_each_epoch_has_each_piece_once_and_whole() -> None:
    agent = RecurrentPPO(MASKED, **SMALL)
    assert list(agent.batches()) == []  # not full yet
    whole = filled(agent).finish_rollout()
    batches = list(agent.batches())
    assert len(batches) == 2 * 3 and all(len(batch) == 24 for batch in batches)
    assert agent.rollout.size == 0
    orders = []
    for epoch in range(2):
        seen = torch.cat([batch.log_prob for batch in batches[3 * epoch : 3 * epoch + 3]])
        assert torch.equal(seen.sort().values, whole.log_prob.sort().values)
        pieces = whole.log_prob.view(-1, 8)
        order = [int((pieces == piece).all(dim=1).nonzero()[0]) for piece in seen.view(-1, 8)]
        assert sorted(order) == list(range(9))  # each piece as it was, steps in their order
        orders.append(order)
    assert orders[0] != orders[1]
    for batch in batches:
        assert isinstance(batch, SequenceBatch) and batch.first[::8].all()


@KINDS
@pytest.mark.parametrize("start_state", ["stored", "zero"])
def test_before_the_first_step_the_ratio_is_one_from_stored_states(
    env_id: str, start_state: str
) -> None:
    agent = RecurrentPPO(env_id, **SMALL, start_state=start_state, orthogonal_init=False)
    with torch.no_grad():
        for part in agent.policy.parameters():
            part *= 3  # as if it had learned to carry something
    batch = filled(agent).finish_rollout()
    metrics, _ = gradients(agent, batch)
    if start_state == "stored":
        assert abs(metrics["approximate_kl"].item()) < 1e-6 and metrics["clip_fraction"] == 0
    else:
        assert metrics["approximate_kl"] > 1e-4


# Gradients


@KINDS
def test_gradients_are_those_of_a_loop_over_single_steps(env_id: str) -> None:
    """No padding, no mask: each environment alone, step by step, reset where an episode starts."""
    agent = filled(RecurrentPPO(env_id, **SMALL, entropy_coefficient=0.01), before=9)
    batch = agent.finish_rollout()
    metrics, found = gradients(agent, batch)
    agent.optimizer.zero_grad()
    log_prob, entropy, value = [], [], []
    for i in range(len(batch)):
        if batch.first[i]:
            state = batch.state[i : i + 1].split(6, dim=1)
        distribution, of_policy = agent.policy.step(batch.obs[i : i + 1], state[:2])
        one_value, of_value = agent.value_network.step(batch.obs[i : i + 1], state[2:])
        state = (*of_policy, *of_value)
        log_prob.append(distribution.log_prob(batch.action[i : i + 1]))
        entropy.append(distribution.entropy())
        value.append(one_value)
    loss, expected = ppo_loss(
        torch.cat(log_prob), batch.log_prob, torch.cat(entropy), torch.cat(value), batch.value,
        normalize(batch.advantage), batch.returns, 0.2, 0.5, 0.01,
    )  # fmt: skip
    loss.backward()
    networks = (agent.policy, agent.value_network)
    assert_close(found, [p.grad for network in networks for p in network.parameters()])
    for name, number in expected.items():
        torch.testing.assert_close(metrics[name], number, rtol=1e-3, atol=1e-5)


@KINDS
def test_padding_counts_nowhere(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = RecurrentPPO(env_id, **{**SMALL, "sequence_length": 24})
    batch = filled(agent, before=9).finish_rollout()
    batch.first[5] = batch.first[31] = True  # Pendulum's episodes are long
    metrics, plain = gradients(agent, batch)
    padded = []

    def with_garbage(steps: Tensor, mask: Tensor) -> Tensor:
        result = pad_sequences(steps, mask)
        result[~mask] = 100 * torch.randn(int((~mask).sum()), *steps.shape[1:])
        padded.append(int((~mask).sum()))
        return result

    monkeypatch.setattr(rlbook.recurrent_ppo, "pad_sequences", with_garbage)
    again, garbage = gradients(agent, batch)
    assert len(padded) == 2 and min(padded) > 10
    assert_same(plain, garbage)
    assert_same(metrics, again)


@KINDS
def test_the_order_of_the_sequences_does_not_matter(env_id: str) -> None:
    agent = RecurrentPPO(env_id, **SMALL)
    batch = filled(agent, before=9).finish_rollout()
    metrics, plain = gradients(agent, batch)
    starts = batch.first.nonzero().flatten().tolist()
    sequences = np.split(np.arange(len(batch)), starts[1:])
    order = np.random.default_rng(0).permutation(len(sequences))
    indices = np.concatenate([sequences[i] for i in order])
    again, permuted = gradients(agent, batch[torch.from_numpy(indices)])
    assert (indices != np.arange(len(batch))).any()
    assert_close(plain, permuted)
    for name, number in metrics.items():
        torch.testing.assert_close(again[name], number, rtol=1e-4, atol=1e-5)


def test_other_episodes_do_not_change_a_gradient() -> None:
    """The gradient of a batch is the mean of those of its sequences alone."""
    agent = RecurrentPPO(MASKED, **SMALL, normalize_advantages=False)
    batch = filled(agent, before=9).finish_rollout()
    _, together = gradients(agent, batch)
    starts = batch.first.nonzero().flatten().tolist()
    total = [torch.zeros_like(gradient) for gradient in together]
    for sequence in np.split(np.arange(len(batch)), starts[1:]):
        _, alone = gradients(agent, batch[torch.from_numpy(sequence)])
        for whole, part in zip(total, alone, strict=True):
            whole += part * len(sequence) / len(batch)
    assert_close(together, total)


def test_target_kl_ends_the_epochs() -> None:
    settings = {**SMALL, "lr": 0.1, "max_grad_norm": None, "orthogonal_init": False}
    for target, epochs in ((1e-4, 1), (1e4, 2)):
        agent = filled(RecurrentPPO(MASKED, **settings, target_kl=target))
        rollout, updates = agent.finish_rollout(), 0
        assert agent.kl_from(rollout).item() < 1e-6
        for batch in agent.batches():
            agent.update(batch)
            updates += 1
        assert updates == 3 * epochs and agent.kl_from(rollout) > 1e-4
        assert agent.rollout.size == 0


# Known values


PROBE: dict[str, Any] = {
    **{"hidden": (16,), "lstm_units": 16, "num_steps": 16, "sequence_length": 16},
    **{"minibatch_size": 32, "epochs": 4, "lr": 5e-3, "gamma": 0.9, "eval_every": 0, "seed": 0},
}


def values_along(agent: RecurrentPPO, episode: list[float]) -> list[float]:
    """Return the values of an episode's observations, each after those before it."""
    state, values = agent.value_network.initial_state(1), []
    for x in episode:
        with torch.no_grad():
            value, state = agent.value_network.step(torch.tensor([[x]]), state)
        values.append(value.item())
    return values


def test_known_values() -> None:
    agent = RecurrentPPO("rlbook/TwoStep-v0", **PROBE)
    agent.learn(4_000, progress=False)
    assert values_along(agent, [-1.0, 0.0]) == pytest.approx([0.9, 1.0], abs=0.05)


def test_truncation_still_bootstraps() -> None:
    agent = RecurrentPPO("rlbook/ConstantReward-v0", **{**PROBE, "gamma": 0.8})
    agent.learn(2_000, progress=False)
    values = values_along(agent, [1.0] * 10)  # each is 5, though an episode has ten steps
    assert values == pytest.approx([5] * 10, abs=0.3)


@pytest.mark.parametrize("continuous", [False, True])
def test_learns_which_action_is_right(continuous: bool) -> None:
    env_kwargs = {"continuous": continuous}
    agent = RecurrentPPO("rlbook/ActionReward-v0", env_kwargs=env_kwargs, **PROBE, initial_std=0.5)
    agent.learn(2_500, progress=False)
    action, _ = agent.predict(np.array([[-1.0], [1.0]], np.float32))
    if continuous:
        np.testing.assert_allclose(action[:, 0], [-0.5, 0.5], atol=0.15)
    else:
        assert action.tolist() == [0, 1]


def test_remembers_a_cue_that_ppo_cannot() -> None:
    maze: dict[str, Any] = {**PROBE, "env_id": "rlbook/TMaze-v0", "env_kwargs": {"length": 3}}
    # Without a bonus some policies settle on one side before the LSTM has learned to tell the cue.
    maze["entropy_coefficient"] = 0.02
    agent = RecurrentPPO(**maze)
    agent.learn(8_000, progress=False)
    assert agent.evaluate(20).mean == 1
    for name in ("lstm_units", "sequence_length"):
        del maze[name]
    blind = PPO(**maze)
    blind.learn(8_000, progress=False)
    assert blind.evaluate(200).mean < 0.7


# Acting


def test_hidden_states_move_on_and_are_reset_alone() -> None:
    agent = RecurrentPPO(MASKED, **SMALL)
    obs = np.random.default_rng(0).normal(size=(2, 3, 2)).astype(np.float32)
    everywhere = np.ones(3, dtype=bool)
    _, greedy = agent.act(obs[0], None, everywhere, explore=False)
    _, sampled = agent.act(obs[0], None, everywhere, explore=True)
    assert_same(greedy, sampled)
    assert len(greedy) == 4 and all(part.any() for part in greedy)
    starts = np.array([True, False, False])
    _, mixed = agent.act(obs[1], greedy, starts, explore=False)
    _, fresh = agent.act(obs[1], None, everywhere, explore=False)
    for one, two in zip(mixed, fresh, strict=True):
        torch.testing.assert_close(one[0], two[0])
        assert not torch.allclose(one[1:], two[1:])


def test_values_and_probabilities_are_those_of_first_observations() -> None:
    agent = RecurrentPPO(MASKED, **SMALL, observation_scale=(1, 8))
    obs = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    value, _ = agent.value_network.step(torch.from_numpy(obs), agent.value_network.initial_state(4))
    np.testing.assert_allclose(agent.values(obs), value.detach().numpy(), rtol=1e-5)
    assert agent.probabilities(obs).sum(axis=1) == pytest.approx(np.ones(4))
    plain = RecurrentPPO(MASKED, **SMALL)
    np.testing.assert_allclose(agent.values(obs), plain.values(obs * [1, 8]), rtol=1e-4)


# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"num_steps": 48, "num_envs": 16},
            r"'sequence_length' \(32\) must divide 'num_steps' \(48\)\.$",
        ),
        (
            {"minibatch_size": 16},
            r"'sequence_length' \(32\) must divide 'minibatch_size' \(16\)\.$",
        ),
        ({"minibatch_size": 96}, "'minibatch_size' .96. must divide a rollout"),
        ({"sequence_length": 256}, "'sequence_length' .256. must divide 'num_steps' .128."),
        ({"sequence_length": 0}, "'sequence_length' must be at least 1"),
        ({"lstm_units": 0}, "'lstm_units' must be at least 1"),
        ({"start_state": "warm"}, "'start_state' must be one of 'stored', 'zero'"),
        ({"observation_scale": [1.0, 2.0]}, "'observation_scale' needs 4 factors, not 2"),
        ({"sequence_lenght": 8}, "no setting 'sequence_lenght'. Did you mean 'sequence_length'"),
        ({"compile": True}, "'compile' is not for recurrent_ppo: .* LSTM. Leave it out"),
        ({"env_id": "rlbook/PointReach-v0"}, "image observations .*needs vector observations"),
    ],
)
def test_a_mistake_gets_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecurrentPPO(**{"env_id": "CartPole-v1", **settings})


def test_a_session_in_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split("train recurrent_ppo --sequence-length 100")) == 2
    error = capsys.readouterr().err
    assert "must divide 'num_steps' (128)." in error and error.count("\n") == 1
    tiny = "--hidden 8 --lstm-units 8 --num-steps 8 --sequence-length 8 --minibatch-size 32"
    start = f"train recurrent_ppo --config masked_cartpole {tiny} --epochs 2 --eval-every 0"
    assert main(shlex.split(f"{start} --run-dir runs/a --total-steps 128")) == 0
    assert main(shlex.split("resume runs/a --total-steps 200")) == 0
    assert main(shlex.split("evaluate runs/a --episodes 1")) == 0
    capsys.readouterr()
    assert main(["predict", "runs/a", "--observation", "[0, 0.1]"]) == 0
    assert json.loads(capsys.readouterr().out)["action"] in (0, 1)


def test_shipped_configs_make_agents() -> None:
    names = [name for name in shipped_configs() if name.startswith("recurrent_ppo/")]
    assert names == ["recurrent_ppo/masked_cartpole", "recurrent_ppo/tmaze"]
    for name in names:
        settings = read_settings(shipped_configs()[name])
        assert settings.pop("algo") == "recurrent_ppo"
        RecurrentPPO(config=make_config(RecurrentPPOConfig, settings))
