"""What the chapter on DQN cannot test about itself: references, closed-form values, stored rows."""

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import assert_same
from torch import Tensor, nn

from rlbook.agent import Agent
from rlbook.dqn import (
    DQN,
    Adam,
    DQNConfig,
    QNetwork,
    apply_gradients,
    clip_gradients,
    decayed,
    dqn_loss,
    dqn_target,
    epsilon_greedy,
    flatten_parameters,
    gradient_step,
    linear_epsilon,
    polyak_update,
    td_loss,
    td_slope,
    train_dqn,
)
from rlbook.envs import make_env

# The loss against plain loops


def random_inputs(seed: int, batch: int = 7, actions: int = 4) -> dict[str, Tensor]:
    """Draw what the loss takes, in double precision."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return {
        "q": 2 * normal(batch, actions),
        "action": torch.randint(actions, (batch,), generator=generator),
        "reward": normal(batch),
        "discount": torch.rand(batch, dtype=torch.float64, generator=generator),
        "terminated": torch.rand(batch, generator=generator) < 0.4,
        "next_q_target": normal(batch, actions),
        "next_q_online": normal(batch, actions),
    }


def reference(inputs: dict[str, Tensor], double: bool, huber: bool) -> tuple[float, list[float]]:
    """Compute loss and targets one transition at a time, from the equations of the papers."""
    arrays = {name: value.numpy() for name, value in inputs.items()}
    targets, losses = [], []
    for i in range(len(arrays["q"])):
        chooser = arrays["next_q_online" if double else "next_q_target"][i]
        value = (
            0.0 if arrays["terminated"][i] else arrays["next_q_target"][i][int(chooser.argmax())]
        )
        target = arrays["reward"][i] + arrays["discount"][i] * value
        error = abs(arrays["q"][i][arrays["action"][i]] - target)
        quadratic = not huber or error <= 1
        losses.append((error**2 / (2 if huber else 1)) if quadratic else error - 0.5)
        targets.append(float(target))
    return float(np.mean(losses)), targets


@pytest.mark.parametrize("huber", [False, True])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_target_are_those_of_a_plain_loop(seed: int, double: bool, huber: bool) -> None:
    inputs = random_inputs(seed)
    assert inputs["terminated"].any() or seed  # at least the first seed has both kinds
    assert not inputs["terminated"].all()
    loss, targets = reference(inputs, double, huber)
    arguments = inputs if double else {**inputs, "next_q_online": None}
    value, metrics = dqn_loss(**arguments, huber=huber)
    names = ("reward", "discount", "terminated", "next_q_target", "next_q_online")
    target = dqn_target(**{name: arguments[name] for name in names})  # type: ignore[arg-type]
    np.testing.assert_allclose(target.numpy(), targets, rtol=1e-12)
    assert float(value) == pytest.approx(loss, rel=1e-12)
    chosen = inputs["q"].numpy()[np.arange(7), inputs["action"].numpy()]
    assert {name: float(metric) for name, metric in metrics.items()} == pytest.approx(
        {
            "loss": loss,
            "q_mean": chosen.mean(),
            "target_mean": np.mean(targets),
            "td_error_abs": np.abs(chosen - targets).mean(),
        }
    )


@pytest.mark.parametrize("huber", [False, True])
@pytest.mark.parametrize("double", [False, True])
def test_gradients_are_finite_differences_and_reach_only_the_chosen_values(
    double: bool, huber: bool
) -> None:
    inputs = random_inputs(3)
    if not double:
        del inputs["next_q_online"]
    leaves = ("q", "next_q_target", "next_q_online")
    for name in leaves:
        if name in inputs:
            inputs[name].requires_grad_()
    dqn_loss(**inputs, huber=huber)[0].backward()
    assert inputs["next_q_target"].grad is None  # the target is a constant
    assert not double or inputs["next_q_online"].grad is None
    gradient, q = inputs["q"].grad, inputs["q"].detach()
    assert gradient is not None
    width = 1e-5
    for i in range(q.shape[0]):
        for a in range(q.shape[1]):
            losses = []
            for sign in (1, -1):
                moved = q.clone()
                moved[i, a] += sign * width
                losses.append(float(dqn_loss(**{**inputs, "q": moved}, huber=huber)[0].detach()))
            slope = (losses[0] - losses[1]) / (2 * width)
            assert float(gradient[i, a]) == pytest.approx(slope, abs=1e-8)
            assert (gradient[i, a] != 0) == (a == inputs["action"][i])


@pytest.mark.parametrize("name", ["action", "reward", "discount", "terminated"])
@pytest.mark.parametrize("shape", [(7, 1), (1, 7), (6,), (8,), (1,), ()])
def test_wrong_shapes_are_refused_by_name(name: str, shape: tuple[int, ...]) -> None:
    inputs = random_inputs(0)
    inputs[name] = torch.zeros(shape, dtype=inputs[name].dtype)
    with pytest.raises(ValueError, match=rf"^{name} must have the shape \(7,\), not "):
        dqn_loss(**inputs)  # type: ignore[arg-type]


def test_terminated_states_have_no_value_and_others_do() -> None:
    zeros, high = torch.zeros(2), torch.full((2, 3), 10.0)
    terminated = torch.tensor([True, False])
    assert dqn_target(zeros, torch.full((2,), 0.9), terminated, high).tolist() == [0.0, 9.0]


def test_a_value_that_is_not_finite_behind_an_end_is_never_reached_silently() -> None:
    # 0 * inf is nan: a loss that is not finite stops the run instead of learning from it.
    inf = torch.full((1, 2), torch.inf)
    end = dqn_target(torch.zeros(1), torch.ones(1), torch.tensor([True]), inf)
    assert not torch.isfinite(end).item()


# Networks and optimiser


def small_network(seed: int = 0) -> QNetwork:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return QNetwork(3, 2, (5, 4))


def is_view(flat: Tensor, network: nn.Module) -> bool:
    """Say whether the weights and gradients of the layers lie in the flat tensor, in order."""
    assert flat.grad is not None
    place = 0
    for part in network.parameters():
        size = part.element_size() * place
        if part.data_ptr() != flat.data_ptr() + size or part.grad is None:
            return False
        if part.grad.data_ptr() != flat.grad.data_ptr() + size:
            return False
        place += part.numel()
    return place == flat.numel()


def test_flat_weights_keep_their_values_and_stay_views_when_weights_are_loaded() -> None:
    network, other = small_network(0), small_network(1)
    before = copy.deepcopy(network.state_dict())
    flat = flatten_parameters(network)
    assert_same(dict(network.state_dict()), dict(before))
    assert is_view(flat, network)
    network.load_state_dict(other.state_dict())
    assert is_view(flat, network)
    assert torch.equal(flat, torch.cat([part.flatten() for part in other.parameters()]))
    network.to("cpu")
    assert is_view(flat, network)
    network.zero_grad(set_to_none=False)
    assert is_view(flat, network)


def test_an_agent_that_was_loaded_still_learns_in_its_network() -> None:
    agent = DQN("CartPole-v1", warmup_steps=50, update_every=1, batch_size=16, eval_every=0)
    agent.learn(60, progress=False)
    twin = DQN("CartPole-v1", warmup_steps=50, update_every=1, batch_size=16, eval_every=0)
    twin.load_state_dict(agent.state_dict())
    assert is_view(twin.weights, twin.online)
    before = twin.weights.detach().clone()
    twin.update(twin.sample())
    assert not torch.equal(before, twin.weights)
    assert torch.equal(twin.weights, torch.cat([p.flatten() for p in twin.online.parameters()]))


@pytest.mark.parametrize("max_norm", [None, 0.05, 100.0])
@pytest.mark.parametrize("flat", [False, True])
def test_a_gradient_step_is_the_ordinary_one_of_adam(flat: bool, max_norm: float | None) -> None:
    ours, plain = small_network(), small_network()
    weights = [flatten_parameters(ours)] if flat else list(ours.parameters())
    optimizer = Adam(weights, lr=1.0)
    usual = torch.optim.Adam(plain.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        x, y = (torch.randn(8, size, generator=generator) for size in (3, 2))
        gradient_step((ours(x) - y).square().mean(), optimizer, 3e-3, max_norm)
        usual.zero_grad()
        (plain(x) - y).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), max_norm or 1e9)
        assert max_norm != 0.05 or norm > max_norm  # or it would be no test of clipping
        usual.step()
    for one, two in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_learning_does_not_import_the_compiler_of_torch() -> None:
    code = """import sys
from rlbook.dqn import DQN
agent = DQN("CartPole-v1", warmup_steps=64)
agent.learn(80, progress=False)
agent.load_state_dict(agent.state_dict())
assert agent.updates and "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)  # the import would take two seconds


def test_adam_is_bit_for_bit_that_of_torch() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(*shape)) for shape in ((7, 3), (5,), (2,))]
    theirs = [nn.Parameter(part.detach().clone()) for part in ours]
    mine, usual = Adam(ours, lr=1e-2), torch.optim.Adam(theirs, lr=1e-2, fused=True)
    for step in range(30):
        for one, two in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone()
        if step % 3:  # a tensor that is not learned in every step, as SAC's actor
            ours[1].grad = theirs[1].grad = None
        mine.step()
        usual.step()
        if step == 15:  # the state is the same, so either can go on with the other's
            mine.load_state_dict(copy.deepcopy(usual.state_dict()))
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("hidden", [(), (5,), (7, 6)])
def test_backpropagation_by_hand_is_that_of_autograd(hidden: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    network = QNetwork(3, 2, hidden, observation_scale=(1.0, 8.0, 0.5))
    obs, slope = torch.randn(16, 3), torch.randn(16, 2)
    network(obs).backward(slope)
    expected = [part.grad.clone() for part in network.parameters() if part.grad is not None]
    for part in network.parameters():
        part.grad = torch.full_like(part, torch.nan)  # what stood there before does not matter
    with torch.no_grad():
        q, inputs = network.trace(obs)
    torch.testing.assert_close(q, network(obs).detach())
    network.backward(inputs, slope)
    for part, gradient in zip(network.parameters(), expected, strict=True):
        torch.testing.assert_close(part.grad, gradient)


@pytest.mark.parametrize("huber", [False, True])
def test_the_slope_by_hand_is_that_of_autograd(huber: bool) -> None:
    torch.manual_seed(0)
    q, target = torch.randn(10, 3, requires_grad=True), 2 * torch.randn(10)
    action = torch.randint(3, (10,))
    loss, expected = td_loss(q, action, target, huber)
    loss.backward()
    slope, errors = td_slope(q.detach(), action, target, huber)
    torch.testing.assert_close(slope, q.grad)
    numbers = {name: float(value) for name, value in expected.items()}
    assert errors.loss() | errors.details() == pytest.approx(numbers)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(("target_every", "tau"), [(3, 1.0), (1, 0.1), (24, 1.0), (1_000, 1.0)]
)
def test_batches_drawn_together_teach_as_batches_drawn_one_by_one(
    double: bool, target_every: int, tau: float
) -> None:
    keywords: dict[str, Any] = {"double": double, "target_every": target_every, "tau": tau}
    keywords |= {"warmup_steps": 60, "batch_size": 16, "update_every": 20, "updates_per_round": 40}
    together, single = (DQN("CartPole-v1", eval_every=0, **keywords) for _ in range(2))
    for agent in (together, single):
        agent.learn(60, progress=False)
    for agent in (together, single):
        agent.replay.generator = np.random.default_rng(5)
    for batch in together.batches(40):
        together.update(batch)
        together.updates += 1
    for batch in Agent.batches(single, 40):
        single.update(batch)
        single.updates += 1
    torch.testing.assert_close(together.weights, single.weights, rtol=1e-4, atol=1e-6)
    assert together.updates == single.updates == 40


def test_clipping_keeps_the_direction_and_leaves_short_gradients_alone() -> None:
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    clip_gradients(gradients, 1.0)
    assert torch.cat([g.flatten() for g in gradients]).tolist() == pytest.approx([0.6, 0.0, 0.8])
    before = [g.clone() for g in gradients]
    clip_gradients(gradients, 2.0)
    assert all(torch.equal(one, two) for one, two in zip(gradients, before, strict=True))


def test_groups_are_clipped_as_one_vector_and_weights_without_gradient_stay() -> None:
    first, second, idle = (torch.zeros(1, requires_grad=True) for _ in range(3))
    first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer = torch.optim.SGD([{"params": [first, idle]}, {"params": [second]}], lr=1.0)
    apply_gradients(optimizer, lr=0.5, max_grad_norm=1.0)
    assert [first.item(), second.item()] == pytest.approx([-0.3, -0.4])
    assert idle.item() == 0 and idle.grad is None


@pytest.mark.parametrize("tau", [0.02, 0.5, 1.0])
def test_polyak_moves_the_target_alone_by_tau(tau: float) -> None:
    target, online = small_network(0), small_network(1)
    slow, fast = copy.deepcopy(target.state_dict()), copy.deepcopy(online.state_dict())
    polyak_update(target, online, tau)
    for name, value in target.state_dict().items():
        torch.testing.assert_close(value, (1 - tau) * slow[name] + tau * fast[name])
    assert_same(dict(online.state_dict()), dict(fast))
    if tau == 1:
        assert_same(dict(target.state_dict()), dict(fast))  # a copy, bit for bit
        assert all(
            slow.data_ptr() != fast.data_ptr()
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True)
        )


@pytest.mark.parametrize("target_every", [1, 3])
def test_the_target_moves_at_its_interval(target_every: int) -> None:
    agent = DQN("CartPole-v1", target_every=target_every, batch_size=8, eval_every=0)
    agent.learn(20, progress=False)  # no update yet
    moved = []
    for _ in range(6):
        before = copy.deepcopy(agent.target.state_dict())
        agent.update(agent.sample())
        agent.updates += 1
        now = agent.target.state_dict()
        moved.append(any(not torch.equal(before[name], now[name]) for name in now))
        if moved[-1]:
            assert_same(dict(now), dict(agent.online.state_dict()))
    assert moved == [i % target_every == 0 for i in range(1, 7)]


# Exploring and schedules


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.7, 1.0])
def test_epsilon_greedy_has_the_frequencies_that_it_promises(epsilon: float) -> None:
    generator, draws, choices = np.random.default_rng(0), 40_000, 4
    greedy = np.full(draws, 2)
    actions = epsilon_greedy(greedy, choices, epsilon, generator)
    assert actions.dtype == np.int64 and (greedy == 2).all()
    expected = np.full(choices, epsilon / choices) + (1 - epsilon) * (np.arange(choices) == 2)
    counts = np.bincount(actions, minlength=choices)
    spread = np.sqrt(draws * expected * (1 - expected))
    assert len(counts) == choices
    assert (np.abs(counts - draws * expected) <= 4.5 * spread).all()  # and exact where sure


def test_epsilon_and_learning_rate_fall_as_they_promise() -> None:
    steps = np.arange(0, 301)
    epsilons = [linear_epsilon(int(step), 200, 0.1) for step in steps]
    np.testing.assert_allclose(epsilons, np.interp(steps, [0, 200], [1.0, 0.1]))
    rates = [decayed(0.3, step / 300, 0.5) for step in steps]
    np.testing.assert_allclose(rates, np.interp(steps, [0, 150, 300], [0.3, 0.3, 0.0]), atol=1e-15)
    assert decayed(0.3, 1.0, 1.0) == 0.3  # never falls
    assert decayed(0.3, 1.5, 0.5) == 0.0  # a run that goes on longer does not learn backwards


@pytest.mark.parametrize("num_envs", [1, 3, 4])
@pytest.mark.parametrize("update_every", [1, 3, 4, 10])
def test_updates_keep_their_ratio_to_steps(update_every: int, num_envs: int) -> None:
    config = DQNConfig(
        num_envs=num_envs, update_every=update_every, updates_per_round=2, warmup_steps=12
    )
    steps = range(num_envs, 241, num_envs)
    due = [config.updates_due(step) for step in steps]
    assert sum(due[: 12 // num_envs]) == 0
    assert sum(due) == 2 * (steps[-1] // update_every - 12 // update_every)


# Values that are known


def learn(env_id: str, seed: int, steps: int = 400, **settings: Any) -> DQN:
    """Learn a tiny environment with a tiny network, playing at random throughout."""
    common: dict[str, Any] = {
        "hidden": (16,),
        "lr": 1e-2,
        "batch_size": 32,
        "warmup_steps": 32,
        "update_every": 1,
        "target_every": 1,
        "tau": 0.2,
        "gamma": 0.8,
        "epsilon_floor": 1.0,
        "eval_every": 0,
        "lr_decay_from": 0.5,
        "seed": seed,
    }
    agent = DQN(env_id, **{**common, **settings})
    agent.learn(steps, progress=False)
    return agent


def values(agent: DQN, *observations: float) -> np.ndarray:
    return agent.q_values(np.array(observations, np.float32)[:, None])  # (observations, actions)


@pytest.mark.parametrize("seed", range(3))
def test_one_step_is_worth_its_reward(seed: int) -> None:
    agent = learn("rlbook/OneStep-v0", seed, double=seed > 0, steps=200)
    np.testing.assert_allclose(values(agent, 1.0), 1.0, atol=0.05)


@pytest.mark.parametrize("gamma", [0.5, 0.9])
@pytest.mark.parametrize("n_step", [1, 2, 3])
def test_two_steps_discount_the_second(gamma: float, n_step: int) -> None:
    agent = learn("rlbook/TwoStep-v0", seed=n_step, gamma=gamma, n_step=n_step)
    found = values(agent, -1.0, 0.0)
    np.testing.assert_allclose(found, [[gamma, gamma], [1.0, 1.0]], atol=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_the_value_depends_on_what_is_seen(seed: int) -> None:
    agent = learn("rlbook/ObservationReward-v0", seed, num_envs=2)
    np.testing.assert_allclose(values(agent, -1.0, 1.0), [[-1, -1], [1, 1]], atol=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_the_value_depends_on_what_is_done(seed: int) -> None:
    agent = learn("rlbook/ActionReward-v0", seed)
    np.testing.assert_allclose(values(agent, -1.0, 1.0), [[1, -1], [-1, 1]], atol=0.1)
    assert agent.predict([-1.0])[0] == 0 and agent.predict([1.0])[0] == 1
    assert agent.evaluate(10).mean == 1.0


@pytest.mark.parametrize(("seed", "n_step"), [(0, 1), (1, 1), (2, 3), (3, 20)])
def test_truncation_still_bootstraps(seed: int, n_step: int) -> None:
    # Whoever takes the limit of 4 steps for an end finds less than 1 + 0.8 + 0.64 + 0.512 = 2.95.
    agent = learn(
        "rlbook/ConstantReward-v0", seed, steps=600, n_step=n_step, env_kwargs={"limit": 4}
    )
    np.testing.assert_allclose(values(agent, 1.0), 1 / (1 - 0.8), rtol=0.03)


def test_checkpoints_do_not_change_what_a_state_is_worth() -> None:
    agent = learn(
        "rlbook/ConstantReward-v0",
        seed=0,
        steps=600,
        n_step=3,
        checkpoint_every=5,
        env_kwargs={"limit": 100},
    )
    np.testing.assert_allclose(values(agent, 1.0), 5.0, rtol=0.03)


class Shifted(gym.Env[np.ndarray, Any]):
    """One step; the actions are called 5 and 6, the observation is a byte, and 6 pays 1."""

    observation_space = gym.spaces.Box(0, 255, (2,), np.uint8)
    action_space = gym.spaces.Discrete(2, start=5)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return np.array([1, 2], np.uint8), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert action in (5, 6)
        return np.array([1, 2], np.uint8), float(action == 6), True, False, {}


class Diary(gym.Env[np.ndarray, Any]):
    """Shows the number of the episode, the step and the length; odd episodes are truncated."""

    observation_space = gym.spaces.Box(0, 1e6, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def observe(self) -> np.ndarray:
        return np.array([self.number, self.time, self.length], np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(1_000_000))
        self.length = int(self.np_random.integers(1, 8))
        self.time = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.time += 1
        over, odd = self.time == self.length, self.number % 2 == 1
        return self.observe(), float(self.time), over and not odd, over and odd, {}


@pytest.fixture(autouse=True, scope="module")
def own_environments() -> Iterator[None]:
    gym.register("test/Shifted-v0", f"{__name__}:Shifted")
    gym.register("test/Diary-v0", f"{__name__}:Diary")
    yield
    del gym.registry["test/Shifted-v0"], gym.registry["test/Diary-v0"]


def test_actions_that_do_not_start_at_zero_and_observations_in_bytes() -> None:
    agent = learn("test/Shifted-v0", seed=0)
    found = agent.q_values(np.array([[1, 2]]))
    np.testing.assert_allclose(found, [[0.0, 1.0]], atol=0.1)
    assert agent.predict([1, 2])[0] == 6


# What lies in the buffer


def check_rows(agent: DQN) -> list[int]:
    """Check each stored row against the diary; return how many steps each looks ahead."""
    n, gamma = agent.config.n_step, agent.config.gamma
    spans = []
    for row in agent.replay.rows[: len(agent.replay)]:
        (number, time, length), (next_number, next_time, _) = row["obs"], row["next_obs"]
        assert number == next_number, "a row joins two episodes"
        span = int(next_time - time)
        assert 1 <= span <= n, "a row looks back, or too far"
        assert row["discount"] == pytest.approx(gamma**span)
        rewards = [gamma**i * (time + 1 + i) for i in range(span)]
        assert row["reward"] == pytest.approx(sum(rewards), rel=1e-5)
        assert row["terminated"] == (next_time == length and number % 2 == 0)
        spans.append(span)
    return spans


@pytest.mark.parametrize("n_step", [1, 3, 10])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_stored_rows_never_leave_their_episode(num_envs: int, n_step: int) -> None:
    agent = DQN(
        "test/Diary-v0",
        num_envs=num_envs,
        n_step=n_step,
        gamma=0.9,
        checkpoint_every=100,
        warmup_steps=10_000,
        eval_every=0,
        seed=num_envs,
    )
    agent.learn(1_200, progress=False)  # a multiple of the cuts, and of 3
    check_rows(agent)
    rows = agent.replay.rows[: len(agent.replay)]
    # Each step starts one row: no reset was stored as a step, and no step was lost.
    assert len(agent.replay) == 1_200
    ends = rows["next_obs"][:, 1] == rows["obs"][:, 2]
    odd = rows["obs"][:, 0] % 2 == 1
    assert (ends & odd).sum() > 50, "truncated ends are stored with their true last observation"
    assert (ends & ~odd).sum() > 50


def test_stored_rows_do_not_cross_a_checkpoint() -> None:
    agent = DQN(
        "test/Diary-v0",
        num_envs=2,
        n_step=4,
        gamma=0.9,
        checkpoint_every=7,  # not a multiple of the environments either
        warmup_steps=10_000,
        eval_every=0,
    )
    agent.learn(700, progress=False)
    spans = np.array(check_rows(agent))
    rows = agent.replay.rows[: len(agent.replay)]
    cut = (spans < 4) & (rows["next_obs"][:, 1] < rows["obs"][:, 2])
    assert cut.sum() > 50, "a cut completes the windows that it interrupts"
    assert not rows["terminated"][cut].any(), "and they still bootstrap"
    assert len(rows) == 700


def test_learning_in_portions_does_not_join_episodes() -> None:
    agent = DQN("test/Diary-v0", num_envs=2, n_step=5, gamma=0.9, warmup_steps=10_000, eval_every=0)
    for _ in range(40):
        agent.learn(6, progress=False)  # each call starts new episodes
    check_rows(agent)


# The whole agent


def test_the_agent_keeps_the_words_of_the_design(tmp_path: Path) -> None:
    config = DQNConfig(
        env_id="CartPole-v1",
        total_steps=300,
        warmup_steps=100,
        eval_every=100,
        eval_episodes=2,
        run_dir=str(tmp_path / "a"),
    )
    result = train_dqn(config, progress=False)
    assert result.metrics["global_step"] == 300
    assert result.metrics["eval_return_mean"] > 0
    assert result.checkpoint is not None and result.checkpoint.is_file()
    assert isinstance(result.agent, DQN) and isinstance(result.agent, Agent)
    names = {"loss", "q_mean", "target_mean", "td_error_abs"}
    update = result.agent.update(result.agent.sample())
    assert set(update.metrics) == names and update.loss == pytest.approx(update.metrics["loss"])


def test_update_learns_from_a_batch_alone() -> None:
    agent = DQN("CartPole-v1", batch_size=16, warmup_steps=0, eval_every=0, lr=1e-2, double=False)
    agent.learn(30, progress=False)
    batch = agent.sample()
    losses = [agent.update(batch).loss for _ in range(200)]
    assert losses[-1] < losses[0] / 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 100, "buffer_size": 50}, "'batch_size' .100. must not exceed"),
        ({"observation_scale": (1.0, 2.0)}, "'observation_scale' needs 4 factors, not 2"),
        ({"gamma": 1.1}, "'gamma' must be at most 1, not 1.1"),
        ({"lr": 0}, "'lr' must be above 0, not 0"),
        ({"hidden": (0,)}, "'hidden' must be at least 1, not 0"),
    ],
)
def test_a_mistake_gets_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DQN("CartPole-v1", **settings)


def test_scaling_the_observation_is_multiplying_it() -> None:
    scaled = DQN("CartPole-v1", observation_scale=(1, 1, 8, 1))
    plain = DQN("CartPole-v1")
    obs = np.array([[0.1, -0.2, 0.05, 0.3]], np.float32)
    np.testing.assert_array_equal(
        scaled.q_values(obs), plain.q_values(obs * np.array([1, 1, 8, 1], np.float32))
    )


def test_environments_of_a_test_can_be_made() -> None:
    env = make_env("test/Diary-v0")
    first, _ = env.reset(seed=0)
    again, _ = env.reset(seed=0)
    np.testing.assert_array_equal(first, again)
