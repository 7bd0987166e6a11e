# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Pixels: image observations and a buffer for them
#
# So far an agent observed the state: four numbers of a pole, three of a pendulum. A camera gives it
# only an image. In this chapter you build what an agent needs to learn from images: a small
# environment drawn in NumPy, wrappers that turn any Gymnasium environment into one with image
# observations, and a replay buffer that stores each frame once, though observations share frames.
# The agent itself comes in [the next chapter](drqv2.ipynb).
#
# This is what you will have at the end: eight frames of a random policy in each of two environments,
# with 24 × 24 and 40 × 40 pixels.

# %% tags=["hide-input"]
from matplotlib import pyplot as plt

from rlbook.envs import make_env
from rlbook.figures import PALETTE, filmstrip, use_style
from rlbook.replay import ReplayBuffer

use_style()
plt.switch_backend(plt.get_backend())  # now, since the first figure is made without pyplot

shown = []
for env_id, every in (("rlbook/PointReach-v0", 1), ("rlbook/PendulumPixels-v0", 2)):
    env = make_env(env_id)
    env.action_space.seed(1)
    images = [env.reset(seed=4)[0]]
    for _ in range(7 * every):
        images.append(env.step(env.action_space.sample())[0])
    env.close()
    zoom = 240 // images[0].shape[1]  # both at the same size
    frames = [image[-3:].transpose(1, 2, 0) for image in images[::every]]
    shown += [frame.repeat(zoom, 0).repeat(zoom, 1) for frame in frames]
filmstrip(shown)

# %% tags=["hide-input"]
#| export
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

# %% [markdown]
# | | |
# |---|---|
# | Papers | Mnih et al. 2015 (frame stack, action repeat); Yarats et al. 2021 (the observations of DrQ-v2) |
# | You need | [environments](envs.ipynb), [replay](replay.ipynb) |
# | Observations | images of bytes, channels first: (channels, height, width) |
# | Same as in `replay` | a circular buffer, uniform sampling, n-step returns |
# | Different from `replay` | a stored transition holds the numbers of its frames; the frames are in a circular buffer of their own |
#
# ## The problem: images are large and show no motion
#
# Take the pendulum. As numbers its state is three floats, and one of them is the speed. Its image, even
# shrunk to 40 × 40 pixels, is 4,800 bytes, and a single image does not show the speed. So an observation
# is the last three images, and then a transition, with observation and next observation, takes 28,800
# bytes. A buffer of a million of them, the size in the DrQ-v2 paper, takes

# %%
frame_bytes = 3 * 40 * 40
naive = 2 * 3 * frame_bytes
print(f"{naive * 1e6 / 1e9:.1f} GB if each transition holds its two stacks, "
      f"{frame_bytes * 1e6 / 1e9:.1f} GB if each frame is stored once")
assert naive == 28_800 and naive == 6 * frame_bytes

# %% [markdown]
# Five sixths of the first number are copies. The second half of this chapter gets rid of them. First
# some environments.
#
# ## PointReach: a task drawn in NumPy
#
# This is a very small task for a camera: a blue disc has to reach an orange one. Both start
# anywhere in the square from −1 to 1. The action is a velocity, at most 0.2 a step along each axis.
# The reward is 1 minus the distance after the step, and a time limit truncates the episode after 50
# steps. So the return of an episode is 50 minus the sum of its distances. Nothing moves by itself:
# one image shows the whole state.
#
# How do you draw a disc whose centre is between pixels? Let $R$ be its radius and $\rho$ the distance
# from its centre to the centre of a pixel, both in pixels. Then the disc covers a fraction of that pixel
# of about $\min(1, \max(0, R + \tfrac12 - \rho))$. So a disc that moves by a tenth of a pixel changes
# the image a little, and the agent can observe it.
#
# By hand: radius 1 around the pixel (2, 2). At the distance 1 the fraction is ½, at $\sqrt 2$ it is
# $1.5 - 1.414 = 0.086$, at 2 it is 0.

# %%
#| export
def draw_disc(
    image: np.ndarray, center: np.ndarray, radius: float, color: tuple[int, int, int]
) -> None:
    """Paint a disc with a soft edge into an image (height, width, 3); `center` is x and y."""
    y, x = np.ogrid[: image.shape[0], : image.shape[1]]
    distance = np.hypot(x - center[0], y - center[1])
    cover = np.clip(radius + 0.5 - distance, 0, 1)[..., None]  # fraction of each pixel
    image += (cover * (np.array(color) - image)).round().astype(image.dtype)

# %%
tiny = np.zeros((5, 5, 3), np.int16)
draw_disc(tiny, np.array([2.0, 2.0]), 1.0, (200, 0, 0))
print(tiny[..., 0])
assert tiny[2, 2, 0] == 200 and tiny[2, 3, 0] == 100 and tiny[1, 1, 0] == 17 and tiny[2, 4, 0] == 0

# %%
#| export
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

# %% [markdown]
# `rlbook` registers it as `rlbook/PointReach-v0`, with its time limit. Which return is good? Here is a
# controller that knows the positions and goes straight to the goal, beside a random policy, 200 episodes
# each:


# %%
def mean_return(policy, episodes: int = 200) -> float:
    """Play PointReach with a function of the environment; return the mean of the returns."""
    env, returns = make_env("rlbook/PointReach-v0"), np.zeros(episodes)
    env.action_space.seed(0)
    for episode in range(episodes):
        env.reset(seed=episode)
        truncated = False
        while not truncated:
            _, reward, _, truncated, _ = env.step(policy(env))
            returns[episode] += reward
    return float(returns.mean())


def straight(env: gym.Env) -> np.ndarray:
    """Go towards the goal, and stop there."""
    reach = env.unwrapped
    return np.clip((reach.goal - reach.position) / reach.speed, -1, 1).astype(np.float32)


best = mean_return(straight)
random = mean_return(lambda env: env.action_space.sample())
print(f"straight to the goal: {best:.1f}   random: {random:.1f}   upper bound: 50")
assert best > 46 and -8 < random < 1

# %% [markdown]
# ## Smaller images
#
# Gymnasium renders the pendulum with 500 × 500 pixels, far more than its angle needs. To shrink a line
# of pixels without losing thin shapes, let each new pixel be the mean of the old ones that it covers,
# parts of pixels included. That is a product with a matrix whose entry $(i, j)$ is the weight of the
# old pixel $j$ in the new pixel $i$.
#
# By hand, from 3 to 2: a new pixel covers 1.5 old ones. The first is ⅔ of the first old one and ⅓
# of the second; the second is the mirror image.

# %%
#| export
def area_weights(before: int, after: int) -> np.ndarray:
    """Return the matrix (after, before) that averages `before` pixels into `after` of them."""
    edges, pixel = np.linspace(0, before, after + 1), np.arange(before)
    overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    return (overlap.clip(min=0) * after / before).astype(np.float32)

# %%
print(area_weights(3, 2))
assert np.allclose(area_weights(3, 2), [[2 / 3, 1 / 3, 0], [0, 1 / 3, 2 / 3]])
assert np.allclose(area_weights(250, 40).sum(axis=1), 1)  # a mean: white stays white

# %% [markdown]
# Some environments have image observations already: bytes of the shape (height, width, channels).
# Most have numbers, but can render themselves.

# %%
#| export
def is_image(space: gym.Space) -> bool:
    """Say whether observations are images (height, width, up to 4 channels) of bytes."""
    is_bytes = isinstance(space, Box) and space.dtype == np.uint8
    return is_bytes and len(space.shape or ()) == 3 and (space.shape or ())[2] <= 4

# %%
assert is_image(Box(0, 255, (500, 500, 3), np.uint8))
assert not is_image(Box(0, 255, (3, 24, 24), np.uint8))  # channels first
assert not is_image(gym.make("Pendulum-v1").observation_space)

# %% [markdown]
# The wrapper takes the observation if that is an image, and otherwise what the environment renders.
# First, with `crop`, it keeps only a square in the middle, because the margin of an image is often
# empty. Then it multiplies by the matrix above from the left (height) and by the transpose of such a
# matrix from the right (width). A whole image that is wider than high is squeezed into a square.

# %%
#| export
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

# %% [markdown]
# The pendulum as it is rendered, with the middle 250 pixels marked, and that middle at three sizes:

# %% tags=["hide-input"]
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # draw without a screen
env = gym.make("Pendulum-v1", render_mode="rgb_array")
env.reset(seed=3)
env.step(np.array([2.0], np.float32))
whole = env.render()
figure, axes = plt.subplots(1, 4, figsize=(9, 2.5))
axes[0].imshow(whole)
axes[0].add_patch(plt.Rectangle((125, 125), 250, 250, fill=False, color=PALETTE[3], linewidth=1.5))
axes[0].set_title("500 × 500, as rendered")
for ax, size in zip(axes[1:], (84, 40, 16), strict=True):
    ax.imshow(PixelObservation(env, size, crop=250).shrink(whole).transpose(1, 2, 0))
    ax.set_title(f"crop 250, size {size}")
for ax in axes:
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set(visible=True, color="#BBBBBB")
    ax.grid(False)
plt.show()
env.close()

# %% [markdown]
# Look at the arrow: **Gymnasium's renderer draws the torque of the last action.** So the image
# shows the agent what it has just done. We leave the arrow in, since it does not show how fast the
# pendulum turns.
#
# ## Action repeat
#
# Neighbouring frames differ little, and each decision of the agent costs a forward pass. So each
# action is often taken several times in a row, and its rewards are added. By hand: with a repeat of
# 3 and the rewards 1, 2, 3, 4, an episode that ends after its fourth step has two decisions, with
# the rewards $1 + 2 + 3 = 6$ and $4$.

# %%
#| export
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


# %%
class Counting(gym.Env):
    """Rewards 1, 2, 3, 4 and then an end; the pixels of the image are the number of the step."""

    observation_space, action_space = Box(0, 255, (2, 2, 1), np.uint8), gym.spaces.Discrete(1)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros((2, 2, 1), np.uint8), {}

    def step(self, action):
        self.steps += 1
        image = np.full((2, 2, 1), self.steps, np.uint8)
        return image, float(self.steps), self.steps == 4, False, {}


env = ActionRepeat(Counting(), repeat=3)
env.reset()
first, second = env.step(0), env.step(0)
print("rewards:", first[1], second[1], " ended:", first[2], second[2])
assert (first[1], second[1]) == (6, 4) and not first[2] and second[2]

# %% [markdown]
# ## Frame stack
#
# One frame shows where things are; two show how they move. The wrapper keeps the last few frames and
# concatenates them as channels, the newest last. At the start of an episode there is only one, which is
# repeated. By hand, with two frames, `Counting` gives the observations 0 0, 0 1, 1 2, 2 3, 3 4.

# %%
#| export
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


# %%
env = FrameStack(PixelObservation(Counting(), size=2), frame_stack=2)
observations = [env.reset()[0]] + [env.step(0)[0] for _ in range(4)]
stacks = [obs[:, 0, 0].tolist() for obs in observations]
print("channels, height, width:", observations[0].shape, "  frames:", stacks)
assert stacks == [[0, 0], [0, 1], [1, 2], [2, 3], [3, 4]]

# %% [markdown]
# ## Any environment that renders
#
# One function puts the three wrappers around an environment. Its keywords:
#
# | keyword | what it does |
# |---|---|
# | `env_id`, `env_kwargs` | the environment, as everywhere in this book |
# | `size` | side of the square image, in pixels |
# | `crop` | side of the square in the middle that is used; the whole image if left out |
# | `frame_stack` | frames of one observation |
# | `action_repeat` | steps of one action |
#
# The wrapper that repeats actions is the innermost (exercise 1 asks why).

# %%
#| export
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

# %% [markdown]
# Both are registered, as `rlbook/Pixels-v0` and `rlbook/PendulumPixels-v0`, so that a config file
# or a flag can name them: `--env-id rlbook/Pixels-v0 --env-kwargs "{env_id: Pendulum-v1}"`. An
# environment that cannot render is an error, and so is an image larger than its crop:

# %%
env = make_env("rlbook/Pixels-v0", {"env_id": "MountainCarContinuous-v0", "size": 48})
print(env.observation_space.shape, env.action_space)
env.close()
for kwargs in ({"env_id": "rlbook/OneStep-v0"}, {"env_id": "Pendulum-v1", "size": 40, "crop": 30}):
    try:
        make_env("rlbook/Pixels-v0", kwargs)
    except ValueError as error:
        print("-", error)

# %% [markdown]
# ## Each frame once
#
# Now the memory. With three frames in an observation and two observations in a transition, each
# frame would be stored up to six times. Instead give each frame a **number**, counted from 0 in the
# order of arrival. The frames are in a circular buffer, number $i$ at the index
# $i \bmod \text{capacity}$, and a stored transition holds numbers in place of images: those of the
# frames of its observation and of its next one.
#
# By hand, with stacks of two and an episode of three steps: the frames are 0, 1, 2, 3. The first
# observation is frame 0 twice.
#
# | step | observation | next observation |
# |---|---|---|
# | 0 | 0 0 | 0 1 |
# | 1 | 0 1 | 1 2 |
# | 2 | 1 2 | 2 3 |
#
# The next episode starts with frame 4: no stack reaches across the end. So an episode of $T$ steps
# stores $T + 1$ frames, where whole stacks would store $2 \cdot 2 \cdot T$.

# %%
#| export
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

# %%
ring = FrameRing(capacity=8, shape=(1, 2, 2))
grey = np.arange(4, dtype=np.uint8).reshape(4, 1, 1, 1) * np.ones((1, 2, 2), np.uint8)
numbers = [ring.write_stack(np.concatenate([grey[0], grey[0]]))]  # a start: the same frame twice
for frame in grey[1:]:
    numbers.append([numbers[-1][1], ring.write(frame)])
print("numbers:", numbers, "  frames stored:", ring.written)
assert numbers == [[0, 0], [0, 1], [1, 2], [2, 3]] and ring.written == 4
assert ring.read_stacks(np.array(numbers))[:, :, 0, 0].tolist() == numbers  # pixels of frame i are i

# %% [markdown]
# A step adds one frame, the newest of its next observation. The others are stored already, provided
# that the next observation is the observation without its oldest frame, plus one new frame. That is
# checked at every step (exercise 2 breaks it):

# %%
#| export
def check_stacks(obs: np.ndarray, next_obs: np.ndarray, channels: int) -> None:
    """Raise unless each next observation is the one before, moved on by one frame of `channels`."""
    if not np.array_equal(next_obs[:, :-channels], obs[:, channels:]):
        raise ValueError("An observation must show the frame before and one more, newest last.")

# %%
before, after = (np.array([[[[i]], [[i + 1]]]]) for i in range(2))  # frames 0 and 1, then 1 and 2
check_stacks(before, after, channels=1)

# %% [markdown]
# ## Frames that are overwritten
#
# Each episode stores one frame more than it has transitions, so a frame can be overwritten while a
# stored transition still needs it. Then the buffer drops its oldest transitions early: `size` counts
# those that still have all their frames.
#
# Is the oldest stored transition always the one with the oldest frame? Almost. An $n$-step
# transition leads from $s_t$ to $s_{t+n}$ and sums the $n$ discounted rewards on the way, so it is
# stored only when the last of them is there. At the end of an episode several are complete at
# once, while those of another environment wait for up to $n$ steps. So one that is stored later
# may need an older frame. How much older? From the first frame of a transition until the
# transition is stored, at most `n_step + frame_stack` steps pass. In each of them every
# environment writes at most `1 + frame_stack` frames: one for the step, and a stack where an
# episode starts. Environments times frames times steps is the *slack*. Transitions are dropped
# that many frames early, and the circular buffer of frames is that much larger. (It also has room
# for one first frame of each environment.)
#
# By hand: two environments, stacks of three and three-step returns make
# $2 \cdot (1 + 3) \cdot (3 + 3) = 48$ frames.

# %%
#| export
def frame_slack(num_envs: int, frame_stack: int, n_step: int) -> int:
    """Return how many frames at most are written from a transition's first until it is stored."""
    return num_envs * (1 + frame_stack) * (n_step + frame_stack)

# %%
assert frame_slack(num_envs=2, frame_stack=3, n_step=3) == 48

# %% [markdown]
# ## The buffer
#
# The rest is as in [replay](replay.ipynb). `add` stores one step of all environments: it writes the new
# frames, makes transitions of their numbers, and passes them through the $n$-step accumulator,
# which works with numbers of frames as it does with images. `sample` picks stored transitions at random
# and returns them with whole observations, so an update cannot tell this buffer from the other.

# %%
#| export
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

# %% [markdown]
# By hand, with two-step returns, $\gamma = \tfrac12$ and the rewards 1, 2, 3 of `Counting`: after the
# first step no return is complete. The second completes the transition from the frames 0 0 to 1 2, with
# the reward $1 + \tfrac12 \cdot 2 = 2$. The third completes the one from 0 1 to 2 3, with
# $2 + \tfrac12 \cdot 3 = 3.5$.

# %%
env = FrameStack(PixelObservation(Counting(), size=2), frame_stack=2)
buffer = FrameReplay(8, env.observation_space, Box(-1, 1, (1,)), frame_stack=2, n_step=2, gamma=0.5)
obs, no, complete = env.reset()[0][None], np.array([False]), []
for i in range(3):
    image, reward, *_ = env.step(0)
    next_obs, start = image[None], np.array([i == 0])
    buffer.add(Transition(obs, np.zeros((1, 1)), np.array([reward]), next_obs, no, no, start, None))
    complete.append(len(buffer))
    obs = next_obs
stored = buffer.storage[:2]
print("complete after each step:", complete, " rewards:", stored["reward"])
assert complete == [0, 1, 2] and stored["reward"].tolist() == [2.0, 3.5]
assert stored["obs"].tolist() == [[0, 0], [0, 1]]
assert stored["next_obs"].tolist() == [[1, 2], [2, 3]]

# %% [markdown]
# Now the shortage of frames. An episode of `Counting` has four steps and five frames. Play 20 of them
# into a buffer with room for 20 transitions: it keeps fewer, and each has its own frames. In `Counting`
# that is easy to see, because the newest pixel is the number of the step, and so is the reward.

# %%
short = FrameReplay(20, env.observation_space, Box(-1, 1, (1,)), frame_stack=2)
for _ in range(20):
    obs, ended, start = env.reset()[0][None], no, ~no
    while not ended[0]:
        image, reward, terminated, *_ = env.step(0)
        next_obs, ended = image[None], np.array([terminated])
        short.add(Transition(obs, np.zeros((1, 1)), np.array([reward]), next_obs, ended, no, start, None))
        obs, start = next_obs, no
samples = short.sample(500)
print(f"transitions stored: {short.written}, kept: {len(short)} of {len(short.storage)}")
assert len(short) < 20
assert np.array_equal(samples["next_obs"][:, 1, 0, 0], samples["reward"])
assert np.array_equal(samples["obs"][:, 1, 0, 0] + 1, samples["reward"])

# %% [markdown]
# Is a sample what a buffer of whole stacks would give? Play the pendulum at random for 600 steps, with
# three-step returns, store everything in both, and sample 500 transitions from each with the same seed:


# %%
def random_steps(env_id: str, steps: int, seed: int) -> list[Transition]:
    """Play at random and return the steps as the loop gives them to an agent."""
    env, played, start = make_env(env_id), [], True
    env.action_space.seed(seed)
    obs, _ = env.reset(seed=seed)
    for _ in range(steps):
        action = env.action_space.sample()
        next_obs, reward, terminated, truncated, _ = env.step(action)
        parts = (obs, action, np.float64(reward), next_obs, terminated, truncated, start)
        played.append(Transition(*[np.asarray(part)[None] for part in parts], None))
        start = terminated or truncated
        obs = env.reset()[0] if start else next_obs
    env.close()
    return played


steps = random_steps("rlbook/PendulumPixels-v0", 600, seed=1)
images, actions = Box(0, 255, steps[0].obs.shape[1:], np.uint8), Box(-2, 2, (1,), np.float32)
frames = FrameReplay(700, images, actions, frame_stack=3, n_step=3, gamma=0.9, seed=7)
dtype = transition_dtype(images, actions)
whole, n_step = ReplayBuffer(700, dtype, seed=7), NStepAccumulator(3, 0.9, 1, dtype)
for step in steps:
    frames.add(step)
    now = make_transitions(dtype, obs=step.obs, action=step.action, reward=step.reward,
                           next_obs=step.next_obs, terminated=step.terminated, discount=0.9)
    whole.add(n_step.add(now, step.truncated))
assert np.array_equal(frames.sample(500), whole.sample(500))
print(f"500 of {len(frames)} transitions, the same in both; {frames.ring.written} frames for 600 steps")

# %% [markdown]
# The same samples, and this is the memory they take:

# %%
numbers_and_rest = frames.storage.itemsize  # six frame numbers, action, reward, discount, terminated
per_transition = {"whole stacks": dtype.itemsize, "each frame once": frame_bytes + numbers_and_rest}
used = (frames.ring.frames.nbytes + frames.storage.nbytes) / 700
print("bytes per transition:", per_transition, f" with {frames.slack} spare frames: {used:.0f}")
assert used < 1.1 * per_transition["each frame once"] < 0.2 * per_transition["whole stacks"]

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(7, 1.8))
sizes = [size * 1e6 / 1e9 for size in per_transition.values()]
bars = ax.barh(list(per_transition), sizes, color=PALETTE[0])
ax.bar_label(bars, fmt=" %.1f GB", padding=2)
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
ax.margins(x=0.15)
ax.set(xlabel="memory of a million transitions of Pendulum from pixels (GB)")
plt.show()

# %% [markdown]
# `state_dict` returns views of the buffer, and a checkpoint is written from them piece by piece, so a
# buffer of ten gigabytes can be saved without another ten. A loaded copy samples the same:

# %%
state = frames.state_dict()
assert np.shares_memory(state["ring"]["frames"].numpy(), frames.ring.frames)
loaded = FrameReplay(700, images, actions, frame_stack=3, n_step=3, gamma=0.9, seed=0)
loaded.load_state_dict(state)
assert np.array_equal(loaded.sample(500), frames.sample(500))

# %% [markdown]
# ## Honest edges
#
# - An episode of $T$ steps stores $T + 1$ frames. With 50 steps that is 2 % more, with one step twice as
#   many. So the buffer may hold fewer transitions than `capacity`, as `len` says.
# - Shifts and other augmentations are not stored: they are sampled anew at each update, in
#   [the next chapter](drqv2.ipynb).
# - Mnih et al. take the maximum of two neighbouring frames, because Atari consoles draw some sprites in
#   every other frame only. Nothing here flickers, so that is left out; so is conversion to grey.
# - Loading a checkpoint holds the frames twice for a moment: in the file's tensors and in the buffer.
# - `PendulumPixels` shows the last torque, because Gymnasium draws it.
#
# ## Exercises
#
# **Exercise 1.** `make_pixels` puts `ActionRepeat` inside `PixelObservation`. What changes if you swap
# them?
#
# <details>
# <summary>Solution</summary>
#
# The observations stay the same, but every repeated step is rendered and shrunk, and all but the last
# are thrown away: twice the rendering for a repeat of two.
#
# ```python
# inner = PixelObservation(ActionRepeat(Counting(), 2), size=2)
# outer = ActionRepeat(PixelObservation(Counting(), size=2), 2)
# observed = [(env.reset(), env.step(0))[1][0] for env in (inner, outer)]
# assert np.array_equal(*observed)
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** Why does `check_stacks` compare `next_obs` without its newest frame with `obs`
# without its oldest? Make observations that would break the buffer without that check.
#
# <details>
# <summary>Solution</summary>
#
# The buffer stores one frame per step and trusts that the others are stored already. A wrapper that
# shows, say, the *first* frame of the episode and the newest breaks that promise, and the buffer would
# return observations that never happened. With the check it refuses the first step that differs.
#
# ```python
# levels = np.arange(3, dtype=np.uint8)[:, None, None] * np.ones((2, 2), np.uint8)  # frames 0, 1, 2
# obs, next_obs = levels[[0, 1]][None], levels[[0, 2]][None]  # the first frame, and the newest
# one, no = np.ones(1), np.zeros(1, bool)
# buffer = FrameReplay(10, Box(0, 255, (2, 2, 2), np.uint8), Box(-1, 1, (1,)), frame_stack=2)
# try:
#     buffer.add(Transition(obs, one[:, None], one, next_obs, no, no, ~no, None))
#     stored = True
# except ValueError as error:
#     stored = False
#     print(error)
# assert not stored
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** A stored transition could hold one number, that of its newest frame, and count back
# from there. Why does it hold all of them?
#
# <details>
# <summary>Solution</summary>
#
# Because the frame before does not always have the number before. At the start of an episode the first
# frame is repeated, and with several environments their frames alternate. Three numbers take 24 bytes
# beside a frame of 4,800, and there is no special case to get wrong.
#
# ```python
# ring, grey = FrameRing(8, (1, 2, 2)), np.zeros((2, 2, 2), np.uint8)
# left, right = ring.write_stack(grey), ring.write_stack(grey + 1)  # two environments start
# left, right = [left[1], ring.write(grey[:1] + 2)], [right[1], ring.write(grey[:1] + 3)]
# assert left == [0, 2] and right == [1, 3]  # neither counts back by one
# ```
#
# </details>

# %% [markdown]
# **Exercise 4, a planted bug.** This frame stack runs, its shapes are right, and most of its
# observations are, too. What is wrong?


# %%
class StackWithABug(FrameStack):
    """As `FrameStack`, with a bug."""

    def reset(self, *, seed=None, options=None):
        obs, info = self.env.reset(seed=seed, options=options)
        self.frames.append(obs)
        while len(self.frames) < self.frame_stack:
            self.frames.append(obs)
        return np.concatenate(self.frames), info


env = StackWithABug(PixelObservation(Counting(), size=2), frame_stack=2)
for episode in range(2):
    observations = [env.reset()[0]] + [env.step(0)[0] for _ in range(4)]
    print("episode", episode, [obs[:, 0, 0].tolist() for obs in observations])

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The queue is full when the second episode starts, so the loop that fills it does nothing, and the
# first observation holds the last frame of the episode before: `4 0`. The agent observes a jump that
# never happened. `FrameStack` puts in as many copies as the queue is long, which removes everything
# older.
#
# ```python
# class StackWithABug(FrameStack):
#     """As `FrameStack`, without the bug."""
#
#     def reset(self, *, seed=None, options=None):
#         obs, info = self.env.reset(seed=seed, options=options)
#         self.frames.extend([obs] * self.frame_stack)
#         return np.concatenate(self.frames), info
#
#
# mended = StackWithABug(PixelObservation(Counting(), size=2), frame_stack=2)
# first = [mended.reset()[0]] + [mended.step(0)[0] for _ in range(4)]
# assert mended.reset()[0][:, 0, 0].tolist() == [0, 0]
# ```
#
# </details>

# %%
assert observations[0][:, 0, 0].tolist() == [4, 0]  # and it should be 0 0

# %% [markdown]
# ## Use it
#
# ```python
# from rlbook.pixels import make_pixels
#
# env = make_pixels("MountainCarContinuous-v0", size=64, frame_stack=3, action_repeat=2)
# ```
#
# ```
# rlbook train drqv2 --env-id rlbook/Pixels-v0 --env-kwargs "{env_id: MountainCarContinuous-v0}"
# ```
#
# ## References
#
# - V. Mnih et al. (2015). *Human-level control through deep reinforcement learning*. Nature 518:
#   four frames, each action repeated.
# - D. Yarats, R. Fergus, A. Lazaric, L. Pinto (2021). *Mastering Visual Continuous Control:
#   Improved Data-Augmented Reinforcement Learning*. arXiv:2107.09645: three frames of 84 × 84
#   pixels, each action taken twice, a buffer of a million transitions.
