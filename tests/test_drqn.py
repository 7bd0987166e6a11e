"""What the chapter on DRQN cannot test about itself: references, exact resume, bad input."""

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
from rlbook.dqn import flatten_parameters
from rlbook.drqn import (
    DRQN,
    Chunks,
    DrawnChunks,
    DRQNConfig,
    LSTMQNetwork,
    RecurrentReplayBuffer,
    chunk_dtype,
    drqn_loss,
    n_step_chunks,
)
from rlbook.r2d2 import R2D2
from rlbook.run import RunResult, resume, train

RECURRENT = [DRQN, R2D2]


def random_network(seed: int) -> LSTMQNetwork:
    torch.manual_seed(seed)
    return LSTMQNetwork(inputs=3, actions=2, hidden=(5,), units=4)


# The model


def cell_loop(network: LSTMQNetwork, obs: Tensor, state: Any, starts: Tensor) -> Tensor:
    """The slow and plain way: one LSTMCell step after the other, memory zeroed at each start."""
    lstm = network.lstm
    cell = nn.LSTMCell(lstm.input_size, lstm.hidden_size)
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    cell.load_state_dict({name: getattr(lstm, f"{name}_l0") for name in names})
    hidden, memory = state
    outputs = []
    for x, start in zip(obs, starts, strict=True):
        keep = (~start).float().unsqueeze(1)
        hidden, memory = cell(network.encoder(x), (hidden * keep, memory * keep))
        outputs.append(network.head(hidden))
    return torch.stack(outputs)


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_chunked_forward_equals_a_loop_of_cells_with_resets(seed: int, chance: float) -> None:
    network = random_network(seed)
    obs, starts = torch.randn(9, 6, 3), torch.rand(9, 6) < chance
    state = torch.randn(6, 4), torch.randn(6, 4)
    expected = cell_loop(network, obs, state, starts)
    actual = network.q_values_sequence(obs, state, starts)
    assert actual.shape == (9, 6, 2)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chance", [0.0, 0.3])
def test_gradient_of_the_chunked_forward_equals_that_of_the_loop(chance: float) -> None:
    network = random_network(0)
    obs, starts = torch.randn(7, 4, 3), torch.rand(7, 4) < chance
    state = torch.randn(4, 4), torch.randn(4, 4)
    gradients = []
    for forward in (network.q_values_sequence, lambda *x: cell_loop_with(network, *x)):
        network.zero_grad()
        forward(obs, state, starts).square().mean().backward()
        gradients.append([p.grad.clone() for p in network.parameters() if p.grad is not None])
    for fast, slow in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-6)


def cell_loop_with(network: LSTMQNetwork, obs: Tensor, state: Any, starts: Tensor) -> Tensor:
    """The loop with the network's own weights, so that gradients arrive there."""
    lstm = network.lstm
    hidden, memory = state
    outputs = []
    for x, start in zip(obs, starts, strict=True):
        keep = (~start).float().unsqueeze(1)
        before = (hidden * keep, memory * keep)
        hidden, memory = torch.lstm_cell(network.encoder(x), before, *lstm.parameters())
        outputs.append(network.head(hidden))
    return torch.stack(outputs)


def test_acting_step_by_step_equals_the_sequence() -> None:
    network = random_network(1)
    obs, starts = torch.randn(8, 3, 3), torch.rand(8, 3) < 0.3
    state = network.initial_state(3)
    expected = network.q_values_sequence(obs, state, starts)
    for x, start, q in zip(obs, starts, expected, strict=True):
        actual, state = network.act(x, state, start)
        torch.testing.assert_close(actual, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hidden", [(), (8,), (8, 5)])
@pytest.mark.parametrize("chance", [0.0, 0.3])
def test_the_way_back_by_hand_is_that_of_autograd(hidden: tuple[int, ...], chance: float) -> None:
    torch.manual_seed(0)
    network = LSTMQNetwork(inputs=3, actions=2, hidden=hidden, units=4)
    flat = flatten_parameters(network)
    obs, starts = torch.randn(7, 4, 3), torch.rand(7, 4) < chance
    state, slope = (torch.randn(4, 4), torch.randn(4, 4)), torch.randn(7, 4, 2)
    expected = network.q_values_sequence(obs, state, starts)
    expected.backward(slope)
    assert flat.grad is not None
    by_autograd = flat.grad.clone()
    flat.grad.fill_(float("nan"))  # what stood there before must not matter
    q, trace = network.trace(obs, state, starts)
    network.backward(trace, slope)
    torch.testing.assert_close(q, expected.detach())
    torch.testing.assert_close(flat.grad, by_autograd)
    assert not obs.requires_grad


# The buffer


def one_target(
    chunk: list[dict[str, Any]], t: int, n: int, gamma: float
) -> tuple[float, float, int, bool]:
    """Sum at most n rewards by hand: return, discount, place of the bootstrap, termination."""
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
    stored = {row["obs"][0].tobytes(): row for row in buffer.ring.rows[: len(buffer)]}
    for chunk in expected:
        row = stored[chunk[0]["obs"].tobytes()]
        assert row["mask"].tolist() == [True] * len(chunk) + [False] * (6 - len(chunk))
        np.testing.assert_array_equal(row["hidden"], chunk[0]["state"][0])
        np.testing.assert_array_equal(row["cell"], chunk[0]["state"][1])
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
    rows = np.zeros(2, chunk_dtype(1, 1, 4))
    rows["mask"][:, :3], rows["reward"] = True, 1.0
    rows["terminated"][1, 2] = True  # the first chunk is truncated after three steps
    chunks = n_step_chunks(rows, n=2, gamma=0.5)
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
    assert [part.shape for part in chunks.state] == [(5, 4), (5, 4)]


def test_chunks_drawn_into_given_memory_are_those_of_a_sample() -> None:
    buffer, same = (RecurrentReplayBuffer(500, chunk_dtype(2, 4, 6), 3, 2, 0.9, 7) for _ in "ab")
    for each in (buffer, same):
        play(each, 200, 0)
        each.ring.rows["episode_start"][:5, 2] = True  # so that some batches hold starts within
    room, within = DrawnChunks(5, buffer.ring.rows.dtype), set()
    for _ in range(20):
        found, expected = buffer.sample(5, out=room), same.sample(5)
        within.add(found.starts_within)
        for name, part in vars(expected).items():
            here = getattr(found, name)
            if isinstance(part, torch.Tensor):
                assert torch.equal(here, part) and here.is_contiguous()
            elif isinstance(part, tuple):
                assert all(map(torch.equal, here, part))
            else:
                assert here == part
    assert within == {False, True}


def test_starts_are_given_to_the_network_only_if_one_lies_within() -> None:
    rows = np.zeros(3, chunk_dtype(2, 4, 6))
    rows["episode_start"][0, 0] = True
    assert Chunks.from_rows(rows).starts(0, 7) is None  # the memory at the start is 0 already
    rows["episode_start"][1, 2] = True
    chunks = Chunks.from_rows(rows)
    for first, last in ((0, 7), (0, 2), (2, 7)):
        found = chunks.starts(first, last)
        assert found is not None and torch.equal(found, chunks.episode_start[first:last])


def test_samples_and_open_chunks_survive_a_round_trip() -> None:
    def make() -> RecurrentReplayBuffer:
        return RecurrentReplayBuffer(20, chunk_dtype(2, 4, 6), 3, 2, 0.9, 7)

    first, second = make(), make()
    play(first, 100, 1)
    second.load_state_dict(first.state_dict())
    assert (second.open.filled == first.open.filled).all() and first.open.filled.any()
    for buffer in (first, second):
        play(buffer, 50, 2)
    for _ in range(5):
        one, two = first.sample(4), second.sample(4)
        assert torch.equal(one.obs, two.obs) and torch.equal(one.reward, two.reward)


def test_an_episode_that_was_left_is_cut_as_if_truncated() -> None:
    buffer = RecurrentReplayBuffer(20, chunk_dtype(2, 4, 6), 3, 2, 0.9, 7)
    play(buffer, 4, 1)
    before, waiting = len(buffer), int((buffer.open.filled > 0).sum())
    episodes = play(buffer, 1, 2)  # all start anew, as in a second call of `learn`
    ended = sum(bool(e[0]["terminated"] or e[0]["truncated"]) for e in episodes)
    assert len(buffer) == before + waiting + ended
    assert buffer.ring.rows["episode_start"][: len(buffer), 1:].sum() == 0


@pytest.mark.parametrize("agent_class", RECURRENT)
@pytest.mark.parametrize("start_state", ["stored", "zero"])
@pytest.mark.parametrize("previous_action", [False, True])
def test_every_kind_of_memory_learns(
    agent_class: type[DRQN], start_state: str, previous_action: bool
) -> None:
    settings: dict[str, Any] = {"start_state": start_state, "previous_action": previous_action}
    settings |= {"chunk_length": 16, "batch_size": 4, "warmup_steps": 100, "eval_every": 0}
    agent = agent_class("CartPole-v1", num_envs=2, seed=0, **settings)
    before = agent.weights.detach().clone()
    agent.learn(200, progress=False)
    assert agent.updates > 0 and not torch.equal(agent.weights, before)


# The loss


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_loss_equals_a_plain_loop(seed: int, double: bool) -> None:
    steps = random_steps(seed)
    online = torch.randn(5, 4, 3) if double else None
    loss, metrics = drqn_loss(**steps, next_q_online=online)
    errors = []
    for t, b in steps["mask"].nonzero().tolist():
        values = steps["next_q_target"][t, b]
        best = values.max() if online is None else values[online[t, b].argmax()]
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


@pytest.mark.parametrize("algorithm", RECURRENT)
def test_garbage_in_padded_steps_changes_no_update(algorithm: type[DRQN]) -> None:
    weights = []
    for garbage in (False, True):
        agent = algorithm("CartPole-v1", seed=1, total_steps=600, warmup_steps=10_000)
        train(agent, progress=False)
        batch = agent.sample()
        assert not batch.mask.all()
        if garbage:
            spoil(batch)
        agent.update(batch)
        weights.append(torch.cat([p.detach().flatten() for p in agent.online.parameters()]))
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
def test_memory_advances_on_random_actions_and_is_zeroed_at_starts(algorithm: type[DRQN]) -> None:
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


def test_the_memory_that_is_stored_is_the_one_before_the_step() -> None:
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
    np.testing.assert_array_equal(agent.replay.open.rows["hidden"], seen[3][0].numpy())
    assert not agent.replay.ring.rows["hidden"][:2].any()  # an episode starts with no memory


@pytest.mark.parametrize("algorithm", RECURRENT)
def test_target_network_unrolls_its_own_memory(algorithm: type[DRQN]) -> None:
    agent = algorithm("CartPole-v1", seed=3, total_steps=800, warmup_steps=10_000, double=False)
    train(agent, progress=False)
    batch = agent.sample()
    before = agent.update(batch).metrics["target_mean"]
    with torch.no_grad():  # its recurrent weights alone must change the targets
        list(agent.target.lstm.parameters())[1].mul_(3.0)
    assert agent.update(batch).metrics["target_mean"] != before


def settings_of_a_short_run(path: Path) -> dict[str, Any]:
    return {
        "run_dir": str(path),
        "total_steps": 1_500,
        "num_envs": 4,
        "warmup_steps": 200,
        "update_every": 16,
        "checkpoint_every": 500,
        "eval_every": 500,
        "eval_episodes": 3,
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
        if agent.global_step == 1_236:
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
    agent = algorithm("CartPole-v1", total_steps=400)
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
def test_drqn_learns_what_memory_alone_can_tell(length: int) -> None:
    agent = DRQN(
        "rlbook/TMaze-v0",
        env_kwargs={"length": length},
        num_envs=8,
        chunk_length=8,
        gamma=0.98,
        update_every=8,
        warmup_steps=200,
        epsilon_steps=1_500,
        tau=0.05,
        target_every=1,
        eval_every=0,
    )
    agent.learn(4_000, progress=False)
    assert agent.evaluate(30).mean >= 0.9


@pytest.mark.parametrize("algorithm", RECURRENT)
def test_without_memory_only_the_step_itself_counts(algorithm: type[Agent]) -> None:
    settings: dict[str, Any] = {"chunk_length": 20, "n_step": 2, "warmup_steps": 200}
    agent: Any = algorithm("CartPole-v1", memory=False, **settings)
    agent.learn(400, progress=False)
    batch = agent.sample()
    q = agent.online.q_values_sequence(
        batch.obs, agent.start(batch), batch.starts(0, len(batch.obs))
    ).detach()
    steps, chunks = q.shape[:2]
    nothing = agent.online.initial_state(steps * chunks)
    alone, _ = agent.online.act(batch.obs.flatten(0, 1), nothing)
    torch.testing.assert_close(q, alone.detach().view_as(q))
    hidden, cell, previous = agent.remember(None, np.ones(1, dtype=bool))
    other = hidden + 1, cell - 1, previous  # what another past would have left
    obs, no_start = np.full((1, 4), 0.1, np.float32), np.zeros(1, dtype=bool)
    pasts = (hidden, cell, previous), other
    after = [agent.act(obs, past, no_start, explore=False)[1] for past in pasts]
    for one, two in zip(*after, strict=True):
        assert torch.equal(one, two)


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
        ({"units": 0}, "'units' must be at least 1"),
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
def test_a_memory_from_a_file_moves_to_the_device_of_the_network(algorithm: type[Agent]) -> None:
    agent: Any = algorithm("CartPole-v1")
    state = agent.remember(None, np.ones(2, dtype=bool))
    agent.device = torch.device("meta")  # stands for a GPU
    moved = agent.remember(state, np.zeros(2, dtype=bool))
    assert {part.device.type for part in moved} == {"meta"}
