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
# # Pixels: environments that are seen, and a memory for images
#
# So far an agent was told the state: four numbers of a pole, three of a pendulum. A camera tells
# nothing so directly. In this chapter you build what an agent needs that learns from pictures: a
# small world drawn in NumPy, wrappers that turn any Gymnasium environment into one that is seen,
# and a replay buffer that stores each frame once, though every observation shows three. The agent
# itself comes in [the next chapter](drqv2.ipynb).
#
# | | |
# |---|---|
# | Papers | Mnih et al. 2015 (frame stack, action repeat); Yarats et al. 2021 (the observations of DrQ-v2) |
# | You need | [environments](envs.ipynb), [replay](replay.ipynb) |
# | Observations | images of bytes, channels first: (channels, height, width) |
# | Same as in `replay` | the ring, uniform draws, n-step returns: imported |
# | Different from `replay` | a row holds the numbers of its frames; the frames stand in a ring of their own |

# %%
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
from rlbook.replay import (
    NStepAccumulator,
    ReplayBuffer,
    draw_places,
    make_rows,
    transition_dtype,
)

# %%
from matplotlib import pyplot as plt

from rlbook.figures import PALETTE, filmstrip, use_style

use_style()
plt.switch_backend(plt.get_backend())  # now, since the first figure is made without pyplot


def picture(image: np.ndarray) -> np.ndarray:
    """Put the channels of an image last, as figures want them."""
    return image.transpose(1, 2, 0)


# %% [markdown]
# This is what you will have at the end: eight moments of a random policy in two worlds, as the
# agent sees them, 24 × 24 and 40 × 40 pixels.

# %% tags=["hide-input"]
shown = []
for env_id, every in (("rlbook/PointReach-v0", 1), ("rlbook/PendulumPixels-v0", 2)):
    env = make_env(env_id)
    env.action_space.seed(1)
    images = [env.reset(seed=4)[0]]
    for _ in range(7 * every):
        images.append(env.step(env.action_space.sample())[0])
    env.close()
    zoom = 240 // images[0].shape[1]  # both as large as each other
    shown += [picture(image[-3:]).repeat(zoom, 0).repeat(zoom, 1) for image in images[::every]]
filmstrip(shown)

# %% [markdown]
# ## The problem: an image is large and says less
#
# Take the pendulum. As numbers it is three floats, and one of them is the speed. Its picture, even
# shrunk to 40 × 40 pixels, is 4,800 bytes, and a single picture says nothing about speed. So one
# shows the agent the last three pictures, and then a transition, with observation and next
# observation, takes 28,800 bytes. A buffer of a million of them, the size that DrQ-v2 uses, is

# %%
frame_bytes = 3 * 40 * 40
naive = 2 * 3 * frame_bytes
print(f"{naive * 1e6 / 1e9:.1f} GB if each row holds its two stacks, "
      f"{frame_bytes * 1e6 / 1e9:.1f} GB if each frame is stored once")
assert naive == 28_800 and naive == 6 * frame_bytes

# %% [markdown]
# Five sixths of the first number are copies. The second half of this chapter gets rid of them.
# First something to see.
#
# ## A world drawn in NumPy
#
# The smallest task that needs eyes: a blue disc is to reach an orange one. Both start anywhere. The
# action is a velocity, the reward 1 minus the distance, and after 50 steps a time limit cuts the
# episode. Nothing moves by itself, so one picture says all, and an episode is worth 50 minus the
# sum of the distances on its way.
#
# How do you draw a disc at a place that is no whole number? A pixel at the distance $\rho$ from the
# middle is covered by a disc of radius $R$ to the part $\min(1, \max(0, R + \tfrac12 - \rho))$,
# about. So a disc that moves by a tenth of a pixel changes the picture a little, and the agent can
# see it.
#
# By hand: radius 1 around the pixel (2, 2). At the distance 1 the cover is ½, at $\sqrt 2$ it is
# $1.5 - 1.414 = 0.086$, at 2 nothing.

# %%
#| export
def draw_disc(
    image: np.ndarray, center: np.ndarray, radius: float, color: tuple[int, int, int]
) -> None:
    """Paint a disc with a soft edge into an image (height, width, 3); `center` is x and y."""
    y, x = np.ogrid[: image.shape[0], : image.shape[1]]
    distance = np.hypot(x - center[0], y - center[1])
    cover = np.clip(radius + 0.5 - distance, 0, 1)[..., None]  # how much of each pixel is covered
    image += (cover * (np.array(color) - image)).round().astype(image.dtype)

# %%
tiny = np.zeros((5, 5, 3), np.int16)
draw_disc(tiny, np.array([2.0, 2.0]), 1.0, (200, 0, 0))
print(tiny[..., 0])
assert tiny[2, 2, 0] == 200 and tiny[2, 3, 0] == 100 and tiny[1, 1, 0] == 17 and tiny[2, 4, 0] == 0

# %%
#| export
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

# %% [markdown]
# Gymnasium knows it as `rlbook/PointReach-v0` as soon as `rlbook` is imported, with the time limit
# around it. What can one score? A controller that is told the positions and walks straight to the
# goal, against chance, 200 episodes each:


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
    """Walk towards the goal, and stop there."""
    world = env.unwrapped
    return np.clip((world.goal - world.position) / world.speed, -1, 1).astype(np.float32)


best = mean_return(straight)
chance = mean_return(lambda env: env.action_space.sample())
print(f"straight to the goal: {best:.1f}   chance: {chance:.1f}   the most one could wish for: 50")
assert best > 46 and -8 < chance < 1

# %% [markdown]
# ## Smaller pictures
#
# Gymnasium's pendulum draws 500 × 500 pixels, far more than one needs to see where it points. To
# shrink a row of pixels without losing thin lines, let each new pixel be the mean of the old ones
# that it covers, parts of pixels included. That is a matrix: entry $(i, j)$ is how much of the new
# pixel $i$ is made of the old pixel $j$.
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
# Some environments show pictures already, and most show numbers but can draw themselves. Bytes of
# the shape (height, width, colours) are a picture:

# %%
#| export
def is_picture(space: gym.Space) -> bool:
    """Say whether observations are pictures (height, width, up to 4 colours) of bytes."""
    is_bytes = isinstance(space, Box) and space.dtype == np.uint8
    return is_bytes and len(space.shape or ()) == 3 and (space.shape or ())[2] <= 4

# %%
assert is_picture(Box(0, 255, (500, 500, 3), np.uint8))
assert not is_picture(Box(0, 255, (3, 24, 24), np.uint8))  # channels first: made by us already
assert not is_picture(gym.make("Pendulum-v1").observation_space)

# %% [markdown]
# A picture is shrunk by the matrix above from the left (rows) and from the right (columns). The
# wrapper takes the picture from the environment: its observation, if that is a picture, and what it
# renders otherwise. It cuts out the middle first, if asked, because the margin of a picture is
# often empty.

# %%
#| export
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

# %% [markdown]
# The pendulum, with the 250 pixels in the middle marked, and what is left of them at three sizes:

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
    ax.imshow(picture(PixelObservation(env, size, crop=250).shrink(whole)))
    ax.set_title(f"crop 250, size {size}")
for ax in axes:
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set(visible=True, color="#BBBBBB")
    ax.grid(False)
plt.show()
env.close()

# %% [markdown]
# Look at the arrow: **Gymnasium's renderer draws the torque of the last action.** So the picture
# tells the agent what it has just done. It is part of the environment as it comes, and it does not
# say how fast the pendulum turns, so we leave it in and say so.
#
# ## Fewer decisions
#
# Neighbouring frames differ little, and deciding anew at each of them costs a pass through the
# network. So an action is often repeated, and its rewards are added up. By hand: with a repeat of 3
# and rewards 1, 2, 3, 4, an episode that ends after its fourth step has two decisions, worth
# $1 + 2 + 3 = 6$ and $4$.

# %%
#| export
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


# %%
class Counting(gym.Env):
    """Pays 1, 2, 3, ... and ends after four steps; the picture is as bright as the step."""

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
# ## Several frames
#
# One picture shows where things are; two show how they move. The wrapper keeps the last few and
# puts them on top of each other as channels, the newest last. At the start of an episode there is
# only one, so it is shown as often as needed. By hand, with two frames, the four steps of
# `Counting` look like 0 0, 0 1, 1 2, 2 3, 3 4.

# %%
#| export
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


# %%
env = FrameStack(PixelObservation(Counting(), size=2), frame_stack=2)
seen = [env.reset()[0]] + [env.step(0)[0] for _ in range(4)]
print("channels, height, width:", seen[0].shape, "  shown:", [obs[:, 0, 0].tolist() for obs in seen])
assert [obs[:, 0, 0].tolist() for obs in seen] == [[0, 0], [0, 1], [1, 2], [2, 3], [3, 4]]

# %% [markdown]
# ## Any environment that draws itself
#
# One function puts the three wrappers around an environment. Its keywords:
#
# | keyword | what it does |
# |---|---|
# | `env_id`, `env_kwargs` | the environment, as everywhere in this book |
# | `size` | side of the square picture, in pixels |
# | `crop` | side of the middle part that is shown; all of it if left out |
# | `frame_stack` | how many pictures an observation shows |
# | `action_repeat` | how many steps an action lasts |
#
# The action is repeated innermost, so only the frames that are shown are drawn.

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

# %% [markdown]
# Both are registered, as `rlbook/Pixels-v0` and `rlbook/PendulumPixels-v0`, so that a config file
# or a flag can name them: `--env-id rlbook/Pixels-v0 --env-kwargs "{env_id: CartPole-v1}"`. An
# environment that cannot render is refused, and so is a picture that is larger than what there is:

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
# Now the memory. Three pictures on top of each other, twice per transition: the frame of one moment
# stands in up to six places. Give each frame a **number** instead, counted from 0 in the order of
# their arrival. The frames live in a ring, number $i$ at the place $i \bmod \text{capacity}$, and a
# row of the replay buffer holds nothing but numbers: which frames make its observation, and which
# its next one.
#
# By hand, with stacks of two and an episode of three steps: the frames are 0, 1, 2, 3. The first
# observation shows frame 0 twice.
#
# | step | observation | next observation |
# |---|---|---|
# | 0 | 0 0 | 0 1 |
# | 1 | 0 1 | 1 2 |
# | 2 | 1 2 | 2 3 |
#
# The next episode starts with frame 4: nothing reaches across the end. So an episode of $T$ steps
# costs $T + 1$ frames, and a buffer of whole stacks $2 \cdot 2 \cdot T$.

# %%
#| export
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

# %%
ring = FrameRing(capacity=8, shape=(1, 2, 2))
seen = np.arange(4, dtype=np.uint8).reshape(4, 1, 1, 1).repeat(2, axis=2).repeat(2, axis=3)
numbers = [ring.write_stack(np.concatenate([seen[0], seen[0]]))]  # a start: the same frame twice
for frame in seen[1:]:
    numbers.append([numbers[-1][1], ring.write(frame)])
print("numbers:", numbers, "  frames stored:", ring.written)
assert numbers == [[0, 0], [0, 1], [1, 2], [2, 3]] and ring.written == 4
assert ring.stacks(np.array(numbers))[:, :, 0, 0].tolist() == numbers  # frame i is as bright as i

# %% [markdown]
# ## What is new in a step
#
# A step adds one frame: the newest of its next observation. All others are known already, if the
# environment keeps its promise. So that is checked first.

# %%
#| export
def check_stacks(obs: np.ndarray, next_obs: np.ndarray, channels: int) -> None:
    """Raise unless each next observation is the one before, moved on by one frame of `channels`."""
    if not np.array_equal(next_obs[:, :-channels], obs[:, channels:]):
        raise ValueError("An observation must show the frame before and one more, newest last.")

# %%
two, moved_on = (np.array([[[[i]], [[i + 1]]]]) for i in range(2))  # frames 0 and 1, then 1 and 2
check_stacks(two, moved_on, channels=1)

# %% [markdown]
# Then the numbers follow. At a start all frames of an observation are stored, later one in each
# step, and the stack of each environment moves on by one number.

# %%
#| export
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

# %% [markdown]
# The three steps of the table above, as `Counting` shows them:

# %%
env = FrameStack(PixelObservation(Counting(), size=2), frame_stack=2)
shown = ShownFrames(FrameRing(capacity=8, shape=(1, 2, 2)), num_envs=1, frame_stack=2)
obs, table = env.reset()[0][None], []
for step in range(3):
    next_obs = env.step(0)[0][None]
    check_stacks(obs, next_obs, channels=1)
    shown.begin(obs, np.array([step == 0]))
    table.append([numbers[0].tolist() for numbers in shown.move(next_obs)])
    obs = next_obs
print(table)
assert table == [[[0, 0], [0, 1]], [[0, 1], [1, 2]], [[1, 2], [2, 3]]]
assert shown.ring.written == 4

# %% [markdown]
# ## Rows that are given up
#
# The rows need little that is new: `transition_dtype`, `NStepAccumulator` and the ring of
# [replay](replay.ipynb) do not care that an observation is now a list of numbers. What is new is
# that a frame can be overwritten while a row still needs it, since each end of an episode costs an
# extra frame. Then the oldest rows are given up before their place is needed. `size` is the number
# of rows that are whole, the last ones written, and only they are drawn.
#
# By hand: six rows in a ring of four leave the rows 2, 3, 4, 5. If frames before number 4 are gone,
# two of them are whole.

# %%
#| export
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

# %%
numbered = np.zeros(6, transition_dtype(Box(0, 9, (1,), np.int64), Box(-1, 1, (1,))))
numbered["obs"] = np.arange(6)[:, None]
trimmed = TrimmedReplay(capacity=4, dtype=numbered.dtype, seed=0)
for row in numbered:
    trimmed.add(row[None])
assert len(trimmed) == 4
trimmed.trim(oldest=4)
drawn = set(trimmed.sample(100)["obs"].ravel().tolist())
print("whole rows:", len(trimmed), " drawn:", drawn)
assert len(trimmed) == 2 and drawn == {4, 5}

# %% [markdown]
# When must a row be given up? Rows arrive a little out of order: one waits up to $n$ steps for its
# return, and its oldest frame is a stack further back. With `frame_stack` frames in a stack these
# are `n_step + frame_stack` steps, and in each an environment writes one frame, and `frame_stack`
# more where an episode starts. So a row is given up that many frames, the `slack`, before its own
# is gone, and the ring of frames has room for as many more.
#
# By hand: two environments, stacks of three and three-step returns make $2 \cdot 4 \cdot 6 = 48$.

# %%
#| export
def frame_slack(num_envs: int, frame_stack: int, n_step: int) -> int:
    """Return how many frames may be written while a row waits for its place."""
    return num_envs * (1 + frame_stack) * (n_step + frame_stack)

# %%
assert frame_slack(num_envs=2, frame_stack=3, n_step=3) == 48

# %% [markdown]
# ## From steps to rows
#
# Frames go into their ring, and their numbers through the $n$-step accumulator into rows. By hand,
# with two-step returns, $\gamma = \tfrac12$ and the rewards 1, 2, 3 of `Counting`: after the first
# step nothing is complete. After the second the row of the first is: it leads from the frames 0 0
# to 1 2 and pays $1 + \tfrac12 \cdot 2 = 2$. After the third comes 0 1 to 2 3, worth
# $2 + \tfrac12 \cdot 3 = 3.5$.

# %%
#| export
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

# %%
pairs = transition_dtype(Box(0, 9, (2,), np.int64), Box(-1, 1, (1,)))
ring, waiting = FrameRing(capacity=8, shape=(1, 2, 2)), NStepAccumulator(2, 0.5, 1, pairs)
writer = FrameWriter(ring, ShownFrames(ring, num_envs=1, frame_stack=2), waiting, pairs)
obs, found, no = env.reset()[0][None], [], np.array([False])
for i in range(3):
    image, reward, *_ = env.step(0)
    push, pay = np.zeros((1, 1)), np.array([reward])
    step = Transition(obs, push, pay, image[None], no, no, np.array([i == 0]), None)
    found.append(writer.write(step, push, pay))
    obs = step.next_obs
rows = np.concatenate(found)
print("complete after each step:", [len(some) for some in found], " rewards:", rows["reward"])
assert rows["obs"].tolist() == [[0, 0], [0, 1]] and rows["next_obs"].tolist() == [[1, 2], [2, 3]]
assert rows["reward"].tolist() == [2.0, 3.5]

# %% [markdown]
# ## The buffer
#
# What is left is to put the parts together: rows come from the writer, and are given up in time.

# %%
#| export
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

# %% [markdown]
# Does it give what a buffer of whole stacks gives? Play the pendulum at random for 600 steps, with
# three-step returns, store everything in both, and draw 500 rows from each with the same seed:


# %%
def random_steps(env_id: str, steps: int, seed: int) -> list[Transition]:
    """Play at random and return the steps as the loop hands them to an agent."""
    env, found, start = make_env(env_id), [], True
    env.action_space.seed(seed)
    obs, _ = env.reset(seed=seed)
    for _ in range(steps):
        action = env.action_space.sample()
        next_obs, reward, terminated, truncated, _ = env.step(action)
        parts = (obs, action, np.float64(reward), next_obs, terminated, truncated, start)
        found.append(Transition(*[np.asarray(part)[None] for part in parts], None))
        start = terminated or truncated
        obs = env.reset()[0] if start else next_obs
    env.close()
    return found


steps = random_steps("rlbook/PendulumPixels-v0", 600, seed=1)
images, actions = Box(0, 255, steps[0].obs.shape[1:], np.uint8), Box(-2, 2, (1,), np.float32)
frames = FrameReplay(700, images, actions, frame_stack=3, n_step=3, gamma=0.9, seed=7)
dtype = transition_dtype(images, actions)
whole, waiting = ReplayBuffer(700, dtype, seed=7), NStepAccumulator(3, 0.9, 1, dtype)
for step in steps:
    frames.append(step, step.action, step.reward)
    rows = make_rows(dtype, obs=step.obs, action=step.action, reward=step.reward,
                     next_obs=step.next_obs, terminated=step.terminated, discount=0.9)
    whole.add(waiting.add(rows, step.truncated))

once, copies = frames.sample(500), whole.sample(500)
for name in ("obs", "next_obs"):
    assert np.array_equal(frames.ring.stacks(once[name]), copies[name])
for name in ("action", "reward", "discount", "terminated"):
    assert np.array_equal(once[name], copies[name])
print(f"500 of {len(frames)} rows, the same in both; {frames.ring.written} frames for 600 steps")

# %% [markdown]
# The same samples, and this is what they cost:

# %%
scalars = dtype.itemsize - 2 * 3 * frame_bytes  # action, reward, discount and whether it ended
per_row = {"whole stacks": dtype.itemsize, "each frame once": frame_bytes + scalars}
used = (frames.ring.frames.nbytes + frames.rows.nbytes) / 700
print("bytes per transition:", per_row, f" measured, with the slack of {frames.slack}: {used:.0f}")
assert used < 1.1 * per_row["each frame once"] < 0.2 * per_row["whole stacks"]

# %% tags=["hide-input"]
figure, ax = plt.subplots(figsize=(7, 1.8))
bars = ax.barh(list(per_row), [size * 1e6 / 1e9 for size in per_row.values()], color=PALETTE[0])
ax.bar_label(bars, fmt=" %.1f GB", padding=2)
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
ax.margins(x=0.15)
ax.set(xlabel="memory of a million transitions of Pendulum from pixels (GB)")
plt.show()

# %% [markdown]
# A checkpoint takes the frames as they lie in memory: `state_dict` hands out views, and the file is
# written from them piece by piece. So saving a buffer of ten gigabytes does not need twenty.

# %%
state = frames.state_dict()
assert np.shares_memory(state["frames"]["ring"]["frames"].numpy(), frames.ring.frames)
assert np.shares_memory(state["rows"].numpy(), frames.rows)
twin = FrameReplay(700, images, actions, frame_stack=3, n_step=3, gamma=0.9, seed=0)
twin.load_state_dict(state)
drawn = twin.sample(2)
print("a loaded twin draws the same rows:", drawn["obs"].tolist())
assert np.array_equal(drawn, frames.sample(2))
assert np.array_equal(twin.sample(500), frames.sample(500))

# %% [markdown]
# ## Honest edges
#
# - An episode of $T$ steps stores $T + 1$ frames. With 50 steps that is 2 %, with one step it would
#   be double; then the buffer holds fewer rows than `capacity`, and says so by `len`.
# - Shifts, flips and other changes to images are not stored: they are made anew at each draw, in
#   [the next chapter](drqv2.ipynb).
# - Mnih et al. take the maximum of two neighbouring frames, because Atari consoles draw some
#   sprites in every other frame only. Nothing here flickers, so that is left out; so is turning
#   pictures grey.
# - Reading a checkpoint does hold the frames twice for a moment: in the file's tensors and in the
#   ring.
# - `PendulumPixels` shows the last torque, because Gymnasium draws it.
#
# ## Exercises
#
# **Exercise 1.** `ActionRepeat` stands inside `PixelObservation`. What changes if you swap them?
#
# <details>
# <summary>Solution</summary>
#
# The pictures that the agent sees stay the same, but each of the repeated steps is drawn and
# shrunk, and all but the last are thrown away: twice the drawing for a repeat of two.
#
# ```python
# inner = PixelObservation(ActionRepeat(Counting(), 2), size=2)
# outer = ActionRepeat(PixelObservation(Counting(), size=2), 2)
# shown = [(env.reset(), env.step(0))[1][0] for env in (inner, outer)]
# assert np.array_equal(*shown)
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** Why does `check_stacks` compare `next_obs` without its newest frame with `obs`
# without its oldest? Make a wrapper that would break the buffer without that check.
#
# <details>
# <summary>Solution</summary>
#
# The buffer stores one frame per step and trusts that the others are known already. A wrapper that
# shows, say, the newest and the *first* frame of the episode breaks that promise, and the buffer
# would put together observations that were never seen. With the check it is refused at the first
# step that differs.
#
# ```python
# bright = np.arange(3, dtype=np.uint8)[:, None, None] * np.ones((2, 2), np.uint8)  # frames 0, 1, 2
# obs, next_obs = bright[[0, 1]][None], bright[[0, 2]][None]  # the first frame, and the newest
# one, no = np.ones(1), np.zeros(1, bool)
# step = Transition(obs, one[:, None], one, next_obs, no, no, ~no, None)
# buffer = FrameReplay(10, Box(0, 255, (2, 2, 2), np.uint8), Box(-1, 1, (1,)), frame_stack=2)
# try:
#     buffer.append(step, step.action, step.reward)
#     stored = True
# except ValueError as error:
#     stored = False
#     print(error)
# assert not stored
# ```
#
# </details>

# %% [markdown]
# **Exercise 3.** A row could hold one number, that of its newest frame, and count back from there.
# Why does it hold all of them?
#
# <details>
# <summary>Solution</summary>
#
# Because the frame before is not always the number before. At the start of an episode the first
# frame is repeated, and with several environments their frames alternate. Three numbers take 24
# bytes beside a frame of 4,800, and there is no case to get wrong.
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
# **Exercise 4, a planted bug.** This stack runs, its shapes are right, and an agent that learns
# from it learns something. What is wrong? Look at the second episode.


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
    shown = [env.reset()[0]] + [env.step(0)[0] for _ in range(4)]
    print("episode", episode, [obs[:, 0, 0].tolist() for obs in shown])

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The queue is full when the second episode starts, so the loop that fills it does nothing, and the
# first observation shows the last frame of the episode before: `4 0`. The agent sees a jump that
# never happened. `FrameStack` puts in as many copies as the queue is long, which empties it of
# everything older.
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
assert shown[0][:, 0, 0].tolist() == [4, 0]  # and it should be 0 0

# %% [markdown]
# ## Using it
#
# ```python
# from rlbook.pixels import FrameReplay, FrameStack, PixelObservation, PointReach, make_pixels
#
# env = make_pixels("CartPole-v1", size=64, frame_stack=3, action_repeat=2)
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
