"""Made from book/pixels.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "ActionRepeat",
    "FrameReplay",
    "FrameRing",
    "FrameStack",
    "PixelObservation",
    "PointReach",
    "area_weights",
    "check_counts",
    "check_stacks",
    "draw_disc",
    "frame_slack",
    "is_image",
    "make_pendulum_pixels",
    "make_pixels",
]

# %% book/pixels.py · Pixels: image observations and a buffer for them
import os
from collections import deque
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box

from rlbook.agent import Transition
from rlbook.envs import make_env
from rlbook.replay import NStepAccumulator, check_stored, make_transitions, transition_dtype


# %% book/pixels.py · PointReach: a task drawn in NumPy
def draw_disc(
    image: np.ndarray, center: np.ndarray, radius: float, color: tuple[int, int, int]
) -> None:
    """Paint a disc with a soft edge into an image (height, width, 3); `center` is x and y."""
    y, x = np.ogrid[: image.shape[0], : image.shape[1]]
    distance = np.hypot(x - center[0], y - center[1])
    cover = np.clip(radius + 0.5 - distance, 0, 1)[..., None]  # fraction of each pixel
    image += (cover * (np.array(color) - image)).round().astype(image.dtype)


class PointReach(gym.Env[np.ndarray, np.ndarray]):
    """A blue disc has to reach an orange one; the reward of a step is 1 minus their distance.

    The discs are in the square from -1 to 1. The action is a velocity: 1 moves by 0.2 in a step.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (as in gym.Env)
    speed = 0.2

    def __init__(self, size: int = 24, render_mode: str | None = None) -> None:
        if not isinstance(size, int | np.integer) or size < 8:
            raise ValueError(f"PointReach needs a whole size of at least 8 pixels, not {size!r}.")
        self.size, self.render_mode = int(size), render_mode
        self.observation_space = Box(0, 255, (3, self.size, self.size), np.uint8)
        self.action_space = Box(-1.0, 1.0, (2,), np.float32)

    def draw(self, size: int) -> np.ndarray:
        """Return the image (size, size, 3) of the two discs on grey."""
        image, radius = np.full((size, size, 3), 128, np.int16), size / 8
        for center, color in ((self.goal, (255, 160, 0)), (self.position, (0, 80, 255))):
            inside = size - 1 - 2 * radius  # the whole disc is in the image, wherever it is
            draw_disc(image, radius + (center + 1) / 2 * inside, radius, color)
        return image.astype(np.uint8)

    def observation(self) -> np.ndarray:
        """Return what the agent observes: (3, size, size)."""
        return self.draw(self.size).transpose(2, 0, 1).copy()

    def render(self) -> np.ndarray:
        """Return a larger image for people."""
        return self.draw(240)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Put both discs anywhere."""
        super().reset(seed=seed)
        self.position, self.goal = self.np_random.uniform(-1, 1, (2, 2))
        return self.observation(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move the blue disc; walls keep it inside."""
        self.position = np.clip(self.position + self.speed * np.clip(action, -1, 1), -1, 1)
        reward = 1 - float(np.linalg.norm(self.position - self.goal))
        return self.observation(), reward, False, False, {}


# %% book/pixels.py · Smaller images
def area_weights(before: int, after: int) -> np.ndarray:
    """Return the matrix (after, before) that averages `before` pixels into `after` of them."""
    edges, pixel = np.linspace(0, before, after + 1), np.arange(before)
    overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    return (overlap.clip(min=0) * after / before).astype(np.float32)


def is_image(space: gym.Space) -> bool:
    """Say whether observations are images (height, width, up to 4 channels) of bytes."""
    is_bytes = isinstance(space, Box) and space.dtype == np.uint8
    return is_bytes and len(space.shape or ()) == 3 and (space.shape or ())[2] <= 4


class PixelObservation(gym.ObservationWrapper[np.ndarray, Any, Any]):
    """Observes an image of the environment, or its middle: shrunk to a square, channels first."""

    def __init__(self, env: gym.Env, size: int, crop: int | None = None) -> None:
        super().__init__(env)
        self.renders = not is_image(env.observation_space)
        if self.renders:
            env.reset(seed=0)  # there is nothing to render before
        shape = np.asarray(env.render() if self.renders else env.observation_space.sample()).shape
        height, width, channels = shape
        smallest = min(height, width)
        square = smallest if crop is None else crop
        if not size <= square <= smallest:
            raise ValueError(
                f"An image of {height} x {width} pixels needs size <= crop <= {smallest}, "
                f"not the size {size} and the crop {square}."
            )
        rows, columns = (height, width) if crop is None else (crop, crop)
        top, left = (height - rows) // 2, (width - columns) // 2
        self.window = slice(top, top + rows), slice(left, left + columns)
        self.row_weights, self.column_weights = (area_weights(n, size) for n in (rows, columns))
        self.observation_space = Box(0, 255, (channels, size, size), np.uint8)

    def shrink(self, image: np.ndarray) -> np.ndarray:
        """Return (channels, size, size), each pixel the mean of what it covers."""
        channels = image[self.window].astype(np.float32).transpose(2, 0, 1)
        shrunk = self.row_weights @ channels @ self.column_weights.T
        return shrunk.round().astype(np.uint8)

    def observation(self, observation: Any) -> np.ndarray:
        """Return the image of the present state."""
        return self.shrink(np.asarray(self.env.render()) if self.renders else observation)


# %% book/pixels.py · Action repeat
class ActionRepeat(gym.Wrapper[Any, Any, Any, Any]):
    """Takes each action `repeat` times and adds the rewards."""

    def __init__(self, env: gym.Env, repeat: int) -> None:
        super().__init__(env)
        self.repeat = repeat

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take up to `repeat` steps, fewer where the episode ends."""
        total = 0.0
        for _ in range(self.repeat):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


# %% book/pixels.py · Frame stack
class FrameStack(gym.Wrapper[np.ndarray, Any, Any, Any]):
    """Observes the last `frame_stack` frames, newest last; an episode starts with copies."""

    def __init__(self, env: gym.Env, frame_stack: int) -> None:
        super().__init__(env)
        self.frame_stack = frame_stack  # an agent that stores each frame once reads this
        self.frames: deque[np.ndarray] = deque(maxlen=frame_stack)
        channels, *size = env.observation_space.shape or ()
        self.observation_space = Box(0, 255, (frame_stack * channels, *size), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode with copies of its first frame."""
        obs, info = self.env.reset(seed=seed, options=options)
        self.frames.extend([obs] * self.frame_stack)
        return np.concatenate(self.frames), info

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        """Take a step; its frame replaces the oldest."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.frames.append(obs)
        return np.concatenate(self.frames), reward, terminated, truncated, info


# %% book/pixels.py · Any environment that renders
def check_counts(**counts: Any) -> None:
    """Raise unless each of these is a whole number of at least 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name!r} must be a whole number of at least 1, not {value!r}.")


def make_pixels(
    env_id: str,
    size: int = 64,
    crop: int | None = None,
    frame_stack: int = 3,
    action_repeat: int = 1,
    env_kwargs: dict[str, Any] | None = None,
    render_mode: str | None = None,
) -> gym.Env:
    """Make an environment with image observations: bytes, channels first, the last few frames."""
    check_counts(size=size, frame_stack=frame_stack, action_repeat=action_repeat)
    check_counts(crop=size if crop is None else crop)
    env = make_env(env_id, env_kwargs)
    if not is_image(env.observation_space):
        if "rgb_array" not in env.metadata.get("render_modes", []):
            raise ValueError(f"{env_id!r} cannot render: it has no render mode 'rgb_array'.")
        render_mode = "rgb_array"
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame looks for a screen otherwise
    if render_mode is not None:
        env.close()
        env = make_env(env_id, env_kwargs, render_mode)
    return FrameStack(PixelObservation(ActionRepeat(env, action_repeat), size, crop), frame_stack)


def make_pendulum_pixels(
    size: int = 40,
    crop: int | None = 250,
    frame_stack: int = 3,
    action_repeat: int = 2,
    render_mode: str | None = None,  # for `gym.make`: it always renders
) -> gym.Env:
    """Make Pendulum-v1 with image observations."""
    return make_pixels("Pendulum-v1", size, crop, frame_stack, action_repeat)


# %% book/pixels.py · Each frame once
class FrameRing:
    """A circular buffer of frames, each known by its number; the first is number 0."""

    def __init__(self, capacity: int, shape: tuple[int, ...]) -> None:
        self.frames = np.zeros((capacity, *shape), np.uint8)
        self.written = 0  # frames so far, which is the number of the next one

    def write(self, frame: np.ndarray) -> int:
        """Store one frame over the oldest and return its number."""
        self.frames[self.written % len(self.frames)] = frame
        self.written += 1
        return self.written - 1

    def write_stack(self, obs: np.ndarray) -> list[int]:
        """Store all frames of an observation, equal neighbours once; return their numbers."""
        frames = obs.reshape(-1, *self.frames.shape[1:])
        numbers = [self.write(frames[0])]
        for before, frame in pairwise(frames):
            same = np.array_equal(before, frame)
            numbers.append(numbers[-1] if same else self.write(frame))
        return numbers

    def read_stacks(self, numbers: np.ndarray) -> np.ndarray:
        """Return observations (batch, stack * channels, ...) for frame numbers (batch, stack)."""
        (batch, stack), (_, channels, *size) = numbers.shape, self.frames.shape
        return self.frames[numbers % len(self.frames)].reshape(batch, stack * channels, *size)

    def state_dict(self) -> dict[str, Any]:
        """Return the frames that were written, without a copy."""
        return {"frames": torch.from_numpy(self.frames[: self.written]), "written": self.written}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over stored frames."""
        frames = state["frames"].cpu().numpy()
        if frames.shape[1:] != self.frames.shape[1:]:
            shapes = f"{frames.shape[1:]}, not {self.frames.shape[1:]}"
            raise ValueError(f"The stored frames have the shape {shapes}.")
        self.frames[: len(frames)], self.written = frames, state["written"]


def check_stacks(obs: np.ndarray, next_obs: np.ndarray, channels: int) -> None:
    """Raise unless each next observation is the one before, moved on by one frame of `channels`."""
    if not np.array_equal(next_obs[:, :-channels], obs[:, channels:]):
        raise ValueError("An observation must show the frame before and one more, newest last.")


# %% book/pixels.py · Frames that are overwritten
def frame_slack(num_envs: int, frame_stack: int, n_step: int) -> int:
    """Return how many frames at most are written from a transition's first until it is stored."""
    return num_envs * (1 + frame_stack) * (n_step + frame_stack)


# %% book/pixels.py · The buffer
class FrameReplay:
    """A circular buffer of n-step transitions of images that stores each frame once."""

    def __init__(
        self,
        capacity: int,
        observation_space: gym.Space,
        action_space: gym.Space,
        *,
        frame_stack: int = 1,
        n_step: int = 1,
        gamma: float = 0.99,
        num_envs: int = 1,
        seed: int = 0,
    ) -> None:
        channels, *size = observation_space.shape or ()
        numbers = Box(0, np.iinfo(np.int64).max, (frame_stack,), np.int64)
        self.dtype = transition_dtype(observation_space, action_space)  # of samples
        self.storage = np.zeros(capacity, transition_dtype(numbers, action_space))
        self.written = 0  # transitions so far
        self.size = 0  # how many of the last ones still have all their frames
        self.slack = frame_slack(num_envs, frame_stack, n_step)
        self.ring = FrameRing(capacity + num_envs + self.slack, (channels // frame_stack, *size))
        self.stack = np.full((num_envs, frame_stack), -1)  # frame numbers of the last observations
        self.n_step = NStepAccumulator(n_step, gamma, num_envs, self.storage.dtype)
        self.generator = np.random.default_rng(seed)

    def __len__(self) -> int:
        return self.size

    def add(self, step: Transition) -> None:
        """Store one step of all environments: its new frames, and the transitions it completes."""
        channels = self.ring.frames.shape[1]
        check_stacks(step.obs, step.next_obs, channels)
        start = step.episode_start | (self.stack[:, 0] < 0)
        for i in np.flatnonzero(start):
            self.stack[i] = self.ring.write_stack(step.obs[i])
        self.n_step.drop(start)
        newest = [self.ring.write(obs[-channels:]) for obs in step.next_obs]
        next_stack = np.column_stack([self.stack[:, 1:], newest])
        transitions = make_transitions(
            self.storage.dtype,
            obs=self.stack,
            action=step.action,
            reward=step.reward,
            next_obs=next_stack,
            terminated=step.terminated,
            discount=self.n_step.gamma,
        )
        self.stack = next_stack
        self.store(self.n_step.add(transitions, step.truncated))

    def store(self, transitions: np.ndarray) -> None:
        """Store transitions; drop the oldest ones, whose frames are gone or soon will be."""
        capacity = len(self.storage)
        self.storage[(self.written + np.arange(len(transitions))) % capacity] = transitions
        self.written += len(transitions)
        self.size = min(self.size + len(transitions), capacity)
        oldest = self.ring.written - len(self.ring.frames) + self.slack
        while self.size and self.storage[(self.written - self.size) % capacity]["obs"][0] < oldest:
            self.size -= 1

    def sample(self, batch_size: int) -> np.ndarray:
        """Sample transitions uniformly, with replacement, and put their observations together."""
        if self.size == 0:
            raise ValueError("The replay buffer is empty: add transitions before you sample.")
        indices = self.generator.integers(self.written - self.size, self.written, size=batch_size)
        stored = self.storage[indices % len(self.storage)]
        samples = np.zeros(batch_size, self.dtype)
        for name in self.dtype.names or ():
            is_stack = name in ("obs", "next_obs")
            samples[name] = self.ring.read_stacks(stored[name]) if is_stack else stored[name]
        return samples

    def state_dict(self) -> dict[str, Any]:
        """Return the filled parts of both circular buffers, without a copy, and all the rest."""
        return {
            "storage": torch.from_numpy(self.storage[: self.written].view(np.uint8)),
            "dtype": self.storage.dtype.descr,
            "capacity": len(self.storage),
            "written": self.written,
            "size": self.size,
            "ring": self.ring.state_dict(),
            "stack": torch.from_numpy(self.stack),
            "n_step": self.n_step.state_dict(),
            "generator": self.generator.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a stored buffer: the samples go on as if nothing had happened."""
        check_stored(self.storage, state)
        self.ring.load_state_dict(state["ring"])
        stored = state["storage"].cpu().numpy().view(self.storage.dtype)
        self.storage[: len(stored)] = stored
        self.written, self.size = state["written"], state["size"]
        self.stack[:] = state["stack"].cpu()
        self.n_step.load_state_dict(state["n_step"])
        self.generator.bit_generator.state = state["generator"]
