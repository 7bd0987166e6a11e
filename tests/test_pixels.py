"""Pixels: image environments, their wrappers, and a replay buffer that stores each frame once."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbook.agent import Transition
from rlbook.envs import make_env
from rlbook.pixels import (
    ActionRepeat,
    FrameReplay,
    FrameStack,
    PixelObservation,
    PointReach,
    area_weights,
    draw_disc,
    make_pixels,
)
from rlbook.replay import NStepAccumulator, ReplayBuffer, make_transitions, transition_dtype

# PointReach


def test_point_reach_is_a_sound_environment() -> None:
    check_env(PointReach(), skip_render_check=True)


def test_point_reach_pays_one_minus_the_distance() -> None:
    env = PointReach()
    env.reset(seed=3)
    for action in ([1.0, 0.0], [-0.5, 0.25], [5.0, -5.0]):
        before = env.position.copy()
        _, reward, terminated, truncated, _ = env.step(np.array(action))
        moved = np.clip(before + 0.2 * np.clip(action, -1, 1), -1, 1)
        np.testing.assert_allclose(env.position, moved)
        assert reward == pytest.approx(1 - np.hypot(*(moved - env.goal)))
        assert not terminated and not truncated


def test_point_reach_is_cut_after_fifty_steps() -> None:
    env = make_env("rlbook/PointReach-v0")
    env.reset(seed=0)
    ends = [env.step(np.zeros(2, np.float32))[2:4] for _ in range(50)]
    assert ends == [(False, False)] * 49 + [(False, True)]


def test_point_reach_shows_both_discs_wherever_they_are() -> None:
    env = PointReach(size=24)
    env.reset(seed=0)
    for corner in ([-1, -1], [-1, 1], [1, -1], [1, 1]):
        env.position, env.goal = np.array(corner, float), -np.array(corner, float)
        image = env.observation().astype(int)
        blue, orange = (image[2] > 200).sum(), (image[0] > 200).sum()
        assert blue == orange > 20  # none is cut off at the edge
    before = env.observation()
    env.position = env.position - 0.02  # a fifth of a pixel
    assert (before != env.observation()).any()


def test_point_reach_starts_follow_from_the_seed() -> None:
    env = PointReach()
    first, second = env.reset(seed=5)[0], env.reset(seed=5)[0]
    assert np.array_equal(first, second) and (first != env.reset(seed=6)[0]).any()


@pytest.mark.parametrize("size", [7, 24.5, "24", -3])
def test_point_reach_refuses_a_bad_size(size: Any) -> None:
    with pytest.raises(ValueError, match="whole size of at least 8"):
        PointReach(size=size)


def test_a_disc_covers_its_area() -> None:
    image = np.zeros((40, 40, 3), np.int16)
    draw_disc(image, np.array([19.3, 20.6]), 10.0, (200, 100, 0))
    np.testing.assert_allclose(image.sum((0, 1)) / np.pi / 100, [200, 100, 0], rtol=0.02)


# Wrappers


@given(st.integers(1, 60), st.integers(1, 60))
def test_weights_are_means_that_lose_nothing(before: int, after: int) -> None:
    before, after = max(before, after), min(before, after)
    weights = area_weights(before, after)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(weights.sum(0), after / before, rtol=1e-5)


class Images(gym.Env[np.ndarray, Any]):
    """Has random images as observations; ends after `length` steps."""

    def __init__(self, length: int = 3, shape: tuple[int, ...] = (12, 8, 3)) -> None:
        self.observation_space = Box(0, 255, shape, np.uint8)
        self.action_space = Box(-1.0, 1.0, (1,), np.float32)
        self.length = length

    def image(self) -> np.ndarray:
        return self.np_random.integers(256, size=self.observation_space.shape).astype(np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.image(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.image(), float(self.steps), self.steps == self.length, False, {}


def test_images_are_cropped_and_shrunk_to_block_means() -> None:
    raw, shrunk = Images(), PixelObservation(Images(), size=2, crop=4)
    whole, image = raw.reset(seed=1)[0], shrunk.reset(seed=1)[0]
    middle = whole[4:8, 2:6].astype(float)
    blocks = middle.reshape(2, 2, 2, 2, 3).mean((1, 3)).transpose(2, 0, 1)
    assert image.shape == (3, 2, 2) and image.dtype == np.uint8
    np.testing.assert_allclose(image, blocks, atol=0.5)
    assert shrunk.observation_space.contains(image)


def test_without_a_crop_the_whole_image_is_squeezed_into_a_square() -> None:
    raw, shrunk = Images(), PixelObservation(Images(), size=4)  # of 12 x 8
    whole, image = raw.reset(seed=1)[0].astype(float), shrunk.reset(seed=1)[0]
    blocks = whole.reshape(4, 3, 4, 2, 3).mean((1, 3)).transpose(2, 0, 1)
    np.testing.assert_allclose(image, blocks, atol=0.5)


def test_repeat_stops_where_the_episode_ends() -> None:
    env = ActionRepeat(Images(length=3), repeat=2)
    env.reset(seed=0)
    first, second = env.step(0), env.step(0)
    assert first[1:3] == (3.0, False) and second[1:3] == (3.0, True)


def test_each_episode_starts_with_copies_of_its_first_frame() -> None:
    env = FrameStack(PixelObservation(Images(), size=4), frame_stack=3)
    for episode in range(2):
        obs, _ = env.reset(seed=episode)
        frames = obs.reshape(3, 3, 4, 4)
        assert (frames == frames[0]).all()
        after = env.step(0)[0].reshape(3, 3, 4, 4)
        assert np.array_equal(after[:2], frames[1:]) and (after[2] != frames[2]).any()
        assert env.observation_space.contains(obs)


def test_importing_the_package_registers_the_environments() -> None:
    code = (
        "import gymnasium, rlbook, sys; assert 'torch' not in sys.modules; "
        "shapes = [gymnasium.make(f'rlbook/{name}-v0').observation_space.shape "
        "for name in ('PointReach', 'PendulumPixels')]; "
        "assert shapes == [(3, 24, 24), (9, 40, 40)], shapes"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_pendulum_from_pixels_is_the_pendulum() -> None:
    kwargs = {"size": 30, "crop": 200, "frame_stack": 2, "action_repeat": 3}
    env, plain = make_env("rlbook/PendulumPixels-v0", kwargs), make_env("Pendulum-v1")
    obs, _ = env.reset(seed=4)
    plain.reset(seed=4)
    assert obs.shape == (6, 30, 30) and env.observation_space.contains(obs)
    action, total, steps, truncated = np.array([0.7], np.float32), 0.0, 0, False
    while not truncated:
        obs, reward, _, truncated, _ = env.step(action)
        total, steps = total + float(reward), steps + 1
    expected = sum(float(plain.step(action)[1]) for _ in range(200))
    assert steps == 67 and total == pytest.approx(expected)  # 66 times 3 steps, then 2
    env.close()


def test_the_same_seed_gives_the_same_images() -> None:
    env = make_env("rlbook/PendulumPixels-v0")
    shown = []
    for _ in range(2):
        obs = [env.reset(seed=8)[0]]
        obs += [env.step(np.array([1.0], np.float32))[0] for _ in range(5)]
        shown.append(np.array(obs))
    assert np.array_equal(shown[0], shown[1])
    assert (shown[0][0] != shown[0][-1]).any()
    env.close()


def test_any_environment_that_renders_has_image_observations() -> None:
    kwargs = {"env_id": "rlbook/TMaze-v0", "size": 32, "env_kwargs": {"length": 3}}
    env = make_env("rlbook/Pixels-v0", kwargs, render_mode="rgb_array")
    obs, _ = env.reset(seed=0)
    assert obs.shape == (9, 32, 32) and np.asarray(env.render()).shape == (80, 96, 3)
    shown = make_pixels("rlbook/PointReach-v0", size=24, frame_stack=1).reset(seed=1)[0]
    own = make_env("rlbook/PointReach-v0").reset(seed=1)[0]
    assert np.abs(shown.astype(int) - own).mean() < 4  # it renders what it shows


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"env_id": "rlbook/OneStep-v0"}, "'rlbook/OneStep-v0' cannot render"),
        ({"env_id": "Pendulum-v1", "size": 0}, "'size' must be a whole number of at least 1"),
        ({"env_id": "Pendulum-v1", "frame_stack": 1.5}, "'frame_stack' must be a whole number"),
        ({"env_id": "Pendulum-v1", "action_repeat": True}, "'action_repeat' must be a whole"),
        ({"env_id": "Pendulum-v1", "crop": -3}, "'crop' must be a whole number of at least 1"),
        ({"env_id": "Pendulum-v1", "crop": 501}, "needs size <= crop <= 500"),
        ({"env_id": "Pendulum-v1", "size": 40, "crop": 39}, "needs size <= crop <= 500"),
        ({"env_id": "Pendulum-v2"}, "Did you mean 'Pendulum-v1'"),
        ({"env_id": "Pendulum-v1", "colour": 1}, "does not take the env_kwargs"),
        ({}, "cannot be made: TypeError: .* missing 1 required positional argument: 'env_id'"),
    ],
)
def test_mistakes_get_a_sentence(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make_env("rlbook/Pixels-v0", kwargs)
    assert "\n" not in str(error.value)


# Each frame once


def random_play(
    steps: int, num_envs: int, stack: int, seed: int, end: float = 0.1
) -> list[Transition]:
    """Play random images; now and then all environments start anew without an end."""
    rng = np.random.default_rng(seed)
    shape = (num_envs, 2, 3, 3)  # two channels: the last axis is not the stack

    def images() -> np.ndarray:
        return rng.integers(256, size=shape).astype(np.uint8)

    played, frames, start = [], [images()] * stack, np.ones(num_envs, dtype=bool)
    for _ in range(steps):
        obs, new = np.concatenate(frames, axis=1), images()
        terminated = rng.random(num_envs) < end
        truncated = (rng.random(num_envs) < end) & ~terminated
        following = [*frames[1:], new]
        action, reward = rng.normal(size=(num_envs, 1)), rng.normal(size=num_envs)
        next_obs = np.concatenate(following, axis=1)
        played.append(Transition(obs, action, reward, next_obs, terminated, truncated, start, None))
        start = terminated | truncated | (rng.random() < 0.05)  # `learn` was called again
        mask, first = start[:, None, None, None], images()
        frames = [np.where(mask, first, frame) for frame in following]
    return played


def naive_transitions(steps: list[Transition], n: int, gamma: float) -> np.ndarray:
    """Return the n-step transitions with whole stacks, in the order in which they are complete."""
    num_envs, *shape = steps[0].obs.shape
    dtype = transition_dtype(Box(0, 255, tuple(shape), np.uint8), Box(-1, 1, (1,)))
    n_step, complete = NStepAccumulator(n, gamma, num_envs, dtype), []
    for step in steps:
        n_step.drop(step.episode_start)
        parts = {name: getattr(step, name) for name in ("obs", "action", "reward", "next_obs")}
        now = make_transitions(dtype, **parts, terminated=step.terminated, discount=gamma)
        complete.append(n_step.add(now, step.truncated))
    return np.concatenate(complete)


def make_replay(capacity: int, num_envs: int, stack: int, n: int, seed: int = 0) -> FrameReplay:
    images, actions = Box(0, 255, (2 * stack, 3, 3), np.uint8), Box(-1, 1, (1,))
    return FrameReplay(
        capacity, images, actions, frame_stack=stack, n_step=n, gamma=0.9, num_envs=num_envs,
        seed=seed,
    )  # fmt: skip


def fill(replay: FrameReplay, steps: list[Transition]) -> None:
    for step in steps:
        replay.add(step)


def held(replay: FrameReplay) -> np.ndarray:
    """Return all transitions that a buffer can sample, oldest first."""
    indices = np.arange(replay.written - replay.size, replay.written) % len(replay.storage)
    stored = replay.storage[indices]
    whole = np.zeros(len(stored), replay.dtype)
    for name in replay.dtype.names or ():
        is_stack = name in ("obs", "next_obs")
        whole[name] = replay.ring.read_stacks(stored[name]) if is_stack else stored[name]
    return whole


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 120),
    num_envs=st.integers(1, 3),
    stack=st.integers(1, 4),
    n=st.integers(1, 4),
    capacity=st.integers(1, 150),
    end=st.sampled_from([0.0, 0.02, 0.2, 0.5]),
    seed=st.integers(0, 10**6),
)
def test_frames_stored_once_give_the_stacks_that_were_observed(
    steps: int, num_envs: int, stack: int, n: int, capacity: int, end: float, seed: int
) -> None:
    played = random_play(steps, num_envs, stack, seed, end)
    replay, naive = make_replay(capacity, num_envs, stack, n), naive_transitions(played, n, 0.9)
    fill(replay, played)
    size = len(replay)
    np.testing.assert_array_equal(held(replay), naive[len(naive) - size :])
    starts = sum(int(step.episode_start.sum()) for step in played)
    assert size >= min(len(naive), capacity - starts * n - num_envs * (n + stack))


def test_samples_are_those_of_a_buffer_of_stacks() -> None:
    played = random_play(300, num_envs=2, stack=3, seed=1)
    replay, transitions = make_replay(2_000, 2, 3, n=3, seed=5), naive_transitions(played, 3, 0.9)
    naive = ReplayBuffer(2_000, transitions.dtype, seed=5)
    fill(replay, played)
    naive.add(transitions)
    for _ in range(3):
        np.testing.assert_array_equal(replay.sample(64), naive.sample(64))


def test_sampling_is_uniform_over_what_is_left() -> None:
    replay = make_replay(20, 1, 2, n=1)
    fill(replay, random_play(100, 1, 2, seed=2, end=0.2))
    counts = np.unique(replay.sample(20_000)["reward"], return_counts=True)[1]
    assert len(counts) == len(replay) > 10
    np.testing.assert_allclose(counts, 20_000 / len(replay), rtol=0.15)


def test_memory_is_one_frame_and_scalars() -> None:
    images, actions = Box(0, 255, (9, 40, 40), np.uint8), Box(-1, 1, (1,))
    replay = FrameReplay(10_000, images, actions, frame_stack=3, n_step=3)
    scalars = 3 * 4 + 1  # action, reward, discount; terminated
    per_transition = (replay.storage.nbytes + replay.ring.frames.nbytes) / 10_000
    assert per_transition < 1.1 * (3 * 40 * 40 + scalars)


def loaded(replay: FrameReplay) -> FrameReplay:
    """Load the state of a buffer into another."""
    other = make_replay(60, 2, 3, n=3, seed=2)
    other.load_state_dict(replay.state_dict())
    return other


@pytest.mark.parametrize(
    "duplicate", [loaded, copy.deepcopy, lambda replay: pickle.loads(pickle.dumps(replay))]
)
@pytest.mark.parametrize("steps", [5, 90])
def test_a_copy_goes_on_in_the_middle_of_an_episode(
    duplicate: Callable[[FrameReplay], FrameReplay], steps: int
) -> None:
    played = random_play(steps + 50, 2, 3, seed=3)
    replay = make_replay(60, 2, 3, n=3, seed=1)
    fill(replay, played[:steps])
    twin = duplicate(replay)
    for buffer in (replay, twin):
        fill(buffer, played[steps:])
    assert len(twin) == len(replay)
    np.testing.assert_array_equal(replay.sample(200), twin.sample(200))


def test_a_buffer_that_starts_in_mid_episode_stores_the_whole_stack() -> None:
    played = random_play(30, 1, 3, seed=4, end=0.0)
    middle = next(i for i in range(10, 20) if not any(s.episode_start for s in played[i - 3 : i]))
    replay = make_replay(50, 1, 3, n=1)
    fill(replay, played[middle:])
    assert np.array_equal(held(replay)["obs"][:1], played[middle].obs)


def test_observations_that_are_no_stacks_are_refused() -> None:
    played = random_play(4, 1, 2, seed=5, end=0.0)
    played[1].next_obs[:, 0] += 1
    replay = make_replay(50, 1, 2, n=1)
    with pytest.raises(ValueError, match="must show the frame before and one more"):
        fill(replay, played)


def test_what_does_not_fit_is_refused() -> None:
    replay = make_replay(50, 1, 2, n=1)
    with pytest.raises(ValueError, match="empty"):
        replay.sample(1)
    other = FrameReplay(50, Box(0, 255, (4, 5, 5), np.uint8), Box(-1, 1, (1,)), frame_stack=2)
    with pytest.raises(ValueError, match=r"shape \(2, 5, 5\), not \(2, 3, 3\)"):
        replay.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="has the capacity 60, this one 50"):
        replay.load_state_dict(make_replay(60, 1, 2, n=1).state_dict())


SAVE_LARGE = """
import resource, sys
from pathlib import Path
import numpy as np
from gymnasium.spaces import Box
from rlbook.checkpoint import write_checkpoint
from rlbook.pixels import FrameReplay

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MB

small = FrameReplay(10, Box(0, 255, (3, 64, 64), np.uint8), Box(-1, 1, (1,)))
write_checkpoint(Path(sys.argv[1]), small.state_dict())  # what torch needs in any case
replay = FrameReplay(20_000, Box(0, 255, (3, 64, 64), np.uint8), Box(-1, 1, (1,)))
replay.ring.frames[:] = 1
replay.ring.written = replay.written = 20_000
before = peak()
write_checkpoint(Path(sys.argv[1]), replay.state_dict())
print(replay.ring.frames.nbytes / 2**20, peak() - before)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no getrusage")
def test_a_large_buffer_is_saved_without_a_second_copy(tmp_path: Any) -> None:
    words = [sys.executable, "-c", SAVE_LARGE, str(tmp_path / "large.pt")]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    size, grown = (float(word) for word in said.split())
    assert size > 200 and grown < 0.1 * size
