"""Made from book/pixels.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "ActionRepeat",
    "FrameReplay",
    "FrameStack",
    "PixelObservation",
    "PointReach",
    "area_weights",
    "check_counts",
    "draw_disc",
    "is_picture",
    "make_pendulum_pixels",
    "make_pixels",
]

# %% book/pixels.py · Pixels
import os
from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box

from rlbook.agent import Transition
from rlbook.envs import make_env
from rlbook.replay import NStepAccumulator, ReplayBuffer, make_rows, transition_dtype


# %% book/pixels.py · A world drawn in NumPy
def draw_disc(
    image: np.ndarray, center: np.ndarray, radius: float, color: tuple[int, int, int]
) -> None:
    """Paint a disc into an image (height, width, 3); its edge is soft, so that it moves smoothly."""
    y, x = np.ogrid[: image.shape[0], : image.shape[1]]
    distance = np.hypot(x - center[0], y - center[1])
    cover = np.clip(radius + 0.5 - distance, 0, 1)[..., None]  # how much of each pixel it covers
    image += (cover * (np.array(color) - image)).round().astype(image.dtype)


class PointReach(gym.Env[np.ndarray, np.ndarray]):
    """A blue disc is to reach an orange one; each step pays 1 minus their distance.

    The discs live in the square from -1 to 1. The action is the velocity in x and y: 1 is 0.2 a step.
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
        """Return the picture (height, width, 3) of the two discs."""
        image, radius = np.full((size, size, 3), 128, np.int16), size / 8
        for position, color in ((self.goal, (255, 160, 0)), (self.position, (0, 80, 255))):
            inside = size - 1 - 2 * radius  # the whole disc is in the picture, wherever it is
            draw_disc(image, radius + (position + 1) / 2 * inside, radius, color)
        return image.astype(np.uint8)

    def observe(self) -> np.ndarray:
        """Return what the agent sees: (3, size, size)."""
        return self.draw(self.size).transpose(2, 0, 1).copy()

    def render(self) -> np.ndarray:
        """Return a larger picture for people."""
        return self.draw(240)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Put both discs anywhere."""
        super().reset(seed=seed)
        self.position, self.goal = self.np_random.uniform(-1, 1, (2, 2))
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move the blue disc; the walls hold it."""
        self.position = np.clip(self.position + self.speed * np.clip(action, -1, 1), -1, 1)
        reward = 1 - float(np.linalg.norm(self.position - self.goal))
        return self.observe(), reward, False, False, {}


# %% book/pixels.py · Smaller pictures
def area_weights(before: int, after: int) -> np.ndarray:
    """Return the matrix (after, before) that averages `before` pixels into `after` of them."""
    edges = np.linspace(0, before, after + 1)
    pixel = np.arange(before)
    overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    return (overlap.clip(min=0) * after / before).astype(np.float32)


def is_picture(space: gym.Space) -> bool:
    """Say whether observations are pictures (height, width, colours) of bytes."""
    return isinstance(space, Box) and len(space.shape) == 3 and space.dtype == np.uint8


class PixelObservation(gym.Wrapper[np.ndarray, Any, Any, Any]):
    """Shows what the environment draws: its middle cut out, shrunk, channels first."""

    def __init__(self, env: gym.Env, size: int, crop: int | None = None) -> None:
        super().__init__(env)
        self.renders = not is_picture(env.observation_space)
        if self.renders:
            env.reset(seed=0)  # some environments draw nothing before
        picture = np.asarray(env.render() if self.renders else env.observation_space.sample())
        shape = picture.shape
        smallest = min(shape[:2])
        crop = smallest if crop is None else crop
        if not size <= crop <= smallest:
            raise ValueError(
                f"A picture of {shape[0]} x {shape[1]} pixels needs size <= crop <= {smallest}, "
                f"not the size {size} and the crop {crop}."
            )
        self.corner = (shape[0] - crop) // 2, (shape[1] - crop) // 2
        self.crop, self.weights = crop, area_weights(crop, size)
        self.observation_space = Box(0, 255, (shape[2], size, size), np.uint8)

    def shrink(self, picture: np.ndarray) -> np.ndarray:
        """Return (colours, size, size), each pixel the mean of what it covers."""
        y, x = self.corner
        cut = picture[y : y + self.crop, x : x + self.crop].astype(np.float32)
        rows = (self.weights @ cut.reshape(self.crop, -1)).reshape(-1, *cut.shape[1:])
        return (self.weights @ rows).round().astype(np.uint8).transpose(2, 0, 1)  # (rows, columns, colours)

    def see(self, obs: Any) -> np.ndarray:
        """Return the picture of this moment."""
        return self.shrink(np.asarray(self.env.render()) if self.renders else obs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self.see(obs), info

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        """Take a step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self.see(obs), reward, terminated, truncated, info


# %% book/pixels.py · Fewer decisions
class ActionRepeat(gym.Wrapper[Any, Any, Any, Any]):
    """Takes each action `repeat` times and adds up what it pays."""

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


# %% book/pixels.py · Several frames
class FrameStack(gym.Wrapper[np.ndarray, Any, Any, Any]):
    """Shows the last `frame_stack` pictures, the newest last; an episode starts with copies."""

    def __init__(self, env: gym.Env, frame_stack: int) -> None:
        super().__init__(env)
        self.frame_stack = frame_stack  # a replay buffer that stores each frame once asks for it
        self.frames: deque[np.ndarray] = deque(maxlen=frame_stack)
        channels, *size = env.observation_space.shape or ()
        self.observation_space = Box(0, 255, (frame_stack * channels, *size), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode with copies of its first picture."""
        obs, info = self.env.reset(seed=seed, options=options)
        self.frames.extend([obs] * self.frame_stack)
        return np.concatenate(self.frames), info

    def step(self, action: Any) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        """Show one picture more; the oldest gives way."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.frames.append(obs)
        return np.concatenate(self.frames), reward, terminated, truncated, info


# %% book/pixels.py · Any environment that draws itself
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
    """Make an environment that shows its pictures: channels first, bytes, the last few of them."""
    check_counts(size=size, frame_stack=frame_stack, action_repeat=action_repeat)
    env = make_env(env_id, env_kwargs)
    if not is_picture(env.observation_space):
        env.close()
        if "rgb_array" not in env.metadata.get("render_modes", []):
            raise ValueError(f"{env_id!r} cannot render: it has no render mode 'rgb_array'.")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame looks for a screen otherwise
        env = make_env(env_id, env_kwargs, render_mode="rgb_array")
    elif render_mode is not None:
        env.close()
        env = make_env(env_id, env_kwargs, render_mode=render_mode)
    pictures = PixelObservation(ActionRepeat(env, action_repeat), size, crop)
    return FrameStack(pictures, frame_stack)


def make_pendulum_pixels(
    size: int = 40,
    crop: int | None = 250,
    frame_stack: int = 3,
    action_repeat: int = 2,
    render_mode: str | None = None,
) -> gym.Env:
    """Make Pendulum-v1 seen from its pictures."""
    return make_pixels("Pendulum-v1", size, crop, frame_stack, action_repeat)


# %% book/pixels.py · Each frame once
class FrameReplay(ReplayBuffer):
    """A ring of n-step transitions whose rows hold the numbers of their frames, each stored once."""

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
        super().__init__(capacity, transition_dtype(numbers, action_space), seed)
        self.n_step = NStepAccumulator(n_step, gamma, num_envs, self.rows.dtype)
        # A row waits n steps and reaches `frame_stack` back: its frames are never older than this.
        self.slack = num_envs * (frame_stack + 1) * (frame_stack + n_step)
        self.frames = np.zeros((capacity + self.slack, channels // frame_stack, *size), np.uint8)
        self.written = 0  # frames so far: frame number k stands at k modulo their capacity
        self.filled = 0  # rows that were ever written: those before `size` have lost a frame
        self.stack = np.zeros((num_envs, frame_stack), np.int64)  # frames that each environment shows
        self.unknown = np.ones(num_envs, dtype=bool)  # where it has not been shown yet

    def write_frame(self, frame: np.ndarray) -> int:
        """Store one frame and return its number; rows that need the frame under it go."""
        self.frames[self.written % len(self.frames)] = frame
        self.written += 1
        oldest = self.written - len(self.frames) + self.slack
        while self.size and self.rows[self.position - self.size]["obs"][0] < oldest:
            self.size -= 1
        return self.written - 1

    def write_stack(self, obs: np.ndarray) -> list[int]:
        """Store the frames of the first observation of an episode, copies once."""
        numbers: list[int] = []
        frames = obs.reshape(-1, *self.frames.shape[1:])
        for i, frame in enumerate(frames):
            copied = i > 0 and np.array_equal(frame, frames[i - 1])
            numbers.append(numbers[-1] if copied else self.write_frame(frame))
        return numbers

    def append(self, transition: Transition, action: np.ndarray, reward: np.ndarray) -> None:
        """Store what is new in one step of all environments: a frame each, and the numbers."""
        channels = self.frames.shape[1]
        if not np.array_equal(transition.next_obs[:, :-channels], transition.obs[:, channels:]):
            raise ValueError("An observation must be the last frames of its episode, newest last.")
        start = transition.episode_start | self.unknown
        for i in np.flatnonzero(start):
            self.stack[i] = self.write_stack(transition.obs[i])
        self.n_step.waiting[:, start], self.unknown[:] = False, False
        newest = [self.write_frame(obs[-channels:]) for obs in transition.next_obs]
        obs, self.stack = self.stack, np.column_stack([self.stack[:, 1:], newest])
        rows = make_rows(
            self.rows.dtype,
            obs=obs,
            action=action,
            reward=reward,
            next_obs=self.stack,
            terminated=transition.terminated,
            discount=self.n_step.gamma,
        )
        self.add(self.n_step.add(rows, transition.truncated))

    def add(self, rows: np.ndarray) -> None:
        """Store rows, the oldest of the ring giving way."""
        super().add(rows)
        self.filled = min(self.filled + len(rows), len(self.rows))

    def sample(self, batch_size: int) -> np.ndarray:
        """Draw rows uniformly, with replacement, from those whose frames are all there."""
        if self.size == 0:
            raise ValueError("The replay buffer is empty: add transitions before you sample.")
        draws = self.generator.integers(self.size, size=batch_size)
        return self.rows.take(self.position - self.size + draws, mode="wrap")

    def images(self, numbers: np.ndarray) -> np.ndarray:
        """Put frames (batch, frame_stack) together to observations (batch, channels, height, width)."""
        frames = self.frames.take(numbers % len(self.frames), axis=0)
        return frames.reshape(len(numbers), -1, *frames.shape[-2:])

    def state_dict(self) -> dict[str, Any]:
        """Return the filled parts of both rings, without a copy, and all counters."""
        tensors = {
            "rows": self.rows[: self.filled].view(np.uint8),
            "frames": self.frames[: self.written],
            "stack": self.stack,
            "unknown": self.unknown,
        }
        return {
            **super().state_dict(),
            **{name: torch.from_numpy(array) for name, array in tensors.items()},
            "size": self.size,
            "written": self.written,
            "n_step": self.n_step.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over stored rings: the samples go on as if nothing had happened."""
        frames = state["frames"].cpu().numpy()
        if frames.shape[1:] != self.frames.shape[1:]:
            shapes = f"{frames.shape[1:]}, not {self.frames.shape[1:]}"
            raise ValueError(f"The stored frames have the shape {shapes}.")
        super().load_state_dict(state)
        self.filled, self.size, self.written = self.size, state["size"], state["written"]
        self.frames[: len(frames)] = frames
        self.stack[:], self.unknown[:] = state["stack"].cpu(), state["unknown"].cpu()
        self.n_step.load_state_dict(state["n_step"])
