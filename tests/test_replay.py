"""What the chapter on replay promises, tried on more than its own examples."""

import io
from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from rlbook.replay import (
    NStepAccumulator,
    ReplayBuffer,
    ReplayConfig,
    make_transitions,
    storage_dtype,
    to_batch,
    transition_dtype,
    updates_due,
)

VECTOR = Box(-1, 1, (3,), np.float32)
DTYPE = transition_dtype(VECTOR, Discrete(2))
unhurried = settings(deadline=None)  # a busy machine is no failure


def numbered(start: int, count: int) -> np.ndarray:
    """Return transitions whose every field tells their number."""
    numbers = np.arange(start, start + count)
    return make_transitions(
        DTYPE,
        obs=numbers[:, None] + np.array([0.0, 0.25, 0.5]),
        action=numbers,
        reward=numbers,
        next_obs=numbers[:, None] + np.array([1.0, 1.25, 1.5]),
        terminated=numbers % 3 == 0,
        discount=0.5,
    )


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Write a state and read it as a stranger's, without running code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    content: dict[str, Any] = torch.load(file, weights_only=True)
    return content


def stored(buffer: ReplayBuffer) -> list[int]:
    """Return the numbers of the stored transitions, the oldest first."""
    rewards = buffer.storage["reward"][: len(buffer)]
    oldest = buffer.position if len(buffer) == len(buffer.storage) else 0
    return [int(number) for number in np.roll(rewards, -oldest)]


# A transition


@pytest.mark.parametrize(
    ("space", "dtype", "shape"),
    [
        (Box(-1, 1, (3,), np.float64), np.float32, (3,)),
        (Box(-1, 1, (3,), np.float16), np.float32, (3,)),
        (Box(0, 255, (8, 8, 3), np.uint8), np.uint8, (8, 8, 3)),
        (Discrete(4), np.int64, ()),
        (gym.spaces.MultiBinary(5), np.int8, (5,)),
        (gym.spaces.MultiDiscrete([2, 3]), np.int64, (2,)),
    ],
)
def test_only_floats_change_their_type(space: gym.Space, dtype: type, shape: tuple) -> None:
    assert storage_dtype(space) == (np.dtype(dtype), shape)


@pytest.mark.parametrize("space", [gym.spaces.Dict(a=VECTOR), gym.spaces.Tuple([VECTOR])])
def test_a_space_of_several_arrays_is_refused(space: gym.Space) -> None:
    with pytest.raises(ValueError, match="not one array"):
        storage_dtype(space)


@pytest.mark.parametrize("action", [Discrete(3), Box(-1, 1, (2,), np.float32)])
@pytest.mark.parametrize(
    "observation",
    [
        VECTOR,
        Box(0, 255, (5, 7, 3), np.uint8),  # 105 bytes, so that the floats behind it need padding
        gym.spaces.MultiBinary(3),
        Box(0, 1, (3,), np.int16),
        Discrete(4),
    ],
)
def test_every_column_becomes_a_tensor_without_a_copy(
    observation: gym.Space, action: gym.Space
) -> None:
    buffer = ReplayBuffer(16, transition_dtype(observation, action), seed=0)
    observation.seed(0)
    values = np.stack([observation.sample() for _ in range(10)])
    buffer.add(
        make_transitions(
            buffer.storage.dtype,
            obs=values,
            action=np.stack([action.sample() for _ in range(10)]),
            reward=np.arange(10),
            next_obs=values[::-1],
            terminated=np.arange(10) % 2 == 0,
            discount=0.9,
        )
    )
    drawn = buffer.sample(7)
    batch = to_batch(drawn, torch.device("cpu"))
    for name in drawn.dtype.names or ():
        column = getattr(batch, name)
        assert column.data_ptr() == drawn[name].ctypes.data
        assert np.array_equal(column.numpy(), drawn[name])
    assert batch.terminated.dtype == torch.bool
    assert batch.obs.numpy().dtype == storage_dtype(observation)[0]
    assert batch.reward.shape == batch.discount.shape == batch.terminated.shape == (7,)


def test_samples_are_copies() -> None:
    buffer = ReplayBuffer(4, DTYPE, seed=0)
    buffer.add(numbered(0, 4))
    before = buffer.storage.copy()
    buffer.sample(16)["reward"] = -1
    assert np.array_equal(buffer.storage, before)


# The ring


@unhurried
@given(st.integers(1, 12), st.lists(st.integers(0, 30), max_size=20))
def test_the_ring_is_a_deque(capacity: int, counts: list[int]) -> None:
    buffer, model, total = ReplayBuffer(capacity, DTYPE, seed=0), deque[int](maxlen=capacity), 0
    for count in counts:  # none, a few, across the end, more than there is room for
        buffer.add(numbered(total, count))
        model.extend(range(total, total + count))
        total += count
        assert len(buffer) == len(model)
        assert stored(buffer) == list(model)
    if model:
        drawn = buffer.sample(50)
        assert set(drawn["reward"]) <= set(model)
        for one in drawn:  # none is a mixture of two
            assert one == numbered(int(one["reward"]), 1)[0]


@unhurried
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_transitions_can_come_in_any_portions(counts: list[int], data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 10))
    one, many = ReplayBuffer(capacity, DTYPE, seed=1), ReplayBuffer(capacity, DTYPE, seed=1)
    many.add(numbered(0, sum(counts)))
    start = 0
    for count in counts:
        one.add(numbered(start, count))
        start += count
    assert one.position == many.position
    assert np.array_equal(one.sample(32), many.sample(32))


def test_adding_does_not_alias_what_the_caller_has() -> None:
    buffer, drawn = ReplayBuffer(4, DTYPE, seed=0), numbered(0, 3)
    buffer.add(drawn)
    drawn["reward"] = -1
    assert stored(buffer) == [0, 1, 2]


def test_draws_are_uniform() -> None:
    buffer = ReplayBuffer(100, DTYPE, seed=0)
    buffer.add(numbered(0, 250))
    counts = np.bincount(buffer.sample(100_000)["action"], minlength=250)
    assert counts[:150].sum() == 0
    assert chisquare(counts[150:]).pvalue > 1e-3


def test_a_ring_that_is_not_full_draws_only_what_is_there() -> None:
    buffer = ReplayBuffer(1_000, DTYPE, seed=0)
    buffer.add(numbered(1, 20))
    counts = np.bincount(buffer.sample(20_000)["action"], minlength=21)
    assert counts[0] == 0 and len(counts) == 21
    assert chisquare(counts[1:]).pvalue > 1e-3


def test_mistakes_get_a_sentence() -> None:
    with pytest.raises(ValueError, match="is empty"):
        ReplayBuffer(4, DTYPE, seed=0).sample(1)
    with pytest.raises(ValueError, match="room for one transition"):
        ReplayBuffer(0, DTYPE, seed=0)


def test_the_global_generator_is_left_alone() -> None:
    np.random.seed(5)
    expected = np.random.random()
    np.random.seed(5)
    buffer = ReplayBuffer(4, DTYPE, seed=0)
    buffer.add(numbered(0, 4))
    buffer.sample(8)
    assert np.random.random() == expected


# Stop and go on


@unhurried
@given(st.integers(1, 10), st.integers(0, 30), st.integers(0, 30), st.integers(0, 2**64))
def test_a_loaded_ring_goes_on_as_the_stored_one(
    capacity: int, before: int, after: int, seed: int
) -> None:
    ring, other = ReplayBuffer(capacity, DTYPE, seed), ReplayBuffer(capacity, DTYPE, seed + 1)
    other.add(numbered(1_000, 2 * capacity))  # stale drawn, which must never be seen again
    ring.add(numbered(0, before))
    if before:
        ring.sample(3)
    other.load_state_dict(through_a_file(ring.state_dict()))
    for i in range(before, before + after):
        ring.add(numbered(i, 1))
        other.add(numbered(i, 1))
        assert np.array_equal(ring.sample(5), other.sample(5))
    assert stored(ring) == stored(other)
    for name, value in ring.state_dict().items():
        same = other.state_dict()[name]
        assert torch.equal(value, same) if name == "storage" else value == same


def test_a_loaded_ring_shares_no_memory_with_what_it_was_loaded_from() -> None:
    ring, other = ReplayBuffer(4, DTYPE, seed=0), ReplayBuffer(4, DTYPE, seed=0)
    ring.add(numbered(0, 4))
    other.load_state_dict(ring.state_dict())
    ring.add(numbered(100, 4))
    assert stored(other) == [0, 1, 2, 3]


def test_a_state_is_as_large_as_what_is_stored_and_no_copy() -> None:
    ring = ReplayBuffer(1_000_000, DTYPE, seed=0)
    ring.add(numbered(0, 10))
    drawn = ring.state_dict()["storage"]
    assert drawn.untyped_storage().nbytes() == 10 * DTYPE.itemsize
    assert drawn.data_ptr() == ring.storage.ctypes.data


@pytest.mark.parametrize("capacity", [3, 5, 8])
def test_a_ring_of_another_size_is_refused(capacity: int) -> None:
    ring, other = ReplayBuffer(4, DTYPE, seed=0), ReplayBuffer(capacity, DTYPE, seed=0)
    ring.add(numbered(0, 6))
    with pytest.raises(ValueError, match="capacity 4, this one"):
        other.load_state_dict(ring.state_dict())
    assert len(other) == 0


def test_a_ring_of_other_transitions_is_refused() -> None:
    state = ReplayBuffer(4, DTYPE, seed=0).state_dict()
    other = ReplayBuffer(4, transition_dtype(Box(-1, 1, (4,), np.float32), Discrete(2)), seed=0)
    with pytest.raises(ValueError, match="has the dtype"):
        other.load_state_dict(state)


def test_equal_histories_give_equal_bytes() -> None:
    """Also in the bytes between the fields: a resumed run is compared by its file."""
    garbage = np.empty(8, DTYPE)
    garbage.view(np.uint8)[:] = 255
    for name in DTYPE.names or ():
        garbage[name] = numbered(0, 8)[name]
    one, two = ReplayBuffer(5, DTYPE, seed=0), ReplayBuffer(5, DTYPE, seed=0)
    one.add(garbage)
    two.add(numbered(0, 8))
    assert torch.equal(one.state_dict()["storage"], two.state_dict()["storage"])


# n-step returns

STEP = transition_dtype(Box(-1e6, 1e6, (2,), np.float32), Discrete(2))
ORDINARY, TERMINATED, TRUNCATED = 0, 1, 2


def step_of_all(t: int, reward: list[float], kind: list[int], gamma: float) -> np.ndarray:
    """Return step t of each environment; an observation is (environment, time)."""
    envs = np.arange(len(reward))
    return make_transitions(
        STEP,
        obs=np.stack([envs, np.full(len(envs), t)], axis=1),
        action=envs % 2,
        reward=np.array(reward),
        next_obs=np.stack([envs, np.full(len(envs), t + 0.5)], axis=1),
        terminated=np.array(kind) == TERMINATED,
        discount=gamma,
    )


def plain_windows(rewards: list[list[float]], kinds: list[list[int]], n: int, gamma: float) -> dict:
    """Return the complete windows of each environment and first step, written out as a loop."""
    windows = {}
    for env in range(len(rewards[0])):
        for first in range(len(rewards)):
            total, weight = 0.0, 1.0
            for t in range(first, min(first + n, len(rewards))):
                total, weight = total + weight * rewards[t][env], weight * gamma
                if kinds[t][env] != ORDINARY or t == first + n - 1:
                    windows[env, first] = (total, weight, t, kinds[t][env] == TERMINATED)
                    break
    return windows


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[list[float]], list[list[int]]]:
    """Draw rewards and kinds of step (time, environments)."""
    envs, steps = draw(st.integers(1, 4)), draw(st.integers(1, 25))
    reward = st.floats(-10, 10, width=32)
    kind = st.sampled_from([ORDINARY, ORDINARY, ORDINARY, TERMINATED, TRUNCATED])
    rewards = [draw(st.lists(reward, min_size=envs, max_size=envs)) for _ in range(steps)]
    kinds = [draw(st.lists(kind, min_size=envs, max_size=envs)) for _ in range(steps)]
    return rewards, kinds


@unhurried
@given(lives(), st.integers(1, 6), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_windows_are_those_of_a_plain_loop(
    life: tuple[list[list[float]], list[list[int]]], n: int, gamma: float
) -> None:
    rewards, kinds = life
    accumulator = NStepAccumulator(n, gamma, len(rewards[0]), STEP)
    expected, found = plain_windows(rewards, kinds, n, gamma), set()
    for t, (reward, kind) in enumerate(zip(rewards, kinds, strict=True)):
        truncated = np.array(kind) == TRUNCATED
        for row in accumulator.add(step_of_all(t, reward, kind, gamma), truncated):
            env, first = (int(number) for number in row["obs"])
            assert (env, first) not in found  # each window once
            found.add((env, first))
            total, weight, last, terminated = expected[env, first]
            assert last == t  # as soon as it is complete, and not later
            assert row["reward"] == pytest.approx(total, rel=1e-4, abs=1e-4)
            assert row["discount"] == pytest.approx(weight, rel=1e-5)
            assert row["next_obs"].tolist() == [env, t + 0.5]
            assert row["terminated"] == terminated
            assert row["action"] == env % 2
    assert found == set(expected)


@unhurried
@given(lives(), st.integers(1, 6), st.data())
def test_a_loaded_accumulator_goes_on_as_the_stored_one(
    life: tuple[list[list[float]], list[list[int]]], n: int, data: st.DataObject
) -> None:
    rewards, kinds = life
    cut = data.draw(st.integers(0, len(rewards)))
    one, two = (NStepAccumulator(n, 0.9, len(rewards[0]), STEP) for _ in range(2))
    two.windows["reward"], two.waiting[:], two.newest = 99, True, n - 1  # to be forgotten
    for t, (reward, kind) in enumerate(zip(rewards, kinds, strict=True)):
        if t == cut:
            two.load_state_dict(through_a_file(one.state_dict()))
        drawn, truncated = step_of_all(t, reward, kind, 0.9), np.array(kind) == TRUNCATED
        done = one.add(drawn, truncated)
        if t >= cut:
            assert np.array_equal(done, two.add(drawn, truncated))


def test_what_was_handed_out_does_not_change_later() -> None:
    accumulator = NStepAccumulator(3, 0.5, 1, STEP)
    kept, never = [], np.array([False])
    for t in range(9):
        kept.append(accumulator.add(step_of_all(t, [1.0], [ORDINARY], 0.5), never))
    rewards = np.concatenate(kept)["reward"]
    assert rewards.tolist() == [1.75] * 7


def test_stored_steps_of_another_n_are_refused() -> None:
    state = NStepAccumulator(1, 0.9, 2, STEP).state_dict()  # (1, ...) would broadcast
    with pytest.raises(ValueError, match="were stored"):
        NStepAccumulator(3, 0.9, 2, STEP).load_state_dict(state)


def test_discrete_actions_are_stored_as_pytorch_wants_them() -> None:
    for dtype in (np.uint8, np.int32, np.int64):
        assert storage_dtype(gym.spaces.Discrete(3, dtype=dtype)) == (np.dtype(np.int64), ())


# When to learn


@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 40), st.integers(1, 3))
def test_updates_are_due_once_for_each_interval(
    num_envs: int, train_frequency: int, learning_starts: int, gradient_steps: int
) -> None:
    config = ReplayConfig(
        num_envs=num_envs,
        train_frequency=train_frequency,
        learning_starts=learning_starts,
        gradient_steps=gradient_steps,
    )
    steps = range(num_envs, 200, num_envs)
    due = [updates_due(config, step) for step in steps]
    learning = [step for step in steps if step > learning_starts]
    first = learning[0] - num_envs  # the last step before learning
    multiples = [step for step in range(first + 1, learning[-1] + 1) if step % train_frequency == 0]
    assert sum(due) == gradient_steps * len(multiples)


def test_a_batch_must_fit_into_the_buffer() -> None:
    with pytest.raises(ValueError, match=r"'batch_size' \(64\) must not exceed 'buffer_size'"):
        ReplayConfig(buffer_size=8)
