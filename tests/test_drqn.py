"""What the chapter on DRQN cannot test about itself: references, exact resume, bad input."""

import copy
import pickle
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from recurrent import play, random_steps, split
from torch import Tensor, nn

import rlbook.drqn
from rlbook.agent import Agent, Transition
from rlbook.drqn import (
    DRQN,
    Chunks,
    DRQNConfig,
    LSTMQNetwork,
    RecurrentReplayBuffer,
    State,
    chunk_dtype,
    drqn_loss,
    n_step_chunks,
    reset_state,
)
from rlbook.r2d2 import R2D2
from rlbook.run import RunResult, resume, train

RECURRENT = [DRQN, R2D2]


def parameters(agent: DRQN) -> Tensor:
    """All parameters of the Q-network as one vector."""
    return torch.cat([p.detach().flatten() for p in agent.q_network.parameters()])


def random_network(seed: int) -> LSTMQNetwork:
    torch.manual_seed(seed)
    return LSTMQNetwork(inputs=3, actions=2, hidden=(5,), units=4)


# The model


def cell_loop(network: LSTMQNetwork, obs: Tensor, state: State, starts: Tensor) -> Tensor:
    """The slow and plain way: one LSTM step after the other, the state zeroed at each start."""
    hidden, cell = state
    outputs = []
    for x, start in zip(obs, starts, strict=True):
        keep = (~start).float().unsqueeze(1)
        before = (hidden * keep, cell * keep)
        hidden, cell = torch.lstm_cell(network.encoder(x), before, *network.lstm.parameters())
        outputs.append(network.head(hidden))
    return torch.stack(outputs)


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_forward_equals_a_loop_of_cells_with_resets(seed: int, chance: float) -> None:
    network = random_network(seed)
    obs, starts = torch.randn(9, 6, 3), torch.rand(9, 6) < chance
    state = torch.randn(6, 4), torch.randn(6, 4)
    expected = cell_loop(network, obs, state, starts)
    actual, last = network(obs, state, starts)
    assert actual.shape == (9, 6, 2) and [part.shape for part in last] == [(6, 4), (6, 4)]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chance", [0.0, 0.3])
@pytest.mark.parametrize("hidden", [(), (8,), (8, 5)])
def test_gradient_equals_that_of_the_loop(hidden: tuple[int, ...], chance: float) -> None:
    torch.manual_seed(0)
    network = LSTMQNetwork(inputs=3, actions=2, hidden=hidden, units=4)
    obs, starts = torch.randn(7, 4, 3), torch.rand(7, 4) < chance
    state = torch.randn(4, 4), torch.randn(4, 4)
    gradients = []
    for q in (network(obs, state, starts)[0], cell_loop(network, obs, state, starts)):
        network.zero_grad()
        q.square().mean().backward()
        gradients.append([p.grad.clone() for p in network.parameters() if p.grad is not None])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_a_sequence_can_be_read_in_pieces() -> None:
    network = random_network(1)
    obs, starts = torch.randn(8, 3, 3), torch.rand(8, 3) < 0.3
    expected, last = network(obs, network.initial_state(3), starts)
    state, pieces = network.initial_state(3), []
    for first, end in ((0, 1), (1, 2), (2, 6), (6, 8)):
        q, state = network(obs[first:end], state, starts[first:end])
        pieces.append(q)
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=1e-5, atol=1e-6)
    for one, two in zip(state, last, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


# The buffer


def one_target(
    chunk: list[dict[str, Any]], t: int, n: int, gamma: float
) -> tuple[float, float, int, bool]:
    """Sum at most n rewards by hand: return, discount, step of the bootstrap, termination."""
    total, discount = 0.0, 1.0
    for step in chunk[t : t + n]:
        total += discount * float(step["reward"])
        discount *= gamma
    last = min(t + n, len(chunk))
    return total, discount, last, bool(chunk[last - 1]["terminated"])


@pytest.mark.parametrize("n", [1, 3, 6])
@pytest.mark.parametrize("seed", range(3))
def test_chunks_hold_the_episodes_and_their_n_step_returns(seed: int, n: int) -> None:
    buffer = RecurrentReplayBuffer(500, chunk_dtype(2, 4, 6), 3, n, 0.9, seed)
    episodes = play(buffer, 150, seed)
    expected = [chunk for steps in episodes for chunk in split(steps, 6)]
    assert len(buffer) == len(expected)
    stored = {row["obs"][0].tobytes(): row for row in buffer.ring.storage[: len(buffer)]}
    for chunk in expected:
        row = stored[chunk[0]["obs"].tobytes()]
        assert row["mask"].tolist() == [True] * len(chunk) + [False] * (6 - len(chunk))
        np.testing.assert_array_equal(row["state"], chunk[0]["state"])
        assert row["episode_start"][: len(chunk)].tolist() == [s["episode_start"] for s in chunk]
        for t, step in enumerate(chunk):
            np.testing.assert_array_equal(row["obs"][t], step["obs"])
            np.testing.assert_array_equal(row["obs"][t + 1], step["next_obs"])
            assert row["action"][t] == step["action"]
            total, discount, bootstrap, terminated = one_target(chunk, t, n, 0.9)
            assert row["reward"][t] == pytest.approx(total, abs=1e-5)
            assert row["discount"][t] == pytest.approx(discount, rel=1e-5)
            assert (row["bootstrap"][t], row["terminated"][t]) == (bootstrap, terminated)


def test_truncation_still_bootstraps_and_termination_does_not() -> None:
    stored = np.zeros(2, chunk_dtype(1, 1, 4))
    stored["mask"][:, :3], stored["reward"] = True, 1.0
    stored["terminated"][1, 2] = True  # the first chunk is truncated after three steps
    chunks = n_step_chunks(stored, n=2, gamma=0.5)
    assert chunks["reward"][:, :3].tolist() == [[1.5, 1.5, 1.0]] * 2
    assert chunks["discount"][:, :3].tolist() == [[0.25, 0.25, 0.5]] * 2
    assert chunks["terminated"][:, :3].tolist() == [[False] * 3, [False, True, True]]


def test_sample_is_time_first() -> None:
    buffer = RecurrentReplayBuffer(500, chunk_dtype(2, 4, 6), 3, 1, 0.9, 0)
    play(buffer, 100, 0)
    chunks = buffer.sample(5)
    assert chunks.obs.shape == (7, 5, 2) and chunks.episode_start.shape == (7, 5)
    for part in (chunks.action, chunks.reward, chunks.discount, chunks.terminated, chunks.mask):
        assert part.shape == (6, 5)
    assert chunks.state.shape == (5, 4)


def test_samples_and_open_chunks_survive_a_round_trip() -> None:
    def make() -> RecurrentReplayBuffer:
        return RecurrentReplayBuffer(20, chunk_dtype(2, 4, 6), 3, 2, 0.9, 7)

    first, second = make(), make()
    play(first, 100, 1)
    second.load_state_dict(first.state_dict())
    assert (second.filled == first.filled).all() and first.filled.any()
    for buffer in (first, second):
        play(buffer, 50, 2)
    for _ in range(5):
        one, two = first.sample(4), second.sample(4)
        assert torch.equal(one.obs, two.obs) and torch.equal(one.reward, two.reward)


def test_an_episode_that_was_left_is_cut_as_if_truncated() -> None:
    buffer = RecurrentReplayBuffer(20, chunk_dtype(2, 4, 6), 3, 2, 0.9, 7)
    play(buffer, 4, 1)
    before, waiting = len(buffer), int((buffer.filled > 0).sum())
    episodes = play(buffer, 1, 2)  # all start anew, as in a second call of `learn`
    ended = sum(bool(e[0]["terminated"] or e[0]["truncated"]) for e in episodes)
    assert len(buffer) == before + waiting + ended
    assert buffer.ring.storage["episode_start"][: len(buffer), 1:].sum() == 0


@pytest.mark.parametrize("algorithm", RECURRENT)
@pytest.mark.parametrize("start_state", ["stored", "zero"])
@pytest.mark.parametrize("previous_action", [False, True])
def test_every_kind_of_input_and_start_learns(
    algorithm: type[DRQN], start_state: str, previous_action: bool
) -> None:
    settings: dict[str, Any] = {"start_state": start_state, "previous_action": previous_action}
    settings |= {"chunk_length": 16, "batch_size": 4, "learning_starts": 100, "eval_every": 0}
    agent = algorithm("CartPole-v1", num_envs=2, seed=0, **settings)
    before = parameters(agent)
    agent.learn(200, progress=False)
    assert agent.updates > 0 and not torch.equal(parameters(agent), before)


# The loss


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_loss_equals_a_plain_loop(seed: int, double: bool) -> None:
    steps = random_steps(seed)
    next_q = torch.randn(5, 4, 3) if double else None
    loss, metrics = drqn_loss(**steps, next_q=next_q)
    errors = []
    for t, b in steps["mask"].nonzero().tolist():
        values = steps["next_q_target"][t, b]
        best = values.max() if next_q is None else values[next_q[t, b].argmax()]
        alive = 0.0 if steps["terminated"][t, b] else 1.0
        target = steps["reward"][t, b] + steps["discount"][t, b] * alive * best
        errors.append(float(steps["q"][t, b, steps["action"][t, b]] - target))
    assert float(loss) == pytest.approx(np.mean(np.square(errors)), rel=1e-5)
    assert float(metrics["td_error_abs"]) == pytest.approx(np.mean(np.abs(errors)), rel=1e-5)
    assert metrics.keys() == {"loss", "q_mean", "target_mean", "td_error_abs"}


def test_padded_steps_change_neither_loss_nor_gradient() -> None:
    clean, gradients, losses = random_steps(0), [], []
    for garbage in (False, True):
        steps = {name: part.clone() for name, part in clean.items()}
        if garbage:
            padded = ~steps["mask"]
            steps["action"][padded] = 99
            for name in ("reward", "discount", "q", "next_q_target"):
                steps[name][padded] = float("nan")
            steps["terminated"][padded] = True
        steps["q"].requires_grad_()
        loss, metrics = drqn_loss(**steps)
        loss.backward()
        gradients.append(steps["q"].grad)
        losses.append((loss.item(), *(value.item() for value in metrics.values())))
    assert losses[0] == losses[1]
    assert torch.equal(gradients[0], gradients[1])


def update_from_memory(online: Any, target: Any, optimizer: Any, batch: Chunks) -> None:
    """Write DRQN's update as a reader would who has closed the chapter: step by step, in loops."""
    state = tuple(batch.state.chunk(2, dim=1))
    q = cell_loop(online, batch.obs, state, batch.episode_start)
    with torch.no_grad():
        q_target = cell_loop(target, batch.obs, state, batch.episode_start)
    loss, steps = torch.zeros(()), 0
    for t, b in batch.mask.nonzero().tolist():
        later = int(batch.bootstrap[t, b])
        best = q[later, b].argmax()  # Double: the online network chooses
        y = batch.reward[t, b].clone()
        if not batch.terminated[t, b]:
            y += batch.discount[t, b] * q_target[later, b, best]
        loss = loss + (q[t, b, batch.action[t, b]] - y) ** 2
        steps += 1
    optimizer.zero_grad()
    (loss / steps).backward()
    nn.utils.clip_grad_norm_(online.parameters(), 0.5)
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
            slow += 0.1 * (fast - slow)


def test_updates_are_those_that_a_reader_writes_from_memory() -> None:
    settings: dict[str, Any] = {"hidden": (8,), "lstm_units": 6, "batch_size": 12, "n_step": 3}
    settings |= {"lr": 0.01, "max_grad_norm": 0.5, "tau": 0.1, "target_update_interval": 1}
    agent = DRQN("CartPole-v1", **settings, seed=2, learning_starts=10_000, eval_every=0)
    agent.learn(400, progress=False)
    online, target = copy.deepcopy((agent.q_network, agent.target_network))
    optimizer = torch.optim.Adam(online.parameters(), lr=0.01)
    before = parameters(agent)
    for _ in range(4):
        batch = agent.sample()
        assert not batch.mask.all()
        agent.update(batch)
        update_from_memory(online, target, optimizer, batch)
    assert (parameters(agent) - before).abs().max() > 0.02
    for ours, theirs in ((agent.q_network, online), (agent.target_network, target)):
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", RECURRENT)
def test_garbage_in_padded_steps_changes_no_update(algorithm: type[DRQN]) -> None:
    weights = []
    for garbage in (False, True):
        agent = algorithm("CartPole-v1", seed=1, learning_starts=10_000, eval_every=0)
        agent.learn(600, progress=False)
        batch = agent.sample()
        assert not batch.mask.all()
        if garbage:
            spoil(batch)
        agent.update(batch)
        weights.append(parameters(agent))
    assert torch.equal(*weights)


def spoil(batch: Chunks) -> None:
    """Write nonsense wherever a step is padded."""
    padded = ~batch.mask
    batch.action[padded] = 1
    batch.reward[padded], batch.discount[padded] = 1e6, 7.0
    batch.terminated[padded] = True
    time = torch.arange(len(batch.obs)).unsqueeze(1)
    beyond = time > (batch.mask * time[1:]).amax(dim=0)  # after the last true observation
    first = torch.where(batch.mask, time[:-1], len(time)).amin(dim=0)
    batch.obs[beyond | (time < first)] = 123.0


def test_a_wrong_shape_is_named() -> None:
    steps = random_steps(0)
    steps["reward"] = steps["reward"].unsqueeze(2)
    with pytest.raises(ValueError, match=r"reward must have the shape \(5, 4\), not \(5, 4, 1\)"):
        drqn_loss(**steps)


# The agent


@pytest.mark.parametrize("algorithm", RECURRENT)
def test_state_advances_on_random_actions_and_is_zeroed_at_starts(algorithm: type[DRQN]) -> None:
    agent = algorithm("CartPole-v1", num_envs=3)
    obs = np.random.default_rng(0).normal(size=(4, 3, 4)).astype(np.float32)
    first, later = np.ones(3, dtype=bool), np.zeros(3, dtype=bool)
    _, greedy = agent.act(obs[0], None, first, explore=False)
    _, explored = agent.act(obs[0], None, first, explore=True)  # epsilon is 1
    assert torch.equal(greedy[0], explored[0]) and torch.equal(greedy[1], explored[1])
    _, state = agent.act(obs[1], greedy, later, explore=False)
    assert not torch.equal(state[0], greedy[0])
    starts = np.array([True, False, False])
    _, after = agent.act(obs[2], state, starts, explore=False)
    _, fresh = agent.act(obs[2], None, first, explore=False)
    torch.testing.assert_close(after[0][0], fresh[0][0])
    assert not torch.allclose(after[0][1], fresh[0][1])


def test_the_state_that_is_stored_is_the_one_before_the_step() -> None:
    agent = DRQN("CartPole-v1", num_envs=2, chunk_length=3, n_step=1)
    state: Any = None
    seen = []
    for t in range(4):
        obs = np.full((2, 4), t, np.float32)
        start = np.full(2, t == 0)
        action, after = agent.act(obs, state, start, explore=False)
        seen.append(state)
        agent.observe(
            Transition(obs, action, np.ones(2), obs + 1, start & False, start & False, start, state)
        )
        state = after
    assert len(agent.replay) == 2
    hidden, cell, _ = seen[3]
    np.testing.assert_array_equal(agent.replay.open["state"], torch.cat((hidden, cell), 1).numpy())
    assert not agent.replay.ring.storage["state"][:2].any()  # an episode starts from zero


@pytest.mark.parametrize("algorithm", RECURRENT)
def test_target_network_unrolls_its_own_state(algorithm: type[DRQN]) -> None:
    settings: dict[str, Any] = {"learning_starts": 10_000, "eval_every": 0}
    agent = algorithm("CartPole-v1", seed=3, double=False, **settings)
    agent.learn(800, progress=False)
    batch = agent.sample()
    before = agent.update(batch).metrics["target_mean"]
    with torch.no_grad():  # its recurrent weights alone must change the targets
        list(agent.target_network.lstm.parameters())[1].mul_(3.0)
    assert agent.update(batch).metrics["target_mean"] != before


def settings_of_a_short_run(path: Path) -> dict[str, Any]:
    return {
        "run_dir": str(path),
        "total_steps": 750,
        "num_envs": 4,
        "learning_starts": 200,
        "train_frequency": 16,
        "checkpoint_every": 250,
        "eval_every": 250,
        "eval_episodes": 2,
        "seed": 5,
    }


def assert_same(one: Any, two: Any, path: str = "") -> None:
    """Compare nested states bit for bit."""
    assert type(one) is type(two), path
    if isinstance(one, dict):
        assert one.keys() == two.keys(), path
        for key in one:
            assert_same(one[key], two[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(two), path
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            assert_same(a, b, f"{path}/{i}")
    elif isinstance(one, Tensor):
        assert torch.equal(one, two), path
    else:
        assert one == two, path


class Killed(Exception):
    """Stands for a process that ends without a word."""


@pytest.fixture(scope="module", params=RECURRENT)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A short run that nothing stopped."""
    path = tmp_path_factory.mktemp("whole") / "run"
    return train(request.param(**settings_of_a_short_run(path)), progress=False)


@pytest.mark.parametrize("how", ["SIGTERM in the middle of episodes", "a crash"])
def test_a_stopped_run_resumes_exactly(
    whole: RunResult, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm: Any = type(whole.agent)
    agent = algorithm(**settings_of_a_short_run(tmp_path / "stopped"))
    observe = agent.observe

    def stop(transition: Transition) -> None:
        observe(transition)
        if agent.global_step == 636:
            if how == "a crash":
                raise Killed
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(agent, "observe", stop)
    with pytest.raises((Killed, KeyboardInterrupt)):
        train(agent, progress=False)
    resumed = resume(tmp_path / "stopped", progress=False)
    assert_same(whole.agent.state_dict(), resumed.agent.state_dict())
    assert whole.history == resumed.history


@pytest.mark.parametrize("algorithm", RECURRENT)
def test_save_and_load_predict_the_same(algorithm: type[DRQN], tmp_path: Path) -> None:
    agent = algorithm("CartPole-v1", total_steps=400, learning_starts=200, eval_every=0)
    train(agent, progress=False)
    agent.save(tmp_path / "agent.pt")
    copy = algorithm.load(tmp_path / "agent.pt")
    obs, state, other = np.full(4, 0.05, np.float32), None, None
    for _ in range(5):
        action, state = agent.predict(obs, state)
        same, other = copy.predict(obs, other)
        assert action == same
    assert_same(state, other)


@pytest.mark.parametrize("length", [1, 3])
def test_drqn_learns_what_the_past_alone_can_tell(length: int) -> None:
    agent = DRQN(
        "rlbook/TMaze-v0",
        env_kwargs={"length": length},
        num_envs=8,
        chunk_length=8,
        gamma=0.98,
        train_frequency=8,
        learning_starts=200,
        epsilon_decay_steps=1_500,
        tau=0.05,
        target_update_interval=1,
        eval_every=0,
    )
    agent.learn(4_000, progress=False)
    assert agent.evaluate(30).mean >= 0.9


@pytest.mark.parametrize("algorithm", RECURRENT)
def test_without_a_carried_state_only_the_step_itself_counts(algorithm: type[DRQN]) -> None:
    settings: dict[str, Any] = {"chunk_length": 20, "n_step": 2, "learning_starts": 200}
    settings["eval_every"] = 0
    agent = algorithm("CartPole-v1", carry_state=False, **settings)
    agent.learn(400, progress=False)
    batch, gradients = agent.sample(), []
    for other_past in (False, True):
        if other_past:
            batch.state += 1.0
        agent.optimizer.zero_grad()
        agent.compute_gradients(batch)
        parts = [p.grad.flatten() for p in agent.q_network.parameters() if p.grad is not None]
        gradients.append(torch.cat(parts))
    assert torch.equal(*gradients) and gradients[0].any()
    hidden, cell, previous = agent.carried_state(None, np.ones(1, dtype=bool))
    obs, no_start = np.full((1, 4), 0.1, np.float32), np.zeros(1, dtype=bool)
    pasts = (hidden, cell, previous), (hidden + 1, cell - 1, previous)
    after = [agent.act(obs, past, no_start, explore=False)[1] for past in pasts]
    for one, two in zip(*after, strict=True):
        assert torch.equal(one, two)


class GRUQNetwork(nn.Module):
    """A network of somebody else: a GRU, LayerNorm and two heads."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.gru, self.norm = nn.GRU(inputs, 12), nn.LayerNorm(12)
        self.value, self.advantage = nn.Linear(12, 1), nn.Linear(12, actions)

    def initial_state(self, batch: int) -> State:
        return (torch.zeros(batch, 12),)

    def forward(self, obs: Tensor, state: State, episode_start: Tensor) -> tuple[Tensor, State]:
        outputs = []
        for x, start in zip(obs, episode_start, strict=True):
            (hidden,) = reset_state(state, start)
            output, hidden = self.gru(x.unsqueeze(0), hidden.unsqueeze(0))
            state = (hidden.squeeze(0),)
            outputs.append(self.norm(output))
        features = torch.cat(outputs)
        advantage = self.advantage(features)
        return self.value(features) + advantage - advantage.mean(dim=2, keepdim=True), state


class GRUDRQN(DRQN):
    def make_network(self) -> nn.Module:
        return GRUQNetwork(self.preprocess.inputs, int(self.action_space.n))


class GRUR2D2(R2D2):
    def make_network(self) -> nn.Module:
        return GRUQNetwork(self.preprocess.inputs, int(self.action_space.n))


@pytest.mark.parametrize("algorithm", [GRUDRQN, GRUR2D2])
def test_any_network_with_the_same_inputs_and_outputs_learns(
    algorithm: type[DRQN], tmp_path: Path
) -> None:
    agent = algorithm("CartPole-v1", learning_starts=200, batch_size=4, eval_every=0)
    before = [p.detach().clone() for p in agent.q_network.parameters()]
    agent.learn(400, progress=False)
    assert agent.replay.open["state"].shape == (1, 12)
    for one, two in zip(before, agent.q_network.parameters(), strict=True):
        assert not torch.equal(one, two)
    agent.save(tmp_path / "agent.pt")
    assert torch.equal(parameters(algorithm.load(tmp_path / "agent.pt")), parameters(agent))


@pytest.mark.parametrize("algorithm", RECURRENT)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_learns_as_the_original_does(algorithm: type[DRQN], how: str) -> None:
    agent = algorithm("CartPole-v1", num_envs=2, learning_starts=200, batch_size=4, eval_every=0)
    agent.learn(300, progress=False)
    twin = copy.deepcopy(agent) if how == "deepcopy" else pickle.loads(pickle.dumps(agent))
    before = parameters(agent)
    for each in (agent, twin):
        each.learn(100, progress=False)
    assert not torch.equal(parameters(agent), before)
    states = agent.state_dict(), twin.state_dict()
    for state in states:  # a copied array has other bytes between its fields
        del state["replay"]["ring"]["storage"], state["replay"]["open"]
    assert_same(*states)
    np.testing.assert_array_equal(agent.replay.ring.storage, twin.replay.ring.storage)
    np.testing.assert_array_equal(agent.replay.open, twin.replay.open)


@pytest.mark.parametrize("algorithm", RECURRENT)
def test_compile_is_declined_in_a_sentence(algorithm: type[DRQN]) -> None:
    with pytest.raises(ValueError, match=r"'compile' is not for .*LSTM"):
        algorithm("CartPole-v1", compile=True)


# Bad input


class Pixels(gym.Env[np.ndarray, Any]):
    """An environment of images, for the message it gets."""

    def __init__(self, **keywords: Any) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
        self.action_space = gym.spaces.Discrete(2)


if "PixelsForDRQN-v0" not in gym.registry:
    gym.register("PixelsForDRQN-v0", Pixels)


@pytest.mark.parametrize("algorithm", RECURRENT)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env_id": "PixelsForDRQN-v0"}, "image observations.*needs vector observations"),
        ({"env_id": "Pendulum-v1"}, "continuous actions.*discrete actions"),
        ({"n_step": 50, "chunk_length": 16}, "'n_step' .50. must not exceed"),
        ({"lstm_units": 0}, "'lstm_units' must be at least 1"),
        ({"start_state": "warm"}, "'start_state' must be one of 'stored', 'zero'"),
        ({"observation_scale": [1.0, 2.0]}, "'observation_scale' needs 4 factors, not 2"),
        ({"chunk_lenght": 8}, "no setting 'chunk_lenght'. Did you mean 'chunk_length'"),
    ],
)
def test_a_mistake_gets_one_sentence(
    algorithm: type[Agent], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        algorithm(**settings)


def test_settings_are_those_of_dqn_and_more() -> None:
    config = DRQNConfig(env_id="CartPole-v1", total_steps=20_000, seed=0)
    assert config.double and config.chunk_length == 16
    assert rlbook.drqn.train_drqn.__name__ == "train_drqn"


@pytest.mark.parametrize("algorithm", RECURRENT)
def test_a_state_from_a_file_moves_to_the_device_of_the_network(algorithm: type[DRQN]) -> None:
    agent = algorithm("CartPole-v1")
    state = agent.carried_state(None, np.ones(2, dtype=bool))
    agent.device = torch.device("meta")  # stands for a GPU
    moved = agent.carried_state(state, np.zeros(2, dtype=bool))
    assert {part.device.type for part in moved} == {"meta"}
