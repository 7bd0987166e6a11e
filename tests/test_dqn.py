"""What the chapter on DQN cannot test about itself: references, closed-form values, stored rows."""

import copy
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
    MLP,
    DQNConfig,
    QNetwork,
    decayed,
    dqn_loss,
    dqn_target,
    epsilon_greedy,
    linear_epsilon,
    polyak_update,
    set_learning_rate,
    train_dqn,
)
from rlbook.envs import OneStep, make_env
from rlbook.replay import Batch, updates_due

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
        "next_q": normal(batch, actions),
    }


def reference(inputs: dict[str, Tensor], double: bool, huber: bool) -> tuple[float, list[float]]:
    """Compute loss and targets one transition at a time, from the equations of the papers."""
    arrays = {name: value.numpy() for name, value in inputs.items()}
    targets, losses = [], []
    for i in range(len(arrays["q"])):
        chooser = arrays["next_q" if double else "next_q_target"][i]
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
    arguments = inputs if double else {**inputs, "next_q": None}
    value, metrics = dqn_loss(**arguments, huber=huber)
    names = ("reward", "discount", "terminated", "next_q_target", "next_q")
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
        del inputs["next_q"]
    leaves = ("q", "next_q_target", "next_q")
    for name in leaves:
        if name in inputs:
            inputs[name].requires_grad_()
    dqn_loss(**inputs, huber=huber)[0].backward()
    assert inputs["next_q_target"].grad is None  # the target is a constant
    assert not double or inputs["next_q"].grad is None
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


def test_there_is_a_relu_between_layers_and_none_behind_the_last() -> None:
    network = MLP((3, 5, 4, 2))
    assert [type(layer) for layer in network] == [nn.Linear, nn.ReLU] * 2 + [nn.Linear]
    assert [type(layer) for layer in MLP((3, 2))] == [nn.Linear]
    first, second, last = (layer for layer in network if isinstance(layer, nn.Linear))
    x = torch.randn(6, 3)
    expected = last(second(first(x).clamp(min=0)).clamp(min=0))
    torch.testing.assert_close(network(x), expected)


# One update against NumPy


def reference_step(
    layers: list[tuple[np.ndarray, np.ndarray]],
    target: list[tuple[np.ndarray, np.ndarray]],
    batch: dict[str, np.ndarray],
    double: bool,
    huber: bool,
) -> list[np.ndarray]:
    """Return the gradients of the loss with respect to weights and biases, by the chain rule."""

    def forward(weights: list[tuple[np.ndarray, np.ndarray]], x: np.ndarray) -> list[np.ndarray]:
        seen = [x]
        for i, (weight, bias) in enumerate(weights):
            x = x @ weight.T + bias
            x = np.maximum(x, 0) if i + 1 < len(weights) else x
            seen.append(x)
        return seen

    rows = np.arange(len(batch["reward"]))
    next_target = forward(target, batch["next_obs"])[-1]
    chooser = forward(layers, batch["next_obs"])[-1] if double else next_target
    value = next_target[rows, chooser.argmax(axis=1)]
    y = batch["reward"] + batch["discount"] * (1 - batch["terminated"]) * value
    seen = forward(layers, batch["obs"])
    error = seen[-1][rows, batch["action"]] - y
    slope = np.zeros_like(seen[-1])
    slope[rows, batch["action"]] = (np.clip(error, -1, 1) if huber else 2 * error) / len(rows)
    gradients: list[np.ndarray] = []
    for (weight, _), x in zip(reversed(layers), reversed(seen[:-1]), strict=True):
        gradients[:0] = [slope.T @ x, slope.sum(axis=0)]
        slope = (slope @ weight) * (x > 0)
    return gradients


@pytest.mark.parametrize("huber", [False, True])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_an_update_is_the_chain_rule_and_adam(
    double: bool, huber: bool, max_norm: float | None
) -> None:
    settings: dict[str, Any] = {"double": double, "huber": huber, "max_grad_norm": max_norm}
    agent = DQN("CartPole-v1", hidden=(7, 6), lr=1e-2, **settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # or both networks were one
        for parameter in agent.target_network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)

    def arrays(network: nn.Module) -> list[tuple[np.ndarray, np.ndarray]]:
        flat = [p.detach().double().numpy().copy() for p in network.parameters()]
        return list(zip(flat[::2], flat[1::2], strict=True))

    rng = np.random.default_rng(0)
    layers, target = arrays(agent.q_network), arrays(agent.target_network)
    flat = [array for layer in layers for array in layer]
    mean, square = ([np.zeros_like(array) for array in flat] for _ in range(2))
    for step in range(1, 4):
        batch = {
            "obs": rng.normal(size=(20, 4)),
            "next_obs": rng.normal(size=(20, 4)),
            "action": rng.integers(2, size=20),
            "reward": 3 * rng.normal(size=20),
            "discount": rng.uniform(size=20),
            "terminated": rng.random(20) < 0.4,
        }
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        floats = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
        agent.update(Batch(**floats))
        agent.updates += 1
        gradients = reference_step(layers, target, batch, double, huber)
        norm = np.sqrt(sum(float((g**2).sum()) for g in gradients))
        assert max_norm is None or norm > max_norm  # or it would be no test of clipping
        scale = 1.0 if max_norm is None else max_norm / norm
        for array, g, m, v in zip(flat, gradients, mean, square, strict=True):
            m += 0.1 * (scale * g - m)
            v += 0.001 * ((scale * g) ** 2 - v)
            array -= 1e-2 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        for parameter, array in zip(agent.q_network.parameters(), flat, strict=True):
            np.testing.assert_allclose(parameter.detach().numpy(), array, rtol=1e-3, atol=1e-5)


def test_gradients_of_one_batch_do_not_leak_into_the_next() -> None:
    agent = DQN("CartPole-v1", hidden=(8,), batch_size=8, eval_every=0)
    agent.learn(20, progress=False)
    batch = agent.sample()
    agent.optimizer.zero_grad()
    agent.compute_gradients(batch)
    alone = [p.grad.clone() for p in agent.q_network.parameters() if p.grad is not None]
    agent.config = agent.config.replace(lr=1e-30)  # the weights stay where they are
    for _ in range(2):
        agent.update(batch)
    again = [p.grad for p in agent.q_network.parameters()]
    torch.testing.assert_close(again, alone)
    assert all(p.grad is None for p in agent.target_network.parameters())


def test_the_learning_rate_is_that_of_the_step() -> None:
    agent = DQN("CartPole-v1", batch_size=8, eval_every=0, lr=0.2, lr_decay_from=0.5)
    agent.learn(20, progress=False)
    for step, rate in ((0, 0.2), (10, 0.2), (15, 0.1), (20, 0.0)):  # of total_steps = 20
        agent.global_step = step
        agent.update(agent.sample())
        assert agent.optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    set_learning_rate(agent.optimizer, 0.7)
    assert [group["lr"] for group in agent.optimizer.param_groups] == [0.7]


# Other networks


class Dueling(nn.Module):
    """A value of the state and an advantage of each action."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, 16), nn.ReLU())
        self.value, self.advantage = nn.Linear(16, 1), nn.Linear(16, actions)

    def forward(self, obs: Tensor) -> Tensor:
        features = self.body(obs)
        advantage = self.advantage(features)
        return self.value(features) + advantage - advantage.mean(dim=1, keepdim=True)


class DuelingDQN(DQN):
    """DQN with dueling heads."""

    def make_network(self) -> nn.Module:
        return Dueling(1, int(self.action_space.n))


class NormedDQN(DQN):
    """DQN with layer normalisation, as a plain list of layers."""

    def make_network(self) -> nn.Module:
        normed = [nn.Linear(1, 16), nn.LayerNorm(16), nn.ReLU()]
        return nn.Sequential(*normed, nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))


@pytest.mark.parametrize("agent_class", [DuelingDQN, NormedDQN])
def test_any_network_learns_is_saved_and_copied(agent_class: type[DQN], tmp_path: Path) -> None:
    agent = learn("rlbook/ActionReward-v0", seed=0, agent_class=agent_class)
    np.testing.assert_allclose(values(agent, -1.0, 1.0), [[1, -1], [-1, 1]], atol=0.1)
    agent.save(tmp_path / "agent.pt")
    others = [agent_class.load(tmp_path / "agent.pt"), copy.deepcopy(agent)]
    agent.learn(40, progress=False)
    for other in others:
        other.learn(40, progress=False)
        assert_same(dict(agent.q_network.state_dict()), dict(other.q_network.state_dict()))
        assert_same(agent.optimizer.state_dict(), other.optimizer.state_dict())


class Doubled(OneStep):
    """An environment whose observations are 64-bit numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        obs, info = super().reset(seed=seed, options=options)
        return obs.astype(np.float64), info

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return obs.astype(np.float64), *rest


def test_a_network_sees_32_bits_when_it_acts_and_when_it_learns() -> None:
    agent = learn("test/Doubled-v0", seed=0, steps=200, agent_class=NormedDQN)
    assert agent.observation_space.dtype == np.float64
    assert agent.evaluate(2).mean == 1.0 and agent.predict([1.0])[0] in (0, 1)


def test_a_network_defined_on_the_spot_can_be_copied() -> None:
    class Local(nn.Linear):
        """A class that no other module can import."""

    class LocalDQN(DQN):
        def make_network(self) -> nn.Module:
            return Local(4, 2)

    agent = LocalDQN("CartPole-v1", batch_size=8, learning_starts=10, eval_every=0)
    agent.learn(40, progress=False)
    twin = copy.deepcopy(agent)
    for each in (agent, twin):
        each.learn(40, progress=False)
    assert_same(dict(agent.q_network.state_dict()), dict(twin.q_network.state_dict()))


# The target network


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


@pytest.mark.parametrize("interval", [1, 3])
def test_the_target_moves_at_its_interval(interval: int) -> None:
    agent = DQN("CartPole-v1", target_update_interval=interval, batch_size=8, eval_every=0)
    agent.learn(20, progress=False)  # no update yet
    moved = []
    for _ in range(6):
        before = copy.deepcopy(agent.target_network.state_dict())
        agent.update(agent.sample())
        agent.updates += 1
        now = agent.target_network.state_dict()
        moved.append(any(not torch.equal(before[name], now[name]) for name in now))
        if moved[-1]:
            assert_same(dict(now), dict(agent.q_network.state_dict()))
    assert moved == [i % interval == 0 for i in range(1, 7)]


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
@pytest.mark.parametrize("train_frequency", [1, 3, 4, 10])
def test_updates_keep_their_ratio_to_steps(train_frequency: int, num_envs: int) -> None:
    config = DQNConfig(
        num_envs=num_envs, train_frequency=train_frequency, gradient_steps=2, learning_starts=12
    )
    steps = range(num_envs, 241, num_envs)
    due = [updates_due(config, step) for step in steps]
    assert sum(due[: 12 // num_envs]) == 0
    assert sum(due) == 2 * (steps[-1] // train_frequency - 12 // train_frequency)


# Values that are known


def learn(
    env_id: str, seed: int, steps: int = 400, agent_class: type[DQN] = DQN, **settings: Any
) -> DQN:
    """Learn a tiny environment with a tiny network, playing at random throughout."""
    common: dict[str, Any] = {
        "hidden": (16,),
        "lr": 1e-2,
        "batch_size": 32,
        "learning_starts": 32,
        "train_frequency": 1,
        "target_update_interval": 1,
        "tau": 0.2,
        "gamma": 0.8,
        "final_epsilon": 1.0,
        "eval_every": 0,
        "lr_decay_from": 0.5,
        "seed": seed,
    }
    agent = agent_class(env_id, **{**common, **settings})
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
    gym.register("test/Doubled-v0", f"{__name__}:Doubled")
    yield
    for name in ("Shifted", "Diary", "Doubled"):
        del gym.registry[f"test/{name}-v0"]


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
    for row in agent.replay.storage[: len(agent.replay)]:
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
        learning_starts=10_000,
        eval_every=0,
        seed=num_envs,
    )
    agent.learn(1_200, progress=False)  # a multiple of the cuts, and of 3
    check_rows(agent)
    rows = agent.replay.storage[: len(agent.replay)]
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
        learning_starts=10_000,
        eval_every=0,
    )
    agent.learn(700, progress=False)
    spans = np.array(check_rows(agent))
    rows = agent.replay.storage[: len(agent.replay)]
    cut = (spans < 4) & (rows["next_obs"][:, 1] < rows["obs"][:, 2])
    assert cut.sum() > 50, "a cut completes the windows that it interrupts"
    assert not rows["terminated"][cut].any(), "and they still bootstrap"
    assert len(rows) == 700


def test_learning_in_portions_does_not_join_episodes() -> None:
    agent = DQN(
        "test/Diary-v0", num_envs=2, n_step=5, gamma=0.9, learning_starts=10_000, eval_every=0
    )
    for _ in range(40):
        agent.learn(6, progress=False)
        agent.training_state = None  # the next call starts new episodes
    check_rows(agent)


# The whole agent


def test_the_agent_keeps_the_words_of_the_design(tmp_path: Path) -> None:
    config = DQNConfig(
        env_id="CartPole-v1",
        total_steps=300,
        learning_starts=100,
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
    assert set(update.metrics) == names
    assert all(value.shape == () and not value.requires_grad for value in update.metrics.values())


def test_update_learns_from_a_batch_alone() -> None:
    agent = DQN(
        "CartPole-v1", batch_size=16, learning_starts=0, eval_every=0, lr=1e-2, double=False
    )
    agent.learn(30, progress=False)
    batch = agent.sample()
    losses = [float(agent.update(batch).metrics["loss"]) for _ in range(200)]
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
