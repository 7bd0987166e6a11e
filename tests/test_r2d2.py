"""What the chapter on R2D2 cannot test about itself: frequencies, references, exact chunks."""

from typing import Any

import numpy as np
import pytest
import torch
from recurrent import play, random_steps, split
from scipy.stats import chisquare

from rlbook.drqn import RecurrentReplayBuffer, chunk_dtype, drqn_loss
from rlbook.progress import RunFailed
from rlbook.r2d2 import (
    R2D2,
    PrioritizedRecurrentReplayBuffer,
    R2D2Config,
    SumTree,
    importance_weights,
    r2d2_loss,
    rescale,
    rescale_inverse,
    sequence_priorities,
)
from rlbook.run import train

# The sum tree


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 64, 100, 300])
def test_the_tree_finds_what_a_cumulative_sum_finds(capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    tree, values = SumTree(capacity), np.zeros(capacity)
    for _ in range(20):
        indices = rng.integers(capacity, size=5)
        tree.set(indices, rng.random(5))
        values[indices] = tree[indices]  # where an index comes twice, one of its values stays
    assert tree.total == pytest.approx(values.sum())
    points = rng.random(1_000) * tree.total
    expected = np.searchsorted(np.cumsum(values), points, side="right")
    near = np.abs(np.cumsum(values)[:, None] - points).min(axis=0) < 1e-12
    assert (tree.find(points) == expected)[~near].all()


def test_a_leaf_of_zero_is_never_found() -> None:
    tree = SumTree(5)
    tree.set(np.array([1, 3]), np.array([0.1, 0.2]))
    points = np.array([0.0, 0.05, 0.1, 0.25, np.nextafter(tree.total, 0), tree.total, 1.0])
    assert set(tree.find(points)) <= {1, 3}


# The buffer


def make_buffer(**settings: Any) -> PrioritizedRecurrentReplayBuffer:
    return PrioritizedRecurrentReplayBuffer(400, chunk_dtype(2, 4, 6), 3, 2, 0.9, 0, **settings)


def test_without_burn_in_and_overlap_chunks_are_those_of_drqn() -> None:
    plain = RecurrentReplayBuffer(400, chunk_dtype(2, 4, 6), 3, 2, 0.9, 0)
    buffer = make_buffer()
    for each in (plain, buffer):
        play(each, 120, 3)
    assert len(plain) == len(buffer)
    assert plain.ring.storage.tobytes() == buffer.ring.storage.tobytes()


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_frequencies_match_the_priorities(alpha: float) -> None:
    buffer = make_buffer(alpha=alpha)
    play(buffer, 60, 1)
    count = len(buffer)
    priorities = np.random.default_rng(0).exponential(size=count) + 0.01
    buffer.update_priorities(np.arange(count), priorities)
    sampled = np.concatenate([buffer.sample(100).indices for _ in range(500)])
    expected = priorities**alpha / (priorities**alpha).sum() * len(sampled)
    assert chisquare(np.bincount(sampled, minlength=count), expected).pvalue > 1e-3


def test_weights_make_up_for_the_priorities() -> None:
    buffer = make_buffer(alpha=0.5)
    play(buffer, 60, 1)
    priorities = np.arange(1.0, len(buffer) + 1)
    buffer.update_priorities(np.arange(len(buffer)), priorities)
    batch = buffer.sample(30, beta=0.7)
    chances = priorities**0.5 / (priorities**0.5).sum()
    weights = (len(buffer) * chances[batch.indices]) ** -0.7
    np.testing.assert_allclose(batch.weights.numpy(), weights / weights.max(), rtol=1e-5)
    assert batch.weights.max() == 1.0


def test_a_new_chunk_has_the_highest_priority_and_overwrites_an_old_one() -> None:
    buffer = PrioritizedRecurrentReplayBuffer(8, chunk_dtype(2, 4, 6), 1, 1, 0.9, 0, alpha=1.0)
    play(buffer, 40, 0)
    buffer.update_priorities(np.array([0, 1]), np.array([5.0, 0.5]))
    position = buffer.ring.position
    play(buffer, 6, 9)
    assert buffer.tree[position] == 5.0


def test_a_chunk_needs_a_step_of_its_own() -> None:
    with pytest.raises(ValueError, match="must be less than 'chunk_length'"):
        R2D2Config(env_id="CartPole-v1", chunk_length=8, burn_in=0, overlap=8)


def test_an_empty_buffer_says_so() -> None:
    with pytest.raises(ValueError, match="empty: add chunks"):
        make_buffer().sample(4)


@pytest.mark.parametrize("bad", [np.array([np.nan]), np.array([np.inf]), np.ones(2)])
def test_bad_priorities_are_refused(bad: np.ndarray) -> None:
    buffer = make_buffer()
    play(buffer, 30, 0)
    with pytest.raises(ValueError, match="one finite priority for each index"):
        buffer.update_priorities(np.array([0]), bad)


def test_priorities_and_open_chunks_survive_a_round_trip() -> None:
    first, second = make_buffer(burn_in=2, overlap=2), make_buffer(burn_in=2, overlap=2)
    play(first, 100, 1)
    first.update_priorities(np.arange(20), np.random.default_rng(0).random(20))
    second.load_state_dict(first.state_dict())
    assert (first.tree.nodes == second.tree.nodes).all()
    for buffer in (first, second):
        play(buffer, 50, 2)
    for _ in range(5):
        one, two = first.sample(4, 0.5), second.sample(4, 0.5)
        assert (one.indices == two.indices).all() and torch.equal(one.weights, two.weights)
        assert torch.equal(one.obs, two.obs) and torch.equal(one.state, two.state)


@pytest.mark.parametrize(("burn_in", "overlap"), [(0, 2), (2, 0), (2, 2), (1, 4), (3, 3)])
def test_overlapping_chunks_with_burn_in_equal_a_plain_cut(burn_in: int, overlap: int) -> None:
    length = 6
    buffer = make_buffer(burn_in=burn_in, overlap=overlap)
    episodes = play(buffer, 150, 4)
    expected = []
    for steps in episodes:
        chunk: list[Any] = []
        for step in steps:
            if not chunk and step["episode_start"]:
                chunk = [None] * burn_in
            chunk.append(step)
            ended = step["terminated"] or step["truncated"]
            if len(chunk) == length or ended:
                if len(chunk) > burn_in:  # one that is burn-in alone trains nothing
                    expected.append(chunk)
                chunk = [] if ended or overlap == 0 else chunk[-overlap:]
    assert len(buffer) == len(expected)
    stored = buffer.ring.storage[: len(buffer)]
    found = 0
    for chunk in expected:
        mask = [step is not None for step in chunk] + [False] * (length - len(chunk))
        steps = [step for step in chunk if step is not None]
        first = mask.index(True)
        same = (stored["obs"][:, first] == steps[0]["obs"]).all(axis=1)
        (found_chunk,) = stored[same & (stored["mask"] == mask).all(axis=1)]
        found += 1
        if not steps[0]["episode_start"]:
            np.testing.assert_array_equal(found_chunk["state"], steps[0]["state"])
        assert found_chunk["episode_start"][first] == steps[0]["episode_start"]
        assert found_chunk["episode_start"].sum() == steps[0]["episode_start"]
        for t, step in enumerate(steps, start=first):
            np.testing.assert_array_equal(found_chunk["obs"][t + 1], step["next_obs"])
            rewards = [s["reward"] for s in steps[t - first : t - first + 2]]
            total = rewards[0] + 0.9 * sum(rewards[1:])
            assert found_chunk["reward"][t] == pytest.approx(total, abs=1e-5)
            assert found_chunk["bootstrap"][t] == t + len(rewards)
    assert found == len(stored)


def test_every_step_is_trained_once_when_the_overlap_is_the_burn_in() -> None:
    buffer = make_buffer(burn_in=2, overlap=2)
    episodes = play(buffer, 150, 5)
    stored = buffer.ring.storage[: len(buffer)]
    trained = stored["obs"][:, 2:-1][stored["mask"][:, 2:]]
    closed = len({obs.tobytes() for obs in trained})
    assert closed == len(trained)  # none twice
    ended = 0
    for steps in episodes:
        ends = [i for i, s in enumerate(steps) if s["terminated"] or s["truncated"]]
        ended += ends[-1] + 1
    assert ended <= closed <= sum(len(steps) for steps in episodes)
    assert split(episodes[0], 6)  # the plain cut of DRQN sees the same episodes


# The loss


def test_r2d2_loss_with_equal_weights_is_that_of_drqn() -> None:
    steps = random_steps(2)
    loss, metrics, error = r2d2_loss(**steps, weights=torch.ones(4))
    plain, named = drqn_loss(**steps)
    assert float(loss) == pytest.approx(float(plain), rel=1e-5)
    for name, value in named.items():
        assert float(metrics[name]) == pytest.approx(float(value), rel=1e-5, abs=1e-6)
    assert not error[~steps["mask"]].any()


def test_padded_steps_change_neither_loss_nor_priorities() -> None:
    clean, results = random_steps(0), []
    for garbage in (False, True):
        steps = {name: part.clone() for name, part in clean.items()}
        if garbage:
            padded = ~steps["mask"]
            steps["action"][padded] = 99
            for name in ("reward", "discount", "q", "next_q_target"):
                steps[name][padded] = float("nan")
        steps["q"].requires_grad_()
        loss, _, error = r2d2_loss(**steps, weights=torch.rand(4).fill_(0.5), rescaling=True)
        loss.backward()
        assert steps["q"].grad is not None
        priorities = sequence_priorities(error, steps["mask"], 0.9)
        results.append((loss.detach(), steps["q"].grad, priorities))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_a_weight_scales_the_gradient_of_its_chunk() -> None:
    steps = random_steps(1)
    gradients = []
    for weight in (1.0, 0.25):
        q = steps["q"].clone().requires_grad_()
        weights = torch.tensor([weight, 1.0, 1.0, 1.0])
        r2d2_loss(**{**steps, "q": q}, weights=weights)[0].backward()
        assert q.grad is not None
        gradients.append(q.grad)
    torch.testing.assert_close(gradients[1][:, 0], gradients[0][:, 0] * 0.25)
    torch.testing.assert_close(gradients[1][:, 1:], gradients[0][:, 1:])


def test_wrong_weights_are_named() -> None:
    with pytest.raises(ValueError, match=r"weights must be \(4,\), not \(4, 1\)"):
        r2d2_loss(**random_steps(0), weights=torch.ones(4, 1))


def test_priorities_mix_largest_and_mean_over_valid_steps() -> None:
    error = torch.tensor([[1.0, -2.0], [-3.0, 100.0]])
    mask = torch.tensor([[True, True], [True, False]])
    assert sequence_priorities(error, mask, 0.9).tolist() == pytest.approx([2.9, 2.0])


def test_rescaling_and_its_inverse_are_exact_in_float32() -> None:
    size = torch.logspace(-8, 6, 400, dtype=torch.float64)
    x = torch.cat((-size, torch.zeros(1, dtype=torch.float64), size))
    exact = x.sign() * ((x.abs() + 1).sqrt() - 1) + 1e-3 * x
    torch.testing.assert_close(rescale(x), exact, rtol=1e-7, atol=1e-12)
    back = rescale_inverse(rescale(x.float()))
    torch.testing.assert_close(back, x.float(), rtol=2e-6, atol=0.0)


# The agent


def make_agent(**settings: Any) -> R2D2:
    agent = R2D2("CartPole-v1", seed=2, total_steps=900, learning_starts=10_000, **settings)
    train(agent, progress=False)
    return agent


def test_update_stores_the_priorities_that_it_shows() -> None:
    agent = make_agent(alpha=1.0)
    batch = agent.sample()
    agent.update(batch)
    priorities = agent.last_sequence_priorities
    assert priorities is not None and priorities.shape == (16,)
    stored = agent.replay.tree[batch.indices]
    np.testing.assert_allclose(stored, priorities, rtol=1e-6)


def test_no_gradient_flows_through_burn_in() -> None:
    agent = make_agent(burn_in=8, overlap=8)
    batch = agent.sample()
    obs = batch.obs.requires_grad_()
    assert not agent.state_after_burn_in(agent.q_network, batch)[0].requires_grad
    agent.compute_gradients(batch)
    assert obs.grad is not None and not obs.grad[:8].any() and obs.grad[8:].any()


def test_each_network_burns_in_with_its_own_parameters() -> None:
    agent = make_agent(burn_in=8, overlap=8)
    batch = agent.sample()
    networks = agent.q_network, agent.target_network
    one, two = (agent.state_after_burn_in(network, batch) for network in networks)
    assert torch.equal(one[0], two[0])
    with torch.no_grad():
        next(agent.target_network.lstm.parameters()).mul_(2.0)
    assert not torch.equal(one[0], agent.state_after_burn_in(agent.target_network, batch)[0])


def test_burn_in_changes_what_is_trained_and_an_episode_start_undoes_it() -> None:
    agent = make_agent(burn_in=8, overlap=8)
    batch = agent.sample()
    start = batch.episode_start[8]  # where the burn-in is padding
    assert start.any() and not start.all()
    priorities = []
    for other_past in (False, True):
        if other_past:
            batch.obs[:8] += 1.0
            batch.state += 1.0
        agent.compute_gradients(batch)
        assert agent.last_sequence_priorities is not None
        priorities.append(agent.last_sequence_priorities)
    same = priorities[0] == priorities[1]
    assert same[start.numpy()].all() and not same[~start.numpy()].any()


def test_beta_rises_to_one() -> None:
    agent = R2D2("CartPole-v1", total_steps=1_000, beta=0.4)
    betas = []
    for agent.global_step in (0, 500, 1_000, 2_000):
        betas.append(agent.beta_now())
    assert betas == pytest.approx([0.4, 0.7, 1.0, 1.0])


def test_importance_weights_can_be_turned_off() -> None:
    agent = R2D2("CartPole-v1", total_steps=1_000, beta=0.0, beta_end=0.0)
    agent.global_step = 700
    assert agent.beta_now() == 0.0
    probability = np.array([0.75, 0.25])
    assert importance_weights(probability, count=2, beta=agent.beta_now()).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_length": 8, "burn_in": 8}, "at least 'burn_in' plus one .9."),
        ({"chunk_length": 12, "burn_in": 4, "n_step": 9}, "'n_step' .9. must not exceed the 8"),
        ({"chunk_length": 12, "burn_in": 4, "overlap": 9}, "'overlap' .9. must not exceed the 8"),
        ({"eta": 1.5}, "'eta' must be at most 1"),
    ],
)
def test_a_mistake_gets_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        R2D2Config(**settings)


@pytest.mark.parametrize("settings", [{"overlap": 0}, {"overlap": 8}])
def test_no_chunk_of_burn_in_alone_is_ever_stored(settings: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"chunk_length": 16, "burn_in": 8, "n_step": 2, "learning_starts": 20}
    maze: dict[str, Any] = {"env_id": "rlbook/TMaze-v0", "env_kwargs": {"length": 9}}
    agent = R2D2(**maze, batch_size=1, **sizes, **settings)
    for _ in range(20):
        agent.learn(16, progress=False)  # each call begins new episodes
    stored = agent.replay.ring.storage[: len(agent.replay)]
    assert agent.updates > 20 and np.asarray(stored["mask"])[:, 8:].any(axis=1).all()


def test_errors_that_are_not_finite_stop_the_run_with_its_step() -> None:
    agent = R2D2("CartPole-v1", lr=1e36, learning_starts=200, train_frequency=1)
    with pytest.raises(RunFailed, match=r"stopped at step \d+ because .* not finite"):
        agent.learn(600, progress=False)


# Exploring


def test_each_environment_explores_as_often_as_its_epsilon_says() -> None:
    agent = R2D2(num_envs=4, final_epsilon=0.6, epsilon_spread=3.0, epsilon_decay_steps=10)
    agent.global_step = 10
    obs, start, count = np.zeros((4, 4), np.float32), np.ones(4, bool), 2_000
    greedy, _ = agent.act(obs, None, start, explore=False)
    other = sum(agent.act(obs, None, start, explore=True)[0] != greedy for _ in range(count))
    expected = 0.6 ** np.array([1, 2, 3, 4]) / 2  # half of the random actions are the greedy one
    assert np.abs(other / count - expected).max() < 5 * np.sqrt(0.25 / count)
    assert (np.diff(other) < 0).all()


def test_without_a_spread_all_explore_as_drqn_does() -> None:
    agent = R2D2(num_envs=3, final_epsilon=0.1, epsilon_decay_steps=100)
    agent.global_step = 50
    assert agent.epsilon(3) == pytest.approx([0.55] * 3)
    assert agent.config.epsilon(50) == pytest.approx(0.55)


@pytest.mark.parametrize("count", [1, 3, 20])
def test_predict_explores_in_batches_of_any_size(count: int) -> None:
    agent = R2D2(num_envs=8, final_epsilon=0.4, epsilon_spread=7.0)
    actions, _ = agent.predict(np.zeros((count, 4), np.float32), deterministic=False)
    assert actions.shape == (count,)
    action, _ = agent.predict(np.zeros(4, np.float32), deterministic=False)
    assert np.shape(action) == ()
