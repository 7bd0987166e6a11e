"""Made from book/pixels.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "ActionRepeat",
    "FrameReplay",
    "FrameRing",
    "FrameStack",
    "FrameWriter",
    "PixelObservation",
    "PointReach",
    "ShownFrames",
    "TrimmedReplay",
    "area_weights",
    "check_counts",
    "check_stacks",
    "draw_disc",
    "frame_slack",
    "is_picture",
    "make_pendulum_pixels",
    "make_pixels",
]

# %% book/pixels.py · Pixels: environments that are seen, and a memory for images
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
from rlbook.replay import (
    NStepAccumulator,
    ReplayBuffer,
    draw_places,
    make_rows,
    transition_dtype,
)


# %% book/pixels.py · A world drawn in NumPy
def draw_disc(
    image: np.ndarray, center: np.ndarray, radius: float, color: tuple[int, int, int]
) -> None:
    """Paint a disc with a soft edge into an image (height, width, 3); `center` is x and y."""
    y, x = np.ogrid[: image.shape[0], : image.shape[1]]
    distance = np.hypot(x - center[0], y - center[1])
    cover = np.clip(radius + 0.5 - distance, 0, 1)[..., None]  # how much of each pixel is covered
    image += (cover * (np.array(color) - image)).round().astype(image.dtype)


class PointReach(gym.Env[np.ndarray, np.ndarray]):
    """A blue disc is to reach an orange one; each step pays 1 minus their distance.

    The discs live in the square from -1 to 1. The action is a velocity: 1 moves by 0.2 in a step.
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
        """Return the picture (size, size, 3) of the two discs on grey."""
        image, radius = np.full((size, size, 3), 128, np.int16), size / 8
        for place, color in ((self.goal, (255, 160, 0)), (self.position, (0, 80, 255))):
            inside = size - 1 - 2 * radius  # the whole disc is in the picture, wherever it is
            draw_disc(image, radius + (place + 1) / 2 * inside, radius, color)
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
    edges, pixel = np.linspace(0, before, after + 1), np.arange(before)
    overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    return (overlap.clip(min=0) * after / before).astype(np.float32)


def is_picture(space: gym.Space) -> bool:
    """Say whether observations are pictures (height, width, up to 4 colours) of bytes."""
    is_bytes = isinstance(space, Box) and space.dtype == np.uint8
    return is_bytes and len(space.shape or ()) == 3 and (space.shape or ())[2] <= 4


class PixelObservation(gym.Wrapper[np.ndarray, Any, Any, Any]):
    """Shows what the environment draws: the middle cut out, shrunk, channels first."""

    def __init__(self, env: gym.Env, size: int, crop: int | None = None) -> None:
        super().__init__(env)
        self.renders = not is_picture(env.observation_space)
        if self.renders:
            env.reset(seed=0)  # there is nothing to draw before
        shape = np.asarray(env.render() if self.renders else env.observation_space.sample()).shape
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
        small = self.weights @ rows  # (size, size, colours)
        return small.round().astype(np.uint8).transpose(2, 0, 1)

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
        self.frame_stack = frame_stack  # who stores each frame once asks for this
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
    check_counts(crop=size if crop is None else crop)
    env = make_env(env_id, env_kwargs)
    if not is_picture(env.observation_space):
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
    render_mode: str | None = None,  # asked for by whoever wants to watch: it always renders
) -> gym.Env:
    """Make Pendulum-v1 as it is seen."""
    return make_pixels("Pendulum-v1", size, crop, frame_stack, action_repeat)


# %% book/pixels.py · Each frame once
class FrameRing:
    """The last frames, each known by its number; the first was 0."""

    def __init__(self, capacity: int, shape: tuple[int, ...]) -> None:
        self.frames = np.zeros((capacity, *shape), np.uint8)
        self.written = 0  # frames so far, which is the number of the next

    def write(self, frame: np.ndarray) -> int:
        """Store one frame over the oldest and return its number."""
        self.frames[self.written % len(self.frames)] = frame
        self.written += 1
        return self.written - 1

    def write_stack(self, obs: np.ndarray) -> list[int]:
        """Store all frames of an observation, copies once, and return their numbers."""
        frames = obs.reshape(-1, *self.frames.shape[1:])
        numbers = [self.write(frames[0])]
        for before, frame in pairwise(frames):
            same = np.array_equal(before, frame)
            numbers.append(numbers[-1] if same else self.write(frame))
        return numbers

    def stacks(self, numbers: np.ndarray) -> np.ndarray:
        """Put frames (batch, stack) together: (batch, stack * channels, height, width)."""
        _, channels, height, width = self.frames.shape
        frames = self.frames.take(numbers % len(self.frames), axis=0)
        return frames.reshape(len(numbers), numbers.shape[1] * channels, height, width)

    def state_dict(self) -> dict[str, Any]:
        """Return the frames that are there, without a copy."""
        return {"frames": torch.from_numpy(self.frames[: self.written]), "written": self.written}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over stored frames."""
        frames = state["frames"].cpu().numpy()
        if frames.shape[1:] != self.frames.shape[1:]:
            shapes = f"{frames.shape[1:]}, not {self.frames.shape[1:]}"
            raise ValueError(f"The stored frames have the shape {shapes}.")
        self.frames[: len(frames)], self.written = frames, state["written"]


# %% book/pixels.py · What is new in a step
def check_stacks(obs: np.ndarray, next_obs: np.ndarray, channels: int) -> None:
    """Raise unless each next observation is the one before, moved on by one frame of `channels`."""
    if not np.array_equal(next_obs[:, :-channels], obs[:, channels:]):
        raise ValueError("An observation must show the frame before and one more, newest last.")


class ShownFrames:
    """Knows by number which frames each environment shows, and stores those that are new."""

    def __init__(self, ring: FrameRing, num_envs: int, frame_stack: int) -> None:
        self.ring = ring
        self.stack = np.zeros((num_envs, frame_stack), np.int64)  # what each environment shows
        self.unknown = np.ones(num_envs, dtype=bool)  # where nothing was shown yet

    def begin(self, obs: np.ndarray, episode_start: np.ndarray) -> np.ndarray:
        """Store whole stacks where an episode starts or is met midway; return where that is."""
        start = episode_start | self.unknown
        for i in np.flatnonzero(start):
            self.stack[i] = self.ring.write_stack(obs[i])
        self.unknown[:] = False
        return start

    def move(self, next_obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Store the newest frame of each; return the numbers (num_envs, stack) before and after."""
        channels = self.ring.frames.shape[1]
        newest = [self.ring.write(obs[-channels:]) for obs in next_obs]
        before, self.stack = self.stack, np.column_stack([self.stack[:, 1:], newest])
        return before, self.stack

    def state_dict(self) -> dict[str, Any]:
        """Return what each environment shows."""
        return {"stack": torch.from_numpy(self.stack), "unknown": torch.from_numpy(self.unknown)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what each environment showed."""
        self.stack[:], self.unknown[:] = state["stack"].cpu(), state["unknown"].cpu()


# %% book/pixels.py · Rows that are given up
class TrimmedReplay(ReplayBuffer):
    """A ring of rows with numbers of frames, which gives up its oldest rows when asked."""

    def __init__(self, capacity: int, dtype: np.dtype, seed: int) -> None:
        super().__init__(capacity, dtype, seed)
        self.filled = 0  # rows that were ever written

    def add(self, rows: np.ndarray) -> None:
        """Store rows, the oldest of the ring giving way."""
        super().add(rows)
        self.filled = min(self.filled + len(rows), len(self.rows))

    def trim(self, oldest: int) -> None:
        """Give up the rows that need a frame with a number below `oldest`."""
        while self.size and self.rows[self.position - self.size]["obs"][0] < oldest:
            self.size -= 1

    def sample(self, batch_size: int, out: np.ndarray | None = None) -> np.ndarray:
        """Draw rows uniformly, with replacement, from those that are whole."""
        if self.size == 0:
            raise ValueError("The replay buffer is empty: add transitions before you sample.")
        draws = draw_places(self.generator, self.size, batch_size)
        return self.rows.take(self.position - self.size + draws, out=out, mode="wrap")

    def state_dict(self) -> dict[str, Any]:
        """Return what was ever written, without a copy, and how much of it is whole."""
        rows = torch.from_numpy(self.rows[: self.filled].view(np.uint8))
        return {**super().state_dict(), "rows": rows, "size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a stored ring: the samples go on as if nothing had happened."""
        super().load_state_dict(state)
        self.filled, self.size = self.size, state["size"]


def frame_slack(num_envs: int, frame_stack: int, n_step: int) -> int:
    """Return how many frames may be written while a row waits for its place."""
    return num_envs * (1 + frame_stack) * (n_step + frame_stack)


# %% book/pixels.py · From steps to rows
class FrameWriter:
    """Writes the frames of steps into a ring, and makes rows of their numbers."""

    def __init__(
        self, ring: FrameRing, shown: ShownFrames, n_step: NStepAccumulator, dtype: np.dtype
    ) -> None:
        self.ring, self.shown, self.n_step, self.dtype = ring, shown, n_step, dtype

    def write(self, step: Transition, action: np.ndarray, reward: np.ndarray) -> np.ndarray:
        """Store what is new in one step of all environments; return the rows that it completed."""
        check_stacks(step.obs, step.next_obs, self.ring.frames.shape[1])
        start = self.shown.begin(step.obs, step.episode_start)
        self.n_step.forget(start)
        obs, next_obs = self.shown.move(step.next_obs)
        rows = make_rows(
            self.dtype,
            obs=obs,
            action=action,
            reward=reward,
            next_obs=next_obs,
            terminated=step.terminated,
            discount=self.n_step.gamma,
        )
        return self.n_step.add(rows, step.truncated)

    def state_dict(self) -> dict[str, Any]:
        """Return the frames, without a copy, and what is under way."""
        return {
            "ring": self.ring.state_dict(),
            "shown": self.shown.state_dict(),
            "n_step": self.n_step.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over stored frames and what was under way."""
        self.ring.load_state_dict(state["ring"])
        self.shown.load_state_dict(state["shown"])
        self.n_step.load_state_dict(state["n_step"])


# %% book/pixels.py · The buffer
class FrameReplay(TrimmedReplay):
    """A ring of n-step transitions; their rows hold the numbers of frames that are stored once."""

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
        self.slack = frame_slack(num_envs, frame_stack, n_step)
        room = capacity + num_envs + self.slack  # an episode has one frame more than steps
        self.ring = FrameRing(room, (channels // frame_stack, *size))
        shown = ShownFrames(self.ring, num_envs, frame_stack)
        waiting = NStepAccumulator(n_step, gamma, num_envs, self.rows.dtype)
        self.writer = FrameWriter(self.ring, shown, waiting, self.rows.dtype)

    def append(self, step: Transition, action: np.ndarray, reward: np.ndarray) -> None:
        """Store what is new in one step of all environments: one frame each, and numbers."""
        self.add(self.writer.write(step, action, reward))

    def add(self, rows: np.ndarray) -> None:
        """Store rows, and give up those that lost a frame or are about to."""
        super().add(rows)
        self.trim(self.ring.written - len(self.ring.frames) + self.slack)

    def state_dict(self) -> dict[str, Any]:
        """Return the filled parts of both rings, without a copy, and all counters."""
        return {**super().state_dict(), "frames": self.writer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over stored rings: the samples go on as if nothing had happened."""
        self.writer.load_state_dict(state["frames"])
        super().load_state_dict(state)
