"""Ours beside Stable-Baselines3: both sides of `bench/parity.py` really have the same settings."""

import copy
import dataclasses
import importlib
import importlib.util
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from test_results import ROOT
from torch import Tensor, nn

from rlbook import figures
from rlbook.agent import Agent, Transition
from rlbook.dqn import DQN, epsilon_greedy
from rlbook.envs import derive_seed
from rlbook.policy_gradient import GaussianPolicy
from rlbook.replay import Batch
from rlbook.run import train
from rlbook.sac import squashed_sample

pytest.importorskip("stable_baselines3", reason="extra: peers")
NAMES = ["ppo", "ppo_hopper", "a2c", "trpo", "recurrent_ppo", "dqn", "dqn_lunarlander", "sac"]
# What an environment needs, and another that settings can be compared in where that is absent
NEEDS = {"dqn_lunarlander": ("Box2D", "CartPole-v1"), "ppo_hopper": ("mujoco", "Pendulum-v1")}
STORED = sorted((ROOT / "book" / "results").glob("parity_*.json"))


@pytest.fixture
def parity(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("parity")


# The statistic


def test_the_difference_is_that_of_the_mean_heights_of_the_curves() -> None:
    steps = [0, 10, 40]  # trapezoids of 10 and 30 steps
    ours = [[0, 20, 20], [0, 40, 40]]  # areas 100 + 600 and 200 + 1,200: heights 17.5 and 35
    theirs = [[10, 10, 10], [0, 0, 40]]  # heights 10 and 15
    difference, low, high = figures.area_difference(steps, ours, theirs)
    assert difference == (17.5 + 35) / 2 - (10 + 15) / 2
    assert (low, high) == (17.5 - 15, 35 - 10)  # each has one sample of 16, more than 2.5 %


def test_the_interval_is_the_percentile_interval_of_all_samples_of_seeds() -> None:
    ours, theirs = np.array([1.0, 5.0, 30.0]), np.array([2.0, 3.0, 11.0])
    triples = np.array(np.meshgrid(*[range(3)] * 3)).reshape(3, -1)  # all 27 samples of three
    means = [values[triples].mean(axis=0) for values in (ours, theirs)]
    every = np.sort((means[0][:, None] - means[1][None, :]).ravel())  # 729, equally likely
    curves = [np.repeat(values[:, None], 2, axis=1) for values in (ours, theirs)]
    _, low, high = figures.area_difference([0, 1], *curves)
    for end, share in ((low, 0.025), (high, 0.975)):
        below, upto = (every < end - 1e-9).mean(), (every <= end + 1e-9).mean()
        assert below - 0.006 <= share <= upto + 0.006  # ten thousand samples, not all


def test_the_same_curves_differ_by_nothing_and_sides_can_be_exchanged() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(0, 1, (10, 5)), rng.normal(1, 1, (7, 5))
    assert figures.area_difference(range(5), ours, ours)[0] == 0
    one, other = (figures.area_difference(range(5), *x) for x in ((ours, theirs), (theirs, ours)))
    assert one[0] == -other[0] and one[1] < one[0] < one[2]
    assert np.allclose(one[1:], [-other[2], -other[1]], atol=0.05)


def test_the_figure_has_all_bands_and_the_difference() -> None:
    run = {"steps": [10, 20], "returns": [[0.0, 10.0], [10.0, 20.0]]}
    runs = {"rlbook": run, "Stable-Baselines3": {**run, "returns": [[0.0, 0.0], [0.0, 10.0]]}}
    ax = Figure().subplots()
    result = {"algo": "dqn", "env_id": "X-v0", "difference": [7.5, -1.0, 15.0], "runs": runs}
    figures.plot_parity(ax, {**result, "runs": {**runs, "rlbook, Double": run}})
    labels = [str(line.get_label()) for line in ax.lines]
    assert labels == [f"{name} (2 seeds)" for name in (*runs, "rlbook, Double")]
    assert ax.lines[0].get_color() == figures.COLORS["dqn"] and len(ax.collections) == 3
    assert len({line.get_color() for line in ax.lines}) == 3
    assert "X-v0" in ax.get_title() and "+7.5, 95 % interval −1.0 to +15.0" in ax.get_title()


# The settings of both sides


def linear_layers(modules: Iterable[nn.Module]) -> list[Any]:
    """Describe linear layers by their sizes and initial norms, and activations by their names."""
    found: list[Any] = []
    for module in modules:
        if isinstance(module, nn.Linear):
            norm = pytest.approx(float(module.weight.detach().norm()), rel=0.25)  # random entries
            found.append((module.in_features, module.out_features))
            found.append((norm, bool(module.bias.detach().norm() > 0)))
        else:
            found.append(type(module).__name__)
    return found


def weights(module: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in module.parameters()]).clone()


ADAM = ("betas", "eps", "weight_decay", "amsgrad", "maximize")


def adam(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return all that decides what an optimiser does, but its learning rate."""
    assert type(optimizer) is torch.optim.Adam
    return [optimizer.defaults[name] for name in ADAM]


POINTS = (0.0, 0.05, 0.1, 0.16, 0.5, 0.99)  # of a run


def on_policy_facts(task: Any, agent: Any, model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield what both sides must agree on: a name, ours and theirs."""
    config, steps = agent.config, [int(x * task.total_steps) for x in POINTS]
    yield "environments", config.num_envs, model.n_envs
    yield "steps of a rollout", config.num_steps, model.n_steps
    yield "discount", config.gamma, model.gamma
    yield "lambda", config.gae_lambda, model.gae_lambda
    yield "normalised", config.normalize_advantages, model.normalize_advantage
    rates = [model.lr_schedule(1 - x) for x in POINTS]
    yield "learning rate", [config.lr_now(s) for s in steps], pytest.approx(rates)
    yield "optimiser", adam(agent.optimizer), adam(model.policy.optimizer)
    policy, value = agent.policy, agent.value_network
    if task.algo == "recurrent_ppo":
        policy, value = policy.head, value.head
        for ours, theirs in (
            (agent.policy.lstm, model.policy.lstm_actor),
            (agent.value_network.lstm, model.policy.lstm_critic),
        ):
            for name in ("input_size", "hidden_size", "num_layers", "bias"):
                yield f"LSTM: {name}", getattr(ours, name), getattr(theirs, name)
            norms = [float(weights(lstm).norm()) for lstm in (ours, theirs)]
            yield "LSTM: initial norm", norms[0], pytest.approx(norms[1], rel=0.1)
        yield "observations", config.observation_scale, ()
    extractor = model.policy.mlp_extractor
    theirs = [*extractor.policy_net, model.policy.action_net]
    yield "policy", linear_layers(policy.mlp), linear_layers(theirs)
    theirs = [*extractor.value_net, model.policy.value_net]
    yield "values", linear_layers(value.mlp), linear_layers(theirs)
    yield "rewards", config.reward_scale, 1.0
    yield "truncation", config.bootstrap_truncated, True
    if task.algo == "trpo":
        yield "KL", config.target_kl, model.target_kl
        yield "damping", config.damping, model.cg_damping
        yield "conjugate gradients", config.cg_iterations, model.cg_max_steps
        yield "line search", config.line_search_steps, model.line_search_max_iter
        yield "shrink", config.line_search_shrink, model.line_search_shrinking_factor
        yield "epochs of the values", config.value_epochs, model.n_critic_updates
        yield "minibatch", config.minibatch_size, model.batch_size
        yield "part of the rollout", 1, model.sub_sampling_factor
        return
    yield "entropy", config.entropy_coefficient, model.ent_coef
    yield "value loss", config.value_coefficient, model.vf_coef
    yield "gradient norm", config.max_grad_norm, model.max_grad_norm
    if task.algo == "a2c":
        return
    yield "epochs", config.epochs, model.n_epochs
    yield "minibatch", config.minibatch_size, model.batch_size
    ranges = [model.clip_range(1 - x) for x in POINTS]
    yield "clip range", [config.clip_range_now(s) for s in steps], pytest.approx(ranges)
    yield "values are not clipped", config.clip_value_loss, model.clip_range_vf is not None
    yield "target KL", config.target_kl, model.target_kl


def off_policy_facts(task: Any, agent: Any, model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield what both sides must agree on: a name, ours and theirs."""
    config, every = agent.config, model.train_freq.frequency
    yield "environments", config.num_envs, model.n_envs
    yield "discount", config.gamma, model.gamma
    yield "batch", config.batch_size, model.batch_size
    yield "buffer", config.buffer_size, model.replay_buffer.buffer_size
    yield "truncation", True, model.replay_buffer.handle_timeout_termination
    yield "learning starts", config.learning_starts, model.learning_starts
    yield "train frequency", config.train_frequency, every
    updates = model.gradient_steps if model.gradient_steps > 0 else every * model.n_envs
    yield "gradient steps", config.gradient_steps, updates
    yield "tau", config.tau, model.tau
    yield "learning rate", [config.lr] * 2, [model.lr_schedule(x) for x in (1.0, 0.0)]
    if task.algo == "dqn":
        yield "optimiser", adam(agent.optimizer), adam(model.policy.optimizer)
        yield "network", linear_layers(agent.q_network.layers), linear_layers(model.q_net.q_net)
        yield "gradient norm", config.max_grad_norm, model.max_grad_norm
        # theirs counts steps, and copies between two rounds of updates change nothing
        interval = config.target_update_interval * config.train_frequency / config.gradient_steps
        yield "target update", interval, max(model.target_update_interval, every)
        steps = [int(x * task.total_steps) for x in POINTS]
        epsilons = pytest.approx([model.exploration_schedule(1 - x) for x in POINTS])
        yield "epsilon", [config.epsilon(step) for step in steps], epsilons
        yield "learning rate falls", config.lr_decay_from, 1.0
        yield "n-step", config.n_step, model.n_steps
        yield "Double", config.double, False
        yield "Huber", config.huber, True
        yield "observations", config.observation_scale, ()
        return
    for ours, theirs in (
        (agent.actor_optimizer, model.actor.optimizer),
        (agent.critic_optimizer, model.critic.optimizer),
        (agent.alpha_optimizer, model.ent_coef_optimizer),
    ):
        yield "optimiser", adam(ours), adam(theirs)
    yield "target entropy", agent.target_entropy, model.target_entropy
    yield "alpha", agent.temperature.log_alpha.item(), model.log_ent_coef.item()
    yield "alpha is learned", config.learn_alpha, model.ent_coef_optimizer is not None
    yield "target update", config.policy_delay, model.target_update_interval
    yield "no state-dependent noise", False, model.use_sde
    theirs_hidden = linear_layers(model.actor.latent_pi)
    yield "actor", linear_layers(agent.actor.mlp)[: len(theirs_hidden)], theirs_hidden
    heads = sum(
        head.weight.detach().square().sum() for head in (model.actor.mu, model.actor.log_std)
    )
    ours_head = float(agent.actor.mlp[-1].weight.detach().norm())
    yield "heads of the actor", ours_head, pytest.approx(math.sqrt(heads), rel=0.25)
    yield "critics", config.num_critics, len(model.critic.q_networks)
    for i, network in enumerate(model.critic.q_networks):
        shapes = [tuple(layer.weight.T.shape) for layer in network if isinstance(layer, nn.Linear)]
        yield "critic", [tuple(weight[i].shape) for weight in agent.critics.weights], shapes
        names = {type(layer) for layer in network}
        yield "activation", {nn.Linear, nn.ReLU}, names


def both(parity: ModuleType, name: str) -> tuple[Any, Any, Any]:
    """Return a task, our agent and their model."""
    task = parity.TASKS[name]
    if task.peer_name == "sb3-contrib":
        pytest.importorskip("sb3_contrib", reason="extra: peers")
    if name in NEEDS and importlib.util.find_spec(NEEDS[name][0]) is None:
        task = dataclasses.replace(task, env_id=NEEDS[name][1])
    return task, task.our_agent(0), task.their_model(0)


def test_no_comparison_is_left_out(parity: ModuleType) -> None:
    assert list(parity.TASKS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_both_sides_have_the_same_settings(parity: ModuleType, name: str) -> None:
    task, agent, model = both(parity, name)
    facts = off_policy_facts if hasattr(model, "replay_buffer") else on_policy_facts
    for what, ours, theirs in facts(task, agent, model):
        assert ours == theirs, what
    normalised = agent.config.normalize_observations or agent.config.normalize_rewards
    assert normalised == (model.get_vec_normalize_env() is not None)


def changed(value: Any) -> Any:
    """Return another value that a setting could have instead."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return tuple(2 * units for units in value)
    if isinstance(value, int):
        return value // 2 if value > 1 else value + 2
    return value / 2 if value else 0.5


@pytest.mark.parametrize("name", NAMES)
def test_a_drift_of_any_of_our_settings_is_noticed(parity: ModuleType, name: str) -> None:
    task, _, model = both(parity, name)
    facts = off_policy_facts if hasattr(model, "replay_buffer") else on_policy_facts
    for setting, value in task.ours.items():
        changes = {setting: changed(value)}
        if setting in ("num_steps", "num_envs") and "minibatch_size" in task.ours:
            changes["minibatch_size"] = changed(task.ours["minibatch_size"])
        if setting == "num_steps" and "sequence_length" in task.ours:
            changes["sequence_length"] = changed(value)
        if setting == "sequence_length":
            continue  # theirs has none: it is the length of a rollout
        agent = task.our_agent(0, **changes)
        differs = [what for what, ours, theirs in facts(task, agent, model) if ours != theirs]
        assert differs, setting
    if "sequence_length" in task.ours:
        assert task.ours["sequence_length"] == model.n_steps


# The same weights and the same data give the same update


def copy_layers(ours: nn.Module, *theirs: nn.Module) -> None:
    """Give a network the weights of another that has the same layers in the same order."""
    sources = [p for module in theirs for p in module.parameters()]
    with torch.no_grad():
        for parameter, source in zip(ours.parameters(), sources, strict=True):
            parameter.copy_(source)


def shared_layers(module: Any) -> nn.Module:
    """Return the layers that both sides have: theirs keeps a Gaussian's deviation elsewhere."""
    return module.mlp if isinstance(module, GaussianPolicy) else module


def silent(model: Any) -> Any:
    """Keep their model from printing."""
    model.set_logger(importlib.import_module("stable_baselines3.common.logger").configure(None, []))
    return model


def random_batches(agent: Any, count: int, generator: torch.Generator) -> Iterator[Batch]:
    """Yield made-up transitions, some of them the last of their episode."""
    for _ in range(count):
        n, (inputs,) = agent.config.batch_size, agent.observation_space.shape
        obs, next_obs = torch.randn(2, n, inputs, generator=generator)
        if hasattr(agent.action_space, "n"):
            action = torch.randint(int(agent.action_space.n), (n,), generator=generator)
        else:
            action = torch.rand(n, *agent.action_space.shape, generator=generator) * 2 - 1
        reward = 3 * torch.randn(n, generator=generator)
        terminated = torch.rand(n, generator=generator) < 0.2
        discount = torch.full((n,), agent.config.gamma)
        yield Batch(obs, next_obs, action, reward, discount, terminated)


def in_their_words(batch: Batch) -> SimpleNamespace:
    """Return a batch as their replay buffer does."""
    return SimpleNamespace(
        observations=batch.obs,
        next_observations=batch.next_obs,
        actions=batch.action.reshape(len(batch.reward), -1),
        rewards=batch.reward.unsqueeze(1),
        dones=batch.terminated.float().unsqueeze(1),
        discounts=None,
    )


def update_both(agent: Any, model: Any, batches: Iterable[Batch]) -> None:
    """Give both sides the same batches to learn from, one after another."""
    for batch in batches:
        model.replay_buffer.sample = lambda *_, batch=batch, **__: in_their_words(batch)
        model.train(gradient_steps=1, batch_size=len(batch.reward))
        agent.update(batch)
        agent.updates += 1


@pytest.mark.parametrize("name", ["dqn", "dqn_lunarlander"])
def test_dqn_makes_the_same_updates(parity: ModuleType, name: str) -> None:
    _, agent, model = both(parity, name)
    copy_layers(agent.q_network, model.q_net)
    model.q_net_target.load_state_dict(both(parity, name)[0].their_model(1).q_net.state_dict())
    copy_layers(agent.target_network, model.q_net_target)
    before = weights(agent.q_network)
    update_both(agent, silent(model), random_batches(agent, 5, torch.Generator().manual_seed(0)))
    assert (weights(agent.q_network) - before).abs().max() > 1e-3
    assert torch.allclose(weights(agent.q_network), weights(model.q_net), atol=1e-5)


def in_step(ours: DQN, theirs: Any, env_seed: int, first_update: int) -> list[list[np.ndarray]]:
    """Let their DQN explore, sample and copy its target network as ours does, and train both."""
    generators = copy.deepcopy((ours.generator, ours.replay.generator))
    buffer, train_theirs, every = theirs.replay_buffer, theirs.train, ours.config.train_frequency
    seen: list[list[np.ndarray]] = [[], []]

    def explore(*_: Any) -> tuple[np.ndarray, np.ndarray]:
        obs = theirs._last_obs
        with torch.no_grad():
            best = theirs.q_net(torch.as_tensor(obs)).numpy().argmax(axis=1)
        epsilon, choices = theirs.exploration_rate, theirs.action_space.n
        action = epsilon_greedy(best, int(choices), epsilon, generators[0])
        seen[1].append(np.append(obs[0], [epsilon, action[0]]))
        return action, action

    def sample(batch_size: int, env: Any = None) -> Any:
        stored = buffer.buffer_size if buffer.full else buffer.pos
        return buffer._get_samples(generators[1].integers(stored, size=batch_size), env=env)

    def train_in_pieces(gradient_steps: int, batch_size: int) -> None:
        for _ in range(gradient_steps):
            train_theirs(1, batch_size)
            if theirs._n_updates % ours.config.target_update_interval == 0:
                theirs.q_net_target.load_state_dict(theirs.q_net.state_dict())

    theirs._sample_action, buffer.sample, theirs.train = explore, sample, train_in_pieces
    theirs.env.seed(env_seed)
    theirs.exploration_rate = 1.0  # theirs sets it after a step
    theirs.learning_starts = first_update - every  # they ask for more than that
    silent(theirs).learn(ours.config.total_steps)
    observe = ours.observe

    def watched(transition: Transition) -> None:
        epsilon = ours.config.epsilon(ours.global_step - 1)  # before this step
        seen[0].append(np.append(transition.obs[0], [epsilon, transition.action[0]]))
        observe(transition)

    ours.observe = watched  # type: ignore[method-assign]
    ours.learn(ours.config.total_steps, progress=False)
    return seen


def test_a_whole_training_of_dqn_is_theirs_step_by_step() -> None:
    settings: dict[str, Any] = {
        "env_id": "CartPole-v1",
        "env_kwargs": {"max_episode_steps": 30},  # some episodes are truncated
        "total_steps": 1_200,
        "buffer_size": 400,  # so the ring goes round
        "batch_size": 32,
        "train_frequency": 4,
        "gradient_steps": 4,
        "target_update_interval": 100,
        "tau": 1.0,
        "double": False,
        "huber": True,
        "max_grad_norm": 10.0,
        "epsilon_decay_steps": 360,
        "final_epsilon": 0.1,
    }
    ours = DQN(**settings, learning_starts=0, eval_every=0, checkpoint_every=10_000, seed=3)
    env_seed = derive_seed(3, "envs", 0, 0)
    library = importlib.import_module("stable_baselines3")
    make_envs = importlib.import_module("stable_baselines3.common.env_util").make_vec_env
    theirs = library.DQN(
        "MlpPolicy",
        make_envs("CartPole-v1", env_kwargs=settings["env_kwargs"]),
        learning_rate=ours.config.lr,
        buffer_size=400,
        batch_size=32,
        gamma=ours.config.gamma,
        gradient_steps=-1,
        target_update_interval=10_000,
        exploration_fraction=0.3,
        exploration_final_eps=0.1,
        policy_kwargs={"net_arch": list(ours.config.hidden)},
    )
    for network in (theirs.q_net, theirs.q_net_target):
        copy_layers(network, ours.q_network)
    found = in_step(ours, theirs, env_seed, first_update=32)
    assert ours.updates == theirs._n_updates == 1_172
    assert np.allclose(found[0], found[1], atol=1e-5)  # observations, ε and actions
    assert torch.allclose(weights(ours.q_network), weights(theirs.q_net), atol=1e-4)


def test_sac_makes_the_same_updates(parity: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    _, agent, model = both(parity, "sac")

    def without_noise(obs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std, _ = model.actor.get_action_dist_params(obs)
        return squashed_sample(mean, log_std, torch.zeros_like(mean))

    monkeypatch.setattr(model.actor, "action_log_prob", without_noise)
    monkeypatch.setattr(agent, "sample_noise", lambda count: torch.zeros(count, 1))

    def their_critics() -> Tensor:
        """Their critics in our order: layer by layer, all weights before all biases."""
        layers = [[m for m in q if isinstance(m, nn.Linear)] for q in model.critic.q_networks]
        matrices = [layer.weight.detach().T for pair in zip(*layers, strict=True) for layer in pair]
        biases = [layer.bias.detach() for pair in zip(*layers, strict=True) for layer in pair]
        return torch.cat([part.flatten() for part in (*matrices, *biases)])

    def their_actor() -> Tensor:
        heads = model.actor.mu, model.actor.log_std
        last = [head.weight.flatten() for head in heads] + [head.bias for head in heads]
        return torch.cat([weights(model.actor.latent_pi), *last]).detach()

    with torch.no_grad():
        vectors = ((agent.actor, their_actor()), (agent.critics, their_critics()))
        for network, vector in vectors:
            nn.utils.vector_to_parameters(vector, network.parameters())
        copy_layers(agent.target_critics, agent.critics)
    before = weights(agent.actor), weights(agent.critics)
    update_both(agent, silent(model), random_batches(agent, 5, torch.Generator().manual_seed(0)))
    for ours, theirs, old in zip(
        (agent.actor, agent.critics), (their_actor(), their_critics()), before, strict=True
    ):
        assert (weights(ours) - old).abs().max() > 1e-3
        assert (weights(ours) - theirs).norm() < 0.005 * (theirs - old).norm()
    assert agent.temperature.log_alpha.item() == pytest.approx(model.log_ent_coef.item(), abs=1e-6)


LSTM_STATES = ("hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf")


def their_networks(task: Any, model: Any) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules of their policy and of their values, in the order of ours."""
    policy, extractor = model.policy, model.policy.mlp_extractor
    actor = [extractor.policy_net, policy.action_net]
    critic = [extractor.value_net, policy.value_net]
    if task.algo == "recurrent_ppo":
        return [policy.lstm_actor, *actor], [policy.lstm_critic, *critic]
    return actor, critic


def fill_rollout(agent: Any, buffer: Any, steps: list[dict[str, Any]]) -> None:
    """Put their rollout into our buffer, with what their environments returned at each step."""
    rollout = agent.rollout
    rollout.obs[:] = buffer.observations
    rollout.action[:] = buffer.actions.reshape(rollout.action.shape)
    for t, step in enumerate(steps):
        rollout.reward[t], rollout.next_obs[t] = step["rewards"], step["new_obs"]
        rollout.ended[t] = rollout.terminated[t] = step["dones"]
        for i, info in enumerate(step["infos"]):
            if step["dones"][i]:
                rollout.next_obs[t, i] = info["terminal_observation"]
                rollout.terminated[t, i] = not info["TimeLimit.truncated"]
    if hasattr(rollout, "state"):  # theirs sets it to 0 at an episode's start, when it is used
        state = np.concatenate([getattr(buffer, name)[:, 0] for name in LSTM_STATES], axis=-1)
        rollout.state[:] = state * (1 - buffer.episode_starts)[..., None]
    rollout.size = len(rollout.reward)


# How far the change of the weights may be from theirs, relative to its size: the listed deviations.
ON_POLICY = {"a2c": 1e-4, "ppo": 0.02, "recurrent_ppo": 0.05, "trpo": 0.01}


@pytest.mark.parametrize("limit", [500, 4])
@pytest.mark.parametrize("name", [name for name in NAMES if name in ON_POLICY])
def test_on_policy_algorithms_learn_the_same_from_a_rollout(
    parity: ModuleType, name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "trpo":  # all of a rollout in one minibatch, since each side has its own order
        whole = parity.TASKS[name]
        size = whole.num_envs * whole.ours["num_steps"]
        monkeypatch.setitem(whole.ours, "minibatch_size", size)
    task, agent, _ = both(parity, name)
    model = task.their_model(0, max_episode_steps=limit)  # with 4, all episodes are cut off
    change: dict[str, list[Tensor]] = {}
    steps: list[dict[str, Any]] = []

    def flat(modules: Iterable[nn.Module]) -> Tensor:
        return torch.cat([weights(module) for module in modules])

    class Compare(parity.BaseCallback):  # type: ignore[name-defined]
        """Gives ours the same weights and the same rollout, and stops when theirs has learned."""

        def _on_rollout_start(self) -> None:
            now = [flat(modules) for modules in their_networks(task, model)]
            if "before" in change:
                change["theirs"] = now
            change.setdefault("before", now)

        def _on_step(self) -> bool:
            names = ("rewards", "new_obs", "dones", "infos")
            steps.append({name: copy.deepcopy(self.locals[name]) for name in names})
            return "theirs" not in change

        def _on_rollout_end(self) -> None:
            policy, values = their_networks(task, model)
            copy_layers(shared_layers(agent.policy), *policy)
            copy_layers(agent.value_network, *values)
            agent.global_step = self.num_timesteps
            buffer = model.rollout_buffer
            fill_rollout(agent, buffer, steps)
            assert limit == 500 or (agent.rollout.ended & ~agent.rollout.terminated).sum() > 5
            change["advantages"] = [torch.from_numpy(buffer.advantages.copy()).flatten()]

    model.learn(task.total_steps, callback=Compare())
    found = agent.finish_rollout().advantage
    if name == "recurrent_ppo":  # one environment after another
        found = found.view(task.num_envs, -1).T.flatten()
    assert torch.allclose(found, change["advantages"][0], atol=1e-4)
    for batch in agent.batches():
        agent.update(batch)
    ours = [weights(shared_layers(agent.policy)), weights(agent.value_network)]
    if isinstance(agent.policy, GaussianPolicy):
        assert agent.policy.log_std.abs().max() > 1e-4  # both began at 0
        assert torch.allclose(agent.policy.log_std, model.policy.log_std, atol=1e-5)
    for before, mine, yours in zip(change["before"], ours, change["theirs"], strict=True):
        assert (yours - before).norm() > 1e-3
        assert (mine - yours).norm() < ON_POLICY[name] * (yours - before).norm()


@pytest.mark.parametrize("limit", [500, 4])
def test_ppo_learns_the_same_from_continuous_actions(
    parity: ModuleType, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    swinging = dataclasses.replace(parity.TASKS["ppo"], env_id="Pendulum-v1")
    monkeypatch.setitem(parity.TASKS, "ppo", swinging)
    test_on_policy_algorithms_learn_the_same_from_a_rollout(parity, "ppo", limit, monkeypatch)


# Running it


def tiny(task: Any) -> Any:
    """Return the task with a few hundred steps."""
    return dataclasses.replace(task, total_steps=400, eval_every=200, eval_episodes=2)


@pytest.mark.parametrize("name", ["dqn", "recurrent_ppo"])
def test_a_comparison_is_stored_resumed_and_drawn(
    parity: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = both(parity, name)[0]
    monkeypatch.setitem(parity.TASKS, name, tiny(task))
    where = tmp_path / "runs", tmp_path / "result.json"
    parity.compare(name, 2, *where)
    result = figures.load_result(where[1])
    assert list(result["runs"]) == ["rlbook", task.peer_name] and result["seeds"] == [0, 1]
    assert [run["steps"] for run in result["runs"].values()] == [[200, 400]] * 2
    check_form(parity, name, result)
    for side in ("run_ours", "run_theirs"):
        monkeypatch.setattr(parity, side, None)  # nothing is trained twice
    parity.compare(name, 2, *where)
    again = json.loads(where[1].read_text())
    assert again == result
    monkeypatch.setitem(parity.TASKS, name, dataclasses.replace(tiny(task), eval_episodes=3))
    with pytest.raises(ValueError, match="other settings"):
        parity.compare(name, 2, *where)


def test_a_run_that_is_killed_while_it_is_stored_is_not_half_stored(
    parity: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(path: Path, text: str, *_: Any) -> None:
        path.write_bytes(text.encode()[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        parity.stored_run(tmp_path / "run.json", {}, lambda: {"steps": [1], "returns": [1.0]})
    assert not list(tmp_path.glob("*.json"))


def check_form(parity: ModuleType, name: str, result: dict[str, Any]) -> None:
    """Check that a result has what it needs to be made again, and the right statistic."""
    task = parity.TASKS[name]
    assert result["command"].startswith(f"python bench/parity.py {name} --seeds ")
    packages = {"stable-baselines3", "sb3-contrib", "torch", "gymnasium", "rlbook", "python"}
    assert packages <= set(result["versions"])
    assert result["created"] and result["seconds"] > 0 and result["deviations"]
    assert result["peer"] == task.peer
    ours, theirs = result["runs"]["rlbook"], result["runs"][task.peer_name]
    for who, (settings, _) in parity.contestants(task).items():
        assert parity.agree(result["runs"][who]["settings"], settings), who
    assert {"learning_rate", "gamma", "policy_kwargs", "policy"} <= set(theirs["settings"])
    found = figures.area_difference(ours["steps"], ours["returns"], theirs["returns"])
    assert result["difference"] == pytest.approx(found, rel=1e-3, abs=1e-2)
    figures.plot_parity(Figure().subplots(), result)


@pytest.mark.parametrize("path", STORED, ids=[path.stem for path in STORED])
def test_no_stored_comparison_shows_ours_behind(path: Path) -> None:
    _, _, high = figures.load_result(path)["difference"]
    assert high >= 0, "find out why"


@pytest.mark.parametrize("path", STORED, ids=[path.stem for path in STORED])
def test_stored_comparisons_have_todays_settings(parity: ModuleType, path: Path) -> None:
    result = figures.load_result(path)
    name = path.stem.removeprefix("parity_").removesuffix("_variants")
    if name in NEEDS:
        pytest.importorskip(NEEDS[name][0], reason="extra: peers, mujoco")
    both(parity, name)
    check_form(parity, name, result)
    task = parity.TASKS[name]
    assert result["deviations"] == list(task.deviations)
    assert len(result["seeds"]) >= 5
    expected = list(range(task.eval_every, task.total_steps + 1, task.eval_every))
    assert all(run["steps"] == expected for run in result["runs"].values())


def test_both_sides_play_the_same_evaluation_episodes(parity: ModuleType) -> None:
    task = tiny(parity.TASKS["dqn"])
    agent: Agent = task.our_agent(3)
    steps, returns = train(agent, progress=False).curve("eval_return_mean")
    callback = parity.Evaluations(task, seed=3)
    callback.model = agent  # it can stand for theirs
    vars(agent)["num_timesteps"] = agent.global_step
    assert not callback.on_step()  # the run is over
    assert callback.steps == [steps[-1]] and callback.returns == [returns[-1]]
