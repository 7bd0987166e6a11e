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
# # DrQ-v2: control from pixels
#
# In this chapter you build DrQ-v2, the algorithm that in 2021 learned to walk, run and stand with a
# humanoid from nothing but pictures, with replay and one graphics card. Its main idea fits in a
# line: **before you learn from an image, move it by a few pixels.** At the end you have an agent
# that sees 24 × 24 pixels and walks to a goal after a few thousand steps, and swings up a pendulum
# from its picture; and you have measured what the moved images buy.
#
# | | |
# |---|---|
# | Papers | Yarats et al. 2021 (DrQ-v2); Kostrikov et al. 2021 (DrQ); Lillicrap et al. 2016 (DDPG); Fujimoto et al. 2018 (TD3) |
# | Observations | images of bytes, channels first |
# | Actions | continuous, with finite bounds |
# | Learns | off-policy, from replay, in one process |
# | Same as [SAC](sac.ipynb) | twin critics, the smaller opinion in the target, Polyak averages, actions scaled to the bounds |
# | Different from SAC | an encoder of images, random shifts, n-step returns; a deterministic actor with scheduled noise in place of entropy |

# %%
#| export
import copy
import dataclasses
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import gymnasium as gym
import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor, nn

from rlbook.agent import Agent, Transition, UpdateResult
from rlbook.dqn import MLP, Adam, check_batch_fits, check_shapes, polyak_update
from rlbook.envs import derive_seed, make_env
from rlbook.pixels import (  # noqa: F401 (who uses the agent finds its environments here too)
    FrameReplay,
    FrameRing,
    PointReach,
    make_pendulum_pixels,
    make_pixels,
)
from rlbook.replay import Batch, to_batch
from rlbook.run import RunResult, train
from rlbook.sac import ActionScale, Critics, check_bounds
from rlbook.settings import Config, setting

# %%
import time

import torch.nn.functional as F
from matplotlib import pyplot as plt

from rlbook.figures import (
    COLORS,
    draw_parts,
    filmstrip,
    label_curves,
    load_result,
    made_by,
    plot_band,
    use_style,
)
from rlbook.settings import find_config, make_config, read_settings

use_style()
colors = {"with shifts": COLORS["drqv2"], "without shifts": COLORS["reference"]}

# %% tags=["hide-input"]
promise = load_result("results/drqv2_pendulum_pixels.json")
figure, ax = plt.subplots(figsize=(6, 3.2))
for name, run in promise["runs"].items():  # mean and 95 % interval
    plot_band(ax, np.array(run["steps"]), np.array(run["returns"]), name, colors[name])
ax.legend()
label_curves(ax, "Pendulum from pixels, with the shipped settings", "return of 10 greedy episodes")
ax.set_xlabel("agent steps (two steps of the pendulum each)")
figure.savefig("_static/drqv2_pendulum_pixels.png")
plt.show()
print(made_by(promise))
for name, run in promise["runs"].items():
    print(f"{name:>15}: last evaluations of the seeds {promise['seeds']}:", *run["final"])

# %% [markdown]
# With shifts every seed holds the pendulum up, at −149 or better; without them, from as many pictures,
# the best of five ends at −280.
#
# ## The problem: a critic that knows its pictures by heart
#
# An agent of this kind has few pictures: a few thousand, in which the same room is seen again and
# again. Its critic has tens of thousands of weights. It can fit the values of the pictures that it
# has stored without understanding what is in them, and then its opinion of a picture that it has
# not seen is worth little. How bad is that? A picture of [PointReach](pixels.ipynb) and the same
# picture moved by two pixels show the same situation: the same two discs, at the same distance. Ask
# an untrained critic, and later a trained one, what it thinks of both. For that we need the agent,
# so first the parts, and first of all the moving.
#
# ## Shifting an image
#
# A shift by up to $p$ pixels: repeat the outermost pixels $p$ times on all sides, then cut a piece
# of the original size out of it at a random place. With $p = 4$ there are $9 \cdot 9 = 81$ places,
# and one of them, (4, 4), gives back the image. Written out, with $\operatorname{clip}$ to the rows
# and columns that there are:
#
# $$\text{shifted}[i, j] = \text{image}\bigl[\operatorname{clip}(i + \Delta y - p),\;
#   \operatorname{clip}(j + \Delta x - p)\bigr], \qquad \Delta y, \Delta x \in \{0, \dots, 2p\}$$
#
# By hand, a row of three pixels 1, 2, 3 and $p = 1$: padded it is 1 1 2 3 3, and the three pieces
# are 1 1 2, 1 2 3 and 2 3 3.
#
# How to do that for a whole batch, fast? All pieces of all padded images are a view with two more
# dimensions, where each step in $\Delta y$ is a step of one row in memory and each step in
# $\Delta x$ one of a pixel. Nothing is copied to make that view, and one indexing operation takes
# one piece of each image. It works on bytes, before anything is converted to floats: a quarter of
# the memory to move.

# %%
#| export
def pad_edges(images: np.ndarray, pad: int) -> np.ndarray:
    """Repeat the edges of images (batch, channels, height, width) `pad` times on all sides."""
    *outer, height, width = images.shape
    padded = np.empty((*outer, height + 2 * pad, width + 2 * pad), images.dtype)
    rows = padded[:, :, pad : pad + height]
    rows[..., pad : pad + width] = images
    rows[..., :pad], rows[..., pad + width :] = images[..., :1], images[..., -1:]
    padded[:, :, :pad], padded[:, :, pad + height :] = rows[:, :, :1], rows[:, :, -1:]
    return padded


def shift_images(images: np.ndarray, shifts: np.ndarray, pad: int) -> np.ndarray:
    """Cut each padded image at its own corner, `shifts` (2, batch) down and right, 0 to 2 * pad."""
    padded = pad_edges(images, pad)
    image, channel, row, column = padded.strides
    places = 2 * pad + 1
    windows = as_strided(  # a view of all crops of all images: nothing is copied yet
        padded,
        (len(images), places, places, *images.shape[1:]),
        (image, row, column, channel, row, column),
        writeable=False,
    )
    return windows[np.arange(len(images)), shifts[0], shifts[1]]


def random_shift(images: np.ndarray, pad: int, generator: np.random.Generator) -> np.ndarray:
    """Move each image by up to `pad` pixels in both directions, its edges repeated."""
    shifts = generator.integers(2 * pad + 1, size=(2, len(images)))
    return shift_images(images, shifts, pad) if pad else images

# %%
row = np.array([1, 2, 3], np.uint8).reshape(1, 1, 1, 3)
pieces = [shift_images(row, np.array([[1], [dx]]), pad=1).ravel().tolist() for dx in range(3)]
print(pieces)
assert pieces == [[1, 1, 2], [1, 2, 3], [2, 3, 3]]


def shift_slowly(image: np.ndarray, dy: int, dx: int, pad: int) -> np.ndarray:
    """Shift one image (channels, height, width) pixel by pixel, as the definition says."""
    _, height, width = image.shape
    rows = np.clip(np.arange(height) + dy - pad, 0, height - 1)
    columns = np.clip(np.arange(width) + dx - pad, 0, width - 1)
    return image[:, rows][:, :, columns]


generator = np.random.default_rng(0)
batch = generator.integers(256, size=(81, 3, 24, 24)).astype(np.uint8)
every_shift = np.indices((9, 9)).reshape(2, 81)
shifted = shift_images(batch, every_shift, pad=4)
for image, (dy, dx), result in zip(batch, every_shift.T, shifted, strict=True):
    assert np.array_equal(result, shift_slowly(image, dy, dx, 4))

# %% [markdown]
# The code that came with the paper does the same with `grid_sample`, which interpolates between
# pixels, as floats, though the places are whole numbers. On a graphics card that hardly matters. On
# a CPU, at the paper's size (making floats of bytes, which the network needs either way, is left out):


# %%
def shift_with_grid_sample(images: torch.Tensor, shifts: np.ndarray, pad: int) -> torch.Tensor:
    """Do the same by interpolation at whole numbers; the images are floats."""
    padded = F.pad(images, (pad,) * 4, "replicate")
    side = padded.shape[-1]
    place = torch.arange(images.shape[-1]).float()
    rows, columns = (torch.from_numpy(d).float()[:, None] + place for d in shifts)  # (batch, side)
    grid = torch.stack(
        [
            columns[:, None, :].expand(-1, len(place), -1),
            rows[:, :, None].expand(-1, -1, len(place)),
        ],
        dim=-1,
    )
    return F.grid_sample(padded, (2 * grid + 1) / side - 1, align_corners=False)


torch.set_num_threads(1)
paper = generator.integers(256, size=(64, 9, 84, 84)).astype(np.uint8)
places, floats = generator.integers(9, size=(2, 64)), torch.from_numpy(paper).float()
ways: dict[str, Any] = {
    "windows on bytes": lambda: shift_images(paper, places, 4),
    "grid_sample": lambda: shift_with_grid_sample(floats, places, 4),
}
ours, theirs = (torch.as_tensor(way()).float() for way in ways.values())
assert torch.allclose(ours, theirs, atol=0.05)
seconds: dict[str, list[float]] = {name: [] for name in ways}
for _ in range(9):
    for name, way in ways.items():
        began = time.perf_counter()
        way()
        seconds[name].append(time.perf_counter() - began)
medians = {name: float(np.median(times)) for name, times in seconds.items()}
print({name: f"{1e3 * value:.1f} ms" for name, value in medians.items()})
print(f"{medians['grid_sample'] / medians['windows on bytes']:.1f} times as fast")
assert medians["grid_sample"] > 3 * medians["windows on bytes"]

# %% [markdown]
# What it does to an image, with the largest shifts to the four sides. A disc near the edge can lose
# a part of itself; what comes in on the other side repeats the edge.

# %% tags=["hide-input"]
world = make_env("rlbook/PointReach-v0")
seen, _ = world.reset(seed=11)
corners = np.array([[4, 4], [0, 4], [8, 4], [4, 0], [4, 8], [0, 0]]).T
titles = ["as it is", "down 4", "up 4", "right 4", "left 4", "both"]
moved = shift_images(np.repeat(seen[None], 6, axis=0), corners, pad=4)
figure, axes = plt.subplots(1, 6, figsize=(9, 1.8))
for ax, image, title in zip(axes, moved, titles, strict=True):
    ax.imshow(image.transpose(1, 2, 0))
    ax.set_title(title)
    ax.axis("off")
plt.show()

# %% [markdown]
# ## The model
#
# **The encoder** is a stack of convolutions. Two are on offer: `nature`, the one of DQN (Mnih et
# al. 2015), and `small`, three layers of 3 × 3 that make do with small images. A layer turns a side
# of $x$ pixels into $\lfloor (x - \text{kernel})/\text{stride} \rfloor + 1$. Going backwards from
# one last pixel says which image is the smallest that fits.
#
# By hand, for `small`: the last layer needs 3 pixels to make one; the second, with stride 2, needs
# $2 \cdot 2 + 3 = 7$ to make three; the first $6 \cdot 2 + 3 = 15$ to make seven.
#
# Channels come first in memory, as they were stored. Convolutions on a CPU are faster when they
# come last, so the bytes are turned round on the way in, before they become floats.

# %%
#| export
Layers = tuple[tuple[int, int, int], ...]  # output channels, width of the kernel, stride

ENCODERS: dict[str, Layers] = {
    "small": ((16, 3, 2), (32, 3, 2), (32, 3, 1)),
    "nature": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
}


def smallest_image(layers: Layers) -> int:
    """Return the side of the smallest image of which these convolutions leave one pixel."""
    side = 1
    for _, kernel, stride in reversed(layers):
        side = (side - 1) * stride + kernel
    return side


class Encoder(nn.Module):
    """Convolutions from images (batch, channels, height, width) to numbers (batch, outputs)."""

    def __init__(self, shape: tuple[int, ...], layers: Layers) -> None:
        super().__init__()
        channels, sides = shape[0], shape[1:]
        self.convolutions = nn.ModuleList()
        for outputs, kernel, stride in layers:
            convolution = nn.Conv2d(channels, outputs, kernel, stride)
            nn.init.orthogonal_(convolution.weight, nn.init.calculate_gain("relu"))
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
            self.convolutions.append(convolution)
            channels, sides = outputs, tuple((side - kernel) // stride + 1 for side in sides)
        self.outputs = channels * math.prod(sides)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        """Scale bytes to (-0.5, 0.5) and convolve."""
        x = images.contiguous(memory_format=torch.channels_last)  # as bytes: fewer to move
        x = (x * (1 / 255)).sub_(0.5)
        for convolution in self.convolutions:
            x = convolution(x).relu_()
        return x.flatten(1)

# %%
print({name: smallest_image(layers) for name, layers in ENCODERS.items()})
assert smallest_image(ENCODERS["small"]) == 15 and smallest_image(ENCODERS["nature"]) == 36
eye = Encoder((3, 24, 24), ENCODERS["small"])
assert eye(torch.zeros(5, 3, 24, 24, dtype=torch.uint8)).shape == (5, eye.outputs)
assert eye.outputs == 32 * 3 * 3  # 24 -> 11 -> 5 -> 3 pixels

# %% [markdown]
# **Two heads** look at what the encoder makes of an image. Each squeezes it to a few features
# through a linear layer, LayerNorm and tanh, so that features have one size whatever the encoder
# does: encodings a thousand times as large give the same features.

# %%
#| export
class Trunk(nn.Sequential):
    """A few features in (-1, 1) of what the encoder sees."""

    def __init__(self, inputs: int, features: int) -> None:
        super().__init__(nn.Linear(inputs, features), nn.LayerNorm(features), nn.Tanh())

# %%
squeeze = Trunk(inputs=288, features=8)
nn.init.zeros_(squeeze[0].bias)  # what is added would not grow with the encoding
encoding = torch.randn(5, 288)
assert torch.allclose(squeeze(encoding), squeeze(1000 * encoding), atol=1e-3)

# %% [markdown]
# The actor turns features into an action, which tanh will bound. The critic joins them with an
# action and gives two opinions (or as many as it has members); its twin networks are the `Critics` of
# [SAC](sac.ipynb).
#
# When the actor asks the critic, it wants to know how the value changes with the *action*. No
# gradient may then reach the critic's weights, or the encoder's: `learn=False`.

# %%
#| export
class Actor(nn.Module):
    """From what the encoder sees to an action in (-1, 1)."""

    def __init__(self, inputs: int, features: int, hidden: tuple[int, ...], actions: int) -> None:
        super().__init__()
        self.trunk, self.policy = Trunk(inputs, features), MLP((features, *hidden, actions))

    def forward(self, encoded: Tensor) -> Tensor:
        """Return the actions (batch, actions) before tanh bounds them."""
        return self.policy(self.trunk(encoded))


class Critic(nn.Module):
    """From what the encoder sees and an action to two opinions of their value."""

    def __init__(
        self, inputs: int, features: int, hidden: tuple[int, ...], actions: int, members: int = 2
    ) -> None:
        super().__init__()
        self.trunk = Trunk(inputs, features)
        self.twins = Critics(features, actions, hidden, members)

    def forward(self, encoded: Tensor, action: Tensor, learn: bool = True) -> Tensor:
        """Return values (batch, 2); without `learn` the gradient reaches the action alone."""
        with torch.set_grad_enabled(learn and torch.is_grad_enabled()):
            features = self.trunk(encoded)
        return self.twins(features, action, learn=learn)

# %%
asked = Critic(inputs=288, features=8, hidden=(16,), actions=2)
question = torch.zeros(5, 2, requires_grad=True)
opinions = asked(encoding, question, learn=False)
opinions.sum().backward()
assert opinions.shape == (5, 2) and question.grad is not None
assert all(weight.grad is None for weight in asked.parameters())

# %% [markdown]
# The model is the three together. What it says of images, an action or two opinions, is what an
# agent asks for when it acts and when it is looked into.

# %%
#| export
class DrQv2Model(nn.Module):
    """An encoder of images, an actor and twin critics."""

    def __init__(
        self,
        image_shape: tuple[int, ...],
        actions: int,
        encoder: str = "small",
        features: int = 50,
        hidden: tuple[int, ...] = (256, 256),
        num_critics: int = 2,
    ) -> None:
        super().__init__()
        self.encoder = Encoder(image_shape, ENCODERS[encoder])
        self.actor = Actor(self.encoder.outputs, features, hidden, actions)
        self.critic = Critic(self.encoder.outputs, features, hidden, actions, num_critics)

    def encoder_parameters(self) -> Iterator[nn.Parameter]:
        """The weights that see."""
        return self.encoder.parameters()

    def actor_parameters(self) -> Iterator[nn.Parameter]:
        """The weights that act."""
        return self.actor.parameters()

    def critic_parameters(self) -> Iterator[nn.Parameter]:
        """The weights that judge."""
        return self.critic.parameters()

    def act(self, images: Tensor) -> Tensor:
        """Return the actions (batch, actions) that the policy likes best."""
        return self.actor(self.encoder(images)).tanh()

    def sample(self, images: Tensor, noise: Tensor) -> Tensor:
        """Return those actions with noise on them, still in [-1, 1]."""
        return noisy_action(self.act(images), noise)

    def values(self, images: Tensor, action: Tensor | None = None) -> Tensor:
        """Return both opinions (batch, 2) of actions, by default of those that it likes best."""
        encoded = self.encoder(images)
        chosen = self.actor(encoded).tanh() if action is None else action
        return self.critic(encoded, chosen)

# %% [markdown]
# Whose gradient goes where is the heart of DrQ-v2: **the critic's loss teaches the encoder, the
# actor's does not.** An actor that could change the encoder would make the critic's eyes worse to
# please itself. Check it: after a step back from an actor's question, only the actor has a
# gradient.

# %%
tiny_model = DrQv2Model((3, 24, 24), actions=2, features=8, hidden=(16,))
encoded = tiny_model.encoder(torch.from_numpy(batch[:4]))
proposal = tiny_model.actor(encoded.detach()).tanh()
tiny_model.critic(encoded.detach(), proposal, learn=False).sum().backward()
who = {
    name: any(weight.grad is not None for weight in part())
    for name, part in (
        ("encoder", tiny_model.encoder_parameters),
        ("actor", tiny_model.actor_parameters),
        ("critic", tiny_model.critic_parameters),
    )
}
print("has a gradient:", who)
assert who == {"encoder": False, "actor": True, "critic": False}

# %% [markdown]
# ## Noise
#
# The actor is deterministic, so exploring is adding noise, with a standard deviation $\sigma$ that
# falls linearly while the agent takes its steps. The same noise makes the actions of an update, but
# there it is clipped: one wants to know the value *near* the policy's action. The sum is
# kept within $[-1, 1]$.
#
# One trap: `clamp` has no gradient where it clamps, and an actor near the bounds would learn from
# half of its samples only. So the clamped value is used, with the gradient of the unclamped one.
#
# By hand: from 1 to 0.1 in 100 steps, $\sigma$ is 0.55 after 50. The action 0.9 with noise 0.5,
# clipped to 0.3, is 1.2, kept at 1.

# %%
#| export
def noise_std(step: int, start: float, end: float, steps: int) -> float:
    """Go linearly from `start` to `end` in `steps`, then stay there."""
    return start + (end - start) * min(1.0, step / steps)


def noisy_action(action: Tensor, noise: Tensor, clip: float | None = None) -> Tensor:
    """Add noise, itself clipped if asked, and keep the sum in [-1, 1], but its gradient whole."""
    noise = noise if clip is None else noise.clamp(-clip, clip)
    value = (action.detach() + noise).clamp(-1, 1)
    return value + (action - action.detach())  # the second term is 0, and has the gradient

# %%
assert abs(noise_std(50, 1.0, 0.1, 100) - 0.55) < 1e-12
assert abs(noise_std(999, 1.0, 0.1, 100) - 0.1) < 1e-12
action = torch.tensor([0.9], requires_grad=True)
noisy = noisy_action(action, torch.tensor([0.5]), clip=0.3)
noisy.backward()
assert noisy.item() == 1.0 and action.grad.item() == 1.0  # clamped, and yet with a gradient

# %% [markdown]
# ## The loss
#
# The target is that of TD3 with $n$-step returns. $f$ is the encoder, $Q^-_1$ and $Q^-_2$ are the
# slow copies of the critics, and both images are shifted, each its own way:
#
# $$y = \underbrace{r_t + \dots + \gamma^{n-1} r_{t+n-1}}_{\texttt{reward}}
#   + \underbrace{\gamma^n}_{\texttt{discount}} (1 - \texttt{terminated})
#   \min_i Q^-_i\bigl(f(s_{t+n}), \pi(f(s_{t+n})) + \text{noise}\bigr)$$
#
# and the loss is the squared distance to it, summed over both critics. The encoder has no slow
# copy.
#
# By hand: reward 2, discount 0.5, next values 4 and 6 give $y = 2 + 0.5 \cdot 4 = 4$. Values 5 and
# 3 are off by 1 and −1: the loss is $1 + 1 = 2$. If the step terminated, $y = 2$, the errors are 3
# and 1, and the loss is 10. A batch of both has the mean, 6.

# %%
#| export
def drqv2_target(reward: Tensor, discount: Tensor, terminated: Tensor, next_q: Tensor) -> Tensor:
    """Return the n-step reward plus the discounted smaller opinion of the successor."""
    return reward + discount * ~terminated * next_q.amin(dim=1)


def drqv2_loss(
    q: Tensor,  # (batch, 2), with gradient
    reward: Tensor,  # (batch,), of n steps
    discount: Tensor,  # (batch,), gamma ** n
    terminated: Tensor,  # (batch,)
    next_q: Tensor,  # (batch, 2), of the target critic
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean squared TD error, summed over both critics, and named metrics."""
    check_shapes(len(q), reward=reward, discount=discount, terminated=terminated)
    if next_q.shape != q.shape:
        raise ValueError(f"next_q must be {tuple(q.shape)}, not {tuple(next_q.shape)}.")
    with torch.no_grad():
        target = drqv2_target(reward, discount, terminated, next_q)
    td_error = q - target.unsqueeze(1)  # (batch, 2)
    loss = td_error.square().mean(dim=0).sum()
    metrics = {
        "critic_loss": loss.detach(),
        "target_q_mean": target.mean(),
        "td_error_abs": td_error.detach().abs().mean(),
    }
    return loss, metrics


# %%
q = torch.tensor([[5.0, 3.0], [5.0, 3.0]], requires_grad=True)
hand = (torch.tensor([2.0, 2.0]), torch.tensor([0.5, 0.5]), torch.tensor([False, True]))
loss, metrics = drqv2_loss(q, *hand, torch.tensor([[4.0, 6.0], [4.0, 6.0]]))
print({name: value.item() for name, value in metrics.items()})
assert loss.item() == 6.0 and metrics["target_q_mean"].item() == 3.0
assert metrics["td_error_abs"].item() == 1.5

# %% [markdown]
# The actor wants the smaller opinion of its action to be high. There is a second term, which the
# paper does not have. Early on, before the critic knows anything, its opinion has the same slope
# everywhere, and the actor runs after it to a corner of the actions. There tanh is flat: with an
# unbounded action $u = 10$ its slope is about $10^{-8}$, and the actor never comes back. So $u$
# costs a little, $\lambda u^2$. With $\lambda = 0.01$ that is nothing to an actor that has a
# reason:
#
# $$L_\pi = -\min_i Q_i\bigl(f(s), \tanh(u)\bigr) + \lambda\, u^2, \qquad u = \pi(f(s))$$
#
# By hand: opinions 5 and 3, $u = (1, -3)$, $\lambda = 0.01$: $-3 + 0.01 \cdot (1 + 9)/2 = -2.95$.

# %%
#| export
def actor_loss(q: Tensor, unbounded: Tensor, penalty: float) -> Tensor:
    """Return minus the smaller opinion (batch, 2) of actions, plus a price for their saturation."""
    return -q.amin(dim=1).mean() + penalty * unbounded.square().mean()

# %%
loss = actor_loss(torch.tensor([[5.0, 3.0]]), torch.tensor([[1.0, -3.0]]), penalty=0.01)
print(f"{loss.item():.2f}")
assert abs(loss.item() + 2.95) < 1e-6

# %% [markdown]
# These are losses of numbers. Two short functions ask the networks for the numbers. The critic's
# target needs to know what the next observation is worth: the policy proposes an action there, with
# noise, and the slow critics judge it.

# %%
#| export
@torch.no_grad()
def next_values(
    model: DrQv2Model, target: Critic, images: Tensor, noise: Tensor, clip: float
) -> Tensor:
    """Return what the slow critics (batch, 2) think of the policy's action near these images."""
    encoded = model.encoder(images)
    action = noisy_action(model.actor(encoded).tanh(), noise, clip)
    return target(encoded, action)


def improvement_loss(
    model: DrQv2Model, encoded: Tensor, noise: Tensor, clip: float, penalty: float
) -> Tensor:
    """Return the loss of the actor at what the encoder saw; only the actor gets a gradient."""
    unbounded = model.actor(encoded)
    action = noisy_action(unbounded.tanh(), noise, clip)
    return actor_loss(model.critic(encoded, action, learn=False), unbounded, penalty)

# %% [markdown]
# Without noise, and with the critic as its own slow copy, the next value is the model's own opinion
# of what it likes best; and without a price the policy's loss is minus the smaller of its opinions.

# %%
images, none = torch.from_numpy(batch[:4]), torch.zeros(4, 2)
own = tiny_model.values(images).detach()
assert torch.equal(next_values(tiny_model, tiny_model.critic, images, none, clip=0.3), own)
cost = improvement_loss(tiny_model, tiny_model.encoder(images).detach(), none, clip=0.3, penalty=0.0)
print(f"first image: both opinions {own[0].numpy().round(3)}; all: loss {cost.item():.3f}")
assert torch.allclose(cost, -own.amin(dim=1).mean())

# %% [markdown]
# ## Settings
#
# A *step* is one decision of the agent. With an action repeat of two, 6,000 steps are 12,000 of the
# environment, and the noise schedule counts decisions, too.

# %%
#| export
@dataclass(kw_only=True)
class DrQv2Config(Config):
    """The settings of DrQ-v2."""

    env_id: str = setting(
        "rlbook/PointReach-v0", "Gymnasium id; `module:Name-v0` imports the module first."
    )
    checkpoint_replay: bool = setting(
        True, "Whether checkpoints hold the replay buffer; without it resuming is not exact."
    )
    encoder: Literal["small", "nature"] = setting("small", "Convolutions: small, or of Mnih 2015.")
    features: int = setting(50, "Features that actor and critic make of it.", low=1)
    num_critics: int = setting(2, "Critics, of whose values the smallest counts.", low=1)
    hidden: tuple[int, ...] = setting((256, 256), "Units of each hidden layer.", low=1)
    pad: int = setting(4, "Pixels of the largest random shift; 0 for none.", low=0)
    lr: float = setting(1e-3, "Learning rate of Adam.", above=0)
    batch_size: int = setting(64, "Transitions of one update.", low=1)
    buffer_size: int = setting(20_000, "Transitions that the replay buffer holds.", low=1)
    warmup_steps: int = setting(500, "Steps of random actions, without updates.", low=0)
    update_every: int = setting(2, "Environment steps per update.", low=1)
    policy_delay: int = setting(2, "Updates of the critic per update of the actor.", low=1)
    gamma: float = setting(0.99, "Discount of a reward one step later.", low=0, high=1)
    n_step: int = setting(3, "Rewards summed before the target bootstraps.", low=1)
    reward_scale: float = setting(1.0, "Factor of the rewards in learning.", above=0)
    tau: float = setting(0.01, "Fraction that the target moves per update.", above=0, high=1)
    saturation_penalty: float = setting(0.01, "Price of actions far out on the tanh.", low=0)
    actor_teaches_encoder: bool = setting(False, "Whether the actor's loss does so, too.")
    noise_start: float = setting(1.0, "Standard deviation of the first noise.", low=0)
    noise_end: float = setting(0.1, "Standard deviation of the last noise.", low=0)
    noise_steps: int = setting(2_000, "Environment steps from the first to the last.", low=1)
    noise_clip: float = setting(0.3, "Largest noise in updates.", low=0)

    def check(self) -> None:
        """Raise where settings contradict each other."""
        check_batch_fits(self.batch_size, self.buffer_size)

    def std(self, step: int) -> float:
        """Return the standard deviation of the noise at a step."""
        return noise_std(step, self.noise_start, self.noise_end, self.noise_steps)

    def updates_due(self, step: int) -> int:
        """Count the updates that a step of all environments completed."""
        if step <= self.warmup_steps:
            return 0
        return step // self.update_every - (step - self.num_envs) // self.update_every

# %% [markdown]
# ## The agent
#
# Two things are asked of the environment. Its observations must be images of bytes with the
# channels first, and not too small. And if it stacks frames, the [replay buffer](pixels.ipynb)
# wants to know how many, so that it stores each once: the wrapper `FrameStack` says so.

# %%
#| export
def check_images(env_id: str, space: gym.Space, encoder: str) -> None:
    """Raise unless observations are images of bytes, channels first, large enough to convolve."""
    shape = space.shape or ()
    if space.dtype != np.uint8:
        raise ValueError(
            f"{env_id!r} has images of {space.dtype}, but drqv2 needs bytes (uint8) from 0 to 255: "
            "convert them with gymnasium.wrappers.TransformObservation."
        )
    if shape[0] > shape[2]:
        raise ValueError(
            f"{env_id!r} has images of the shape {shape}, but drqv2 needs the channels first: use "
            f"'rlbook/Pixels-v0' with the env_kwargs {{'env_id': {env_id!r}}}."
        )
    smallest = smallest_image(ENCODERS[encoder])
    if min(shape[1:]) < smallest:
        raise ValueError(
            f"{env_id!r} has images of {shape[1]} x {shape[2]} pixels, but the smallest that the "
            f"encoder {encoder!r} can take is {smallest} x {smallest}."
        )


def find_frame_stack(config: Config) -> int:
    """Ask an environment how many frames it stacks; one that does not say stacks none."""
    env = make_env(config.env_id, config.env_kwargs)
    found = env.get_wrapper_attr("frame_stack") if env.has_wrapper_attr("frame_stack") else 1
    env.close()
    return int(found)

# %%
assert find_frame_stack(DrQv2Config(env_id="rlbook/PointReach-v0")) == 1
assert find_frame_stack(DrQv2Config(env_id="rlbook/PendulumPixels-v0")) == 3
try:
    check_images("rlbook/PointReach-v0", gym.spaces.Box(0, 255, (3, 24, 24), np.uint8), "nature")
except ValueError as error:
    print(error)

# %% [markdown]
# With that the buffer follows from the settings. It holds actions scaled to $(-1, 1)$. And a batch
# is made of its rows: their frames are put together, and observations and next observations
# shifted, each its own way.

# %%
#| export
def make_replay(config: DrQv2Config, images: gym.Space, actions: gym.spaces.Box) -> FrameReplay:
    """Make the buffer that fits an environment and these settings."""
    return FrameReplay(
        config.buffer_size,
        images,
        gym.spaces.Box(-1, 1, actions.shape),
        frame_stack=find_frame_stack(config),
        n_step=config.n_step,
        gamma=config.gamma,
        num_envs=config.num_envs,
        seed=derive_seed(config.seed, "replay"),
    )


def shifted_batch(
    rows: np.ndarray,
    ring: FrameRing,
    pad: int,
    generator: np.random.Generator,
    device: torch.device,
) -> Batch:
    """Put the frames of rows together, and move each of their images by up to `pad` pixels."""
    images = ring.stacks(np.concatenate([rows["obs"], rows["next_obs"]]))
    shifted = torch.from_numpy(random_shift(images, pad, generator))
    obs, next_obs = shifted.to(device).chunk(2)
    return dataclasses.replace(to_batch(rows, device), obs=obs, next_obs=next_obs)

# %% [markdown]
# A white pixel in the middle of a black room of 3 × 3, one step, and shifts by up to one pixel: it
# can be at any of the nine places, in both images, and after many draws it has been at each.

# %%
dot = np.zeros((1, 1, 3, 3), np.uint8)
dot[0, 0, 1, 1] = 255
no, box = np.array([False]), gym.spaces.Box(-1, 1, (1,))
one_step = Transition(dot, np.zeros((1, 1)), np.ones(1), dot, no, no, ~no, None)
small = FrameReplay(4, gym.spaces.Box(0, 255, (1, 3, 3), np.uint8), box)
small.append(one_step, one_step.action, one_step.reward)
many = shifted_batch(small.sample(500), small.ring, 1, generator, torch.device("cpu"))
for images in (many.obs, many.next_obs):
    assert set(images.flatten(1).argmax(dim=1).tolist()) == set(range(9))
assert (many.obs != many.next_obs).any() and many.reward.eq(1).all()

# %% [markdown]
# The agent joins these pieces, in three steps. The first is what is asked of its networks: which
# action to take, and what actions are worth.

# %%
#| export
class PixelActorCritic(Agent):
    """Sees images, acts and judges: everything that is asked of the networks."""

    observations: ClassVar[str] = "image"
    actions: ClassVar[str] = "continuous"
    config: DrQv2Config
    action_space: gym.spaces.Box

    def build(self) -> None:
        """Make the model and its target critic."""
        config, images, actions = self.config, self.observation_space, self.action_space
        check_bounds(config.env_id, actions)
        check_images(config.env_id, images, config.encoder)
        self.scale = ActionScale(actions)
        sizes = config.encoder, config.features, config.hidden, config.num_critics
        self.model = DrQv2Model(images.shape or (), actions.shape[0], *sizes).to(self.device)
        self.target = copy.deepcopy(self.model.critic)

    def draw_noise(self, count: int) -> Tensor:
        """Draw the noise (count, actions) of this step from the agent's own generator."""
        shape = (count, *self.action_space.shape)
        noise = self.generator.standard_normal(shape, dtype=np.float32)
        return torch.from_numpy(noise).to(self.device).mul_(self.config.std(self.global_step))

    @torch.inference_mode()
    def act(
        self, obs: np.ndarray, state: Any, episode_start: np.ndarray, explore: bool
    ) -> tuple[np.ndarray, Any]:
        """Take the policy's action, with noise if it may explore; at first any action."""
        if explore and self.global_step < self.config.warmup_steps:
            shape = (len(obs), *self.action_space.shape)
            return self.scale.to_env(self.generator.uniform(-1, 1, shape)), state
        images, model = torch.as_tensor(obs, device=self.device), self.model
        action = model.sample(images, self.draw_noise(len(obs))) if explore else model.act(images)
        return self.scale.to_env(action.cpu().numpy()), state

    @torch.inference_mode()
    def q_values(self, obs: np.ndarray, action: np.ndarray | None = None) -> np.ndarray:
        """Return both opinions (batch, 2) of actions, by default of the policy's own."""
        images, scaled = torch.as_tensor(obs, device=self.device), None
        if action is not None:
            numbers = self.scale.from_env(action)
            scaled = torch.as_tensor(numbers, dtype=torch.float32, device=self.device)
        return self.model.values(images, scaled).cpu().numpy()

# %% [markdown]
# The second is learning. `judge` and `improve` are the two losses of a batch, and `update` makes one
# backward pass for both: they share no weights that either may change, since the actor sees detached
# encodings and asks with `learn=False`. (With `actor_teaches_encoder` the encodings are not detached,
# to see what that rule is worth.)

# %%
#| export
class PixelLearner(PixelActorCritic):
    """Teaches encoder, critic and actor from batches of shifted images."""

    def build(self) -> None:
        """Make model, target critic and optimiser."""
        super().build()
        self.optimizer = Adam(self.model.parameters(), lr=self.config.lr)
        self.actor_updates = 0

    def judge(self, encoded: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the critics, whose gradient teaches the encoder too."""
        noise, clip = self.draw_noise(len(encoded)), self.config.noise_clip
        next_q = next_values(self.model, self.target, batch.next_obs, noise, clip)
        q = self.model.critic(encoded, batch.action)
        return drqv2_loss(q, batch.reward, batch.discount, batch.terminated, next_q)

    def improve(self, encoded: Tensor) -> Tensor:
        """Return the loss of the actor, of what the encoder saw, without a gradient into it."""
        noise, clip = self.draw_noise(len(encoded)), self.config.noise_clip
        return improvement_loss(self.model, encoded, noise, clip, self.config.saturation_penalty)

    def update(self, batch: Batch) -> UpdateResult:
        """Make one gradient step of encoder and critic and, when it is due, one of the actor."""
        encoded = self.model.encoder(batch.obs)
        loss, metrics = self.judge(encoded, batch)
        if (self.updates + 1) % self.config.policy_delay == 0:
            shared = self.config.actor_teaches_encoder
            metrics["actor_loss"] = self.improve(encoded if shared else encoded.detach())
            loss = loss + metrics["actor_loss"]
            self.actor_updates += 1
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        polyak_update(self.target, self.model.critic, self.config.tau)
        values = {name: float(value.detach()) for name, value in metrics.items()}
        values["actor_updates"] = self.actor_updates
        return UpdateResult({"loss": float(loss.detach()), **values})

    def state_dict(self) -> dict[str, Any]:
        """Return all that learning and its metrics depend on."""
        return {**super().state_dict(), "actor_updates": self.actor_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        super().load_state_dict(state)
        self.actor_updates = state["actor_updates"]

# %% [markdown]
# The third is the rest of the verbs of [the agent](agent.ipynb): what is stored, when it is time to
# learn, and what from.

# %%
#| export
class DrQv2(PixelLearner):
    """Learns from shifted images what actions are worth, and the policy that follows."""

    name: ClassVar[str] = "drqv2"
    config_class: ClassVar[type[Config]] = DrQv2Config
    parts: ClassVar[tuple[str, ...]] = ("model", "target", "optimizer", "replay")
    compiled: ClassVar[tuple[str, ...]] = ("model.encoder.forward",)

    def build(self) -> None:
        """Make all that learns, and the buffer."""
        super().build()
        self.replay = make_replay(self.config, self.observation_space, self.action_space)
        self.forgot = False  # whether it was loaded without its replay buffer

    def observe(self, transition: Transition) -> None:
        """Store one step of all environments, actions scaled to (-1, 1)."""
        if self.forgot:
            message = "The replay buffer was not saved: it fills again, and the run is not exact."
            warnings.warn(message, stacklevel=2)
            self.forgot = False
        action = self.scale.from_env(transition.action)
        self.replay.append(transition, action, self.config.reward_scale * transition.reward)

    def updates_due(self) -> int:
        """Say how many updates the last step made due, once the buffer holds a batch."""
        enough = len(self.replay) >= self.config.batch_size
        return self.config.updates_due(self.global_step) if enough else 0

    def sample(self) -> Batch:
        """Draw a batch and shift its images, each its own way."""
        rows = self.replay.sample(self.config.batch_size)
        return shifted_batch(rows, self.replay.ring, self.config.pad, self.generator, self.device)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, or all but the replay buffer."""
        super().load_state_dict(state)
        self.forgot = "replay" not in state

# %%
#| export
def train_drqv2(config: DrQv2Config, progress: bool = True) -> RunResult:
    """Train DrQ-v2 with these settings."""
    return train(DrQv2(config=config), progress)

# %% [markdown]
# ## Does it compute the right values?
#
# Before anything hard, an environment whose values are known. It shows a grey picture, pays 1 at
# every step, for ever, and a time limit cuts the episodes after five steps. With $\gamma = 0.5$
# each state is worth $1 + \tfrac12 + \tfrac14 + \dots = 2$. An agent that takes the cut for an end
# would say less.


# %%
class GreyRoom(gym.Env):
    """A grey picture and a reward of 1; the time limit of Gymnasium cuts it."""

    observation_space = gym.spaces.Box(0, 255, (1, 16, 16), np.uint8)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full((1, 16, 16), 100, np.uint8), {}

    def step(self, action):
        return np.full((1, 16, 16), 100, np.uint8), 1.0, False, False, {}


gym.register("GreyRoom-v0", GreyRoom, max_episode_steps=5)
grey = DrQv2("GreyRoom-v0", gamma=0.5, hidden=(32,), features=8, batch_size=32, warmup_steps=40,
             update_every=1, tau=0.1, eval_every=0, seed=0)
grey.learn(250, progress=False)
opinions = grey.q_values(np.full((1, 1, 16, 16), 100, np.uint8))[0]
print("both opinions:", opinions.round(2))
assert np.allclose(opinions, 2.0, atol=0.1)

# %% [markdown]
# ## A live run
#
# PointReach with the settings that are shipped as `drqv2/point_reach.yaml`, 4,000 steps, once with
# shifts of up to four pixels and once without. Everything else is the same, the seed included. We
# stop every 500 steps to evaluate, and to look at the features.

# %%
settings = read_settings(find_config("point_reach", "drqv2"))
settings.pop("algo")
settings |= {"total_steps": 4_000, "eval_every": 500, "log_every": 500}


def situations(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures of PointReach and, for each, where the goal is as seen from the agent."""
    world, pictures, ways = make_env("rlbook/PointReach-v0"), [], []
    for i in range(count):
        pictures.append(world.reset(seed=seed + i)[0])
        ways.append(world.unwrapped.goal - world.unwrapped.position)
    return np.array(pictures), np.array(ways)


@torch.no_grad()
def features_of(agent: DrQv2, pictures: np.ndarray) -> np.ndarray:
    """Return the features (count, features) that the critic makes of pictures."""
    return agent.model.critic.trunk(agent.model.encoder(torch.from_numpy(pictures))).numpy()


def stages(pad: int) -> tuple[DrQv2, list[dict[str, float]], list[np.ndarray]]:
    """Learn in eight stages; return the agent, the metrics of each and its features before each."""
    agent = DrQv2(config=make_config(DrQv2Config, settings | {"pad": pad}))
    lines, features = [], [features_of(agent, pictures)]
    for _ in range(8):
        history = agent.learn(500, progress=False).history
        lines.append({name: value for line in history for name, value in line.items()})
        features.append(features_of(agent, pictures))
    return agent, lines, features


pictures, ways = situations(400, seed=10_000)
runs = {"with shifts": stages(pad=4), "without shifts": stages(pad=0)}
for name, (_, lines, _) in runs.items():
    print(f"{name:>15}: return {lines[-1]['eval_return_mean']:5.1f}, "
          f"TD loss {lines[-1]['critic_loss']:.2f}")

# %% tags=["hide-input"]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
steps = [line["global_step"] for line in runs["with shifts"][1]]
for name, (_, lines, _) in runs.items():
    left.plot(steps, [line["eval_return_mean"] for line in lines], color=colors[name], label=name)
    losses = [line.get("critic_loss", np.nan) for line in lines]
    right.plot(steps, losses, color=colors[name], label=name)
left.axhline(47.5, color=COLORS["random"], ls="--", lw=1, label="straight to the goal")
label_curves(left, "PointReach, one seed", "return of 20 greedy episodes")
label_curves(right, "how well the critic fits its replay", "TD loss, both critics")
left.legend(loc="lower right")
right.set(ylim=(0, None))
plt.show()

# %%
shifted_end, plain_end = (runs[name][1][-1] for name in ("with shifts", "without shifts"))
assert shifted_end["eval_return_mean"] > 30
assert shifted_end["eval_return_mean"] > plain_end["eval_return_mean"] + 5
assert shifted_end["critic_loss"] > plain_end["critic_loss"]  # fits worse, acts better

# %% [markdown]
# Read both panels together. **The agent without shifts fits its replay better, and acts worse.**
# Its TD loss is lower all along: it has an easier problem, since the same pictures come back pixel
# by pixel, and it can know them by heart. With shifts no picture comes twice. The critic cannot get
# by without finding out what stays the same when an image moves, and that is just what the actor
# needs.
#
# One seed proves nothing. Here are ten, at the shipped 6,000 steps, mean and 95 % interval:

# %%
ten = load_result("results/drqv2_point_reach.json")
print(made_by(ten))
figure, ax = plt.subplots()
for name, run in ten["runs"].items():
    final = np.array(run["final"])
    plot_band(ax, np.array(run["steps"]), np.array(run["returns"]), name, colors[name])
    print(f"{name:>15}: mean {final.mean():.1f}, seeds from {final.min():.1f} to {final.max():.1f}")
gains = np.subtract(*(np.array(run["final"]) for run in ten["runs"].values()))
print(f"the shifts gain {gains.mean():.1f} on average, on each seed at least {gains.min():.2f}")
gap = np.subtract(*(np.mean(run["returns"], axis=0) for run in ten["runs"].values()))
halfway = run["steps"].index(4_000)
print(f"the mean gap is {gap[halfway]:.1f} at 4,000 steps and {gap[-1]:.1f} at {run['steps'][-1]:,}")
ax.axhline(47.5, color=COLORS["random"], ls="--", lw=1, label="straight to the goal")
label_curves(ax, "PointReach, ten seeds")
ax.legend(loc="lower right")
plt.show()
assert min(ten["runs"]["with shifts"]["final"]) > 35 and gains.min() > 10

# %% [markdown]
# Every seed with shifts ends above the best one without. The gap is one of data: in 4,000 steps the
# agent has seen some 80 goals, and more pictures do some of the work of moved ones, so more data
# should narrow it: the last line says what it has come to at 4,000 and at 6,000. Exercise 2 goes on.
#
# ## What each part buys
#
# The shifts are one part of ten. Here each is taken away alone, PointReach again, five seeds, the whole
# in sky blue and the rest in black, mean and 95 % interval: *1-step returns* instead of 3-step ones,
# *noise that stays* at 1 instead of falling to 0.1, a target network that copies the critics after every
# update, saturated actions that cost nothing, noise in updates that is not clipped, *no noise* at all
# after the random warm-up, an actor that moves at each update and not at every second one, a single
# critic, and an encoder that learns from the actor's loss as well.

# %% tags=["hide-input"]
parts = load_result("results/drqv2_parts.json")
draw_parts(plt.figure(), parts, columns=5)
plt.show()
print(made_by(parts))

# %% [markdown]
# **The shifts** buy almost all there is to buy: without them the seeds end at 15 to 29, with them at 39
# to 42. **The price of saturation** and **the target network** seem to buy speed: at 3,000 steps the
# whole is at 36 on average, without them at 19 and 29, and in each case one seed makes much of the
# difference (without the price it sits in a corner at −24). At the end little or nothing of it is left.
# **3-step returns** seem to cost: 1-step returns end 1.6 higher, with intervals that just overlap (41.2
# to 42.9 against 39.7 to 41.5). Here every step pays and the goal is close, so there is nothing far away
# for a longer return to fetch; the paper's tasks are not like that.
#
# **The other six buy nothing here that five seeds could show**: noise that falls, that is clipped in
# updates or that is there at all (five hundred random steps seem to be exploration enough), an actor that
# waits, a second critic, and an encoder that listens to the critics alone. All end between 39.8 and 40.5
# on average, where the whole ends at 40.7.
#
# ## What a shift does to Q
#
# Now the question from the beginning. Take 40 situations, and move each picture to all 81 places.
# Nothing that matters changes, so the value should not either. How much does it, compared with how
# much it changes between situations?


# %%
def opinions_of_shifts(agent: DrQv2, images: np.ndarray) -> np.ndarray:
    """Return the mean of both opinions (images, 81) for all shifts of each image, standing still."""
    moved = shift_images(images.repeat(81, axis=0), np.tile(every_shift, len(images)), pad=4)
    return agent.q_values(moved, np.zeros((len(moved), 2))).mean(axis=1).reshape(-1, 81)


untrained = DrQv2(config=make_config(DrQv2Config, settings))
critics = {"untrained": untrained} | {name: run[0] for name, run in runs.items()}
values = {name: opinions_of_shifts(agent, pictures[:40]) for name, agent in critics.items()}
spread = {name: q.std(axis=1).mean() / q.mean(axis=1).std() for name, q in values.items()}
for name, ratio in spread.items():
    print(f"{name:>15}: a shift moves Q by {ratio:.2f} of what another situation does")
assert spread["with shifts"] < 0.6 * spread["without shifts"]
assert spread["with shifts"] < 0.6 * spread["untrained"]

# %% tags=["hide-input"]
figure, axes = plt.subplots(1, 4, figsize=(9, 2.5))
axes[0].imshow(pictures[2].transpose(1, 2, 0))
axes[0].set(title="the situation", xticks=[], yticks=[])
axes[0].grid(False)
for ax, (name, q) in zip(axes[1:], values.items(), strict=True):
    between = q.mean(axis=1).std()
    shown = (q[2] - q[2].mean()).reshape(9, 9) / between
    image = ax.imshow(shown, cmap="RdBu", vmin=-1, vmax=1, extent=(-4.5, 4.5, 4.5, -4.5))
    ax.set(title=name, xticks=(-4, 0, 4), yticks=(-4, 0, 4), xlabel="shift [pixels]")
    ax.grid(False)
figure.colorbar(image, ax=axes[1:], label="change of Q, relative", shrink=0.8)
plt.show()

# %% [markdown]
# Each square is one critic's value of the same situation at all 81 places, minus their mean, in
# units of the spread between situations. A critic that sees the situation would be white all over.
#
# ## Features over the course of training
#
# Where is the goal, as seen from the agent? Nobody tells the encoder, but the values depend on it.
# So fit a linear map from the features of 200 situations to the way to the goal, at each stage, and
# see how much it explains of 200 others:


# %%
def explained(features: np.ndarray, truth: np.ndarray) -> float:
    """Return how much of `truth` a linear map of features explains in the second half, 1 for all."""
    inputs = np.column_stack([features, np.ones(len(features))])
    half = len(truth) // 2
    weights = np.linalg.lstsq(inputs[:half], truth[:half], rcond=None)[0]
    errors = truth[half:] - inputs[half:] @ weights
    return float(1 - errors.var() / truth[half:].var())


known = {name: [explained(f, ways) for f in features] for name, (_, _, features) in runs.items()}
for name, curve in known.items():
    print(f"{name:>15}:", *(f"{value:.2f}" for value in curve))
assert known["with shifts"][-1] > known["without shifts"][-1]
assert known["with shifts"][-1] > known["with shifts"][0] + 0.1

# %% tags=["hide-input"]
figure, axes = plt.subplots(1, 4, figsize=(9, 2.6), width_ratios=(1.5, 1, 1, 1))
for name, curve in known.items():
    axes[0].plot([0, *steps], curve, color=colors[name], label=name)
label_curves(axes[0], "what features know", "explained variance of the way")
axes[0].legend(loc="lower right", fontsize=8)
distance = np.linalg.norm(ways, axis=1)
for ax, stage in zip(axes[1:], (0, 2, 8), strict=True):
    features = runs["with shifts"][2][stage] - runs["with shifts"][2][stage].mean(axis=0)
    directions = np.linalg.svd(features, full_matrices=False)[2][:2]
    dots = ax.scatter(*(features @ directions.T).T, c=distance, cmap="viridis_r", s=6)
    ax.set(title=f"{500 * stage:,} steps", xticks=[], yticks=[])
    ax.set_xlabel("first two components")
figure.colorbar(dots, ax=axes[3], label="distance to the goal")
plt.show()

# %% [markdown]
# The dots are the features of the agent with shifts, seen along the two directions in which they
# vary most, coloured by the distance to the goal. At first the colours are mixed: the features tell
# where the discs are, and little about how they stand to each other. In the end near and far are
# far apart.
#
# ## Watch it
#
# The agent with shifts at the beginning of an episode that it has not seen, and below it the one
# without:


# %%
def beginning(agent: DrQv2, seed: int) -> list[np.ndarray]:
    """Play the first 16 steps of a greedy episode; return every second picture for people."""
    env = make_env("rlbook/PointReach-v0", render_mode="rgb_array")
    obs, _ = env.reset(seed=seed)
    frames = []
    for step in range(16):
        if step % 2 == 0:
            frames.append(env.render())
        obs, *_ = env.step(agent.predict(obs)[0])
    return frames


filmstrip([frame for name in runs for frame in beginning(runs[name][0], seed=5)])

# %% [markdown]
# ## What the shifts buy in Pendulum
#
# The figure at the top of the chapter is the stored result: Pendulum-v1 seen as three pictures of
# 40 × 40 pixels, the middle 250 of 500 cut out, each action taken twice, 4,000 decisions, which are
# 8,000 steps of the pendulum. (Gymnasium's renderer draws the last torque into the picture;
# [pixels](pixels.ipynb) shows it.) For comparison, the score of an agent that does nothing:

# %%
swing, idle = make_env("Pendulum-v1"), np.zeros(20)
for i in range(20):
    swing.reset(seed=i)
    idle[i] = sum(float(swing.step(np.zeros(1, np.float32))[1]) for _ in range(200))
print(f"{'nothing':>15}: mean {idle.mean():6.0f}")
for name, run in promise["runs"].items():
    final = np.array(run["final"])
    print(f"{name:>15}: mean {final.mean():6.0f}, worst {final.min():6.0f}, "
          f"{(final >= -250).sum()} of {len(final)} seeds at -250 or better")
with_shifts, without_shifts = (np.mean(run["final"]) for run in promise["runs"].values())
assert with_shifts > without_shifts + 200 and with_shifts > -250

# %% [markdown]
# ## Honest edges
#
# | Yarats et al. 2021, and their code | here | why |
# |---|---|---|
# | 84 × 84, three frames, 24 tasks of the DeepMind Control Suite | 24 × 24 and 40 × 40, two small tasks | a laptop without a GPU |
# | four convolutions of 32 channels, 3 × 3, strides 2, 1, 1, 1 | three of 16, 32, 32, strides 2, 2, 1; or that of DQN | a fraction of the work |
# | hidden layers of 1,024, batches of 256 (512 for Walker) | 128 or 256, batches of 64 | the same |
# | learning rate $10^{-4}$ ($8 \cdot 10^{-5}$ for Humanoid) | $10^{-3}$ and $5 \cdot 10^{-4}$ | thousands of steps in place of millions |
# | noise 1 → 0.1 in 100,000, 500,000 or 2,000,000 steps | in 2,000 or 5,000 (Pendulum's run of 4,000 ends at 0.28) | the same |
# | actor and critic updated every second step | critic every second step or every step, actor half as often (`policy_delay`) | cheaper, and the critic leads |
# | the critic is updated before the actor asks it | one backward pass for both | cheaper |
# | no price on saturated actions | $\lambda = 0.01$ | with a large learning rate a seed may sit in a corner for thousands of steps |
# | shifts by `grid_sample`, on floats | by windows, on bytes | the same pixels, faster on a CPU |
# | orthogonal weights everywhere | in the convolutions | the heads are those of earlier chapters |
# | buffer of 1,000,000 transitions | all that the run sees | |
# | pad 4 of 84 pixels | 4 of 24, and 2 of 40 | found by trial |
#
# - The same as in the paper: twin critics, $n = 3$ (there 1 for Walker), $\tau = 0.01$, 50 features
#   (100 for Humanoid), noise clipped at 0.3 in updates, an encoder without a slow copy that learns
#   from the critic alone.
# - The paper's numbers are for millions of frames of other tasks; nothing here claims to reproduce
#   them.
# - PointReach is ours, and not drawn blindly: its grey background, its colours and the sizes of its
#   discs, and the price on saturated actions too, were chosen while looking at how the seeds 0 and
#   1 learned. The live run above is seed 0, so it shows how the algorithm works and is no evidence
#   of how well it does on a task that it was not fitted to.
# - Shifts help because the task does not change when the picture moves. Where the place in the
#   picture is itself what matters, they could hurt.
# - A checkpoint holds the replay buffer. With `checkpoint_replay: false` it does not; the run can
#   go on, but with an empty buffer, and then not exactly as if it had not been stopped. It warns
#   you.
#
# ## Exercises
#
# **Exercise 1.** Shift the observation and the next observation by the *same* shift. What do you
# expect?
#
# <details>
# <summary>Solution</summary>
#
# Draw `batch_size` shifts and use them twice in `sample`:
#
# ```python
# shifts = np.tile(generator.integers(9, size=(2, 3)), 2)  # of three pairs
# pairs = shift_images(np.concatenate([batch[:3], batch[:3]]), shifts, pad=4)
# assert np.array_equal(pairs[:3], pairs[3:])
# ```
#
# The target then has the same shift as the prediction, so a critic that depends on the place in the
# picture is not contradicted by its own targets. It still sees more pictures than without shifts.
# With independent shifts the critic is pulled, at every shift, to the mean of the target over all
# of them.
#
# </details>

# %% [markdown]
# **Exercise 2.** Give both agents of the live run 12,000 steps in place of 4,000. What happens to
# the gap?
#
# <details>
# <summary>Solution</summary>
#
# ```python
# for pad in (4, 0):
#     longer = settings | {"pad": pad, "buffer_size": 12_000, "eval_every": 0}
#     agent = DrQv2(config=make_config(DrQv2Config, longer))
#     agent.learn(12_000)
#     print("pad", pad, "return", agent.evaluate(20).mean)
# ```
#
# The stored runs above end at 6,000 steps, with a smaller gap than at 4,000. More goals and starts do
# some of the work of moved pictures, so expect less: the augmentation buys data, and what it is worth
# depends on how much you have. One seed of each is a hint, no proof.
#
# </details>

# %% [markdown]
# **Exercise 3.** Flipping an image left to right is an augmentation, too. Would it help here in the
# same way?
#
# <details>
# <summary>Solution</summary>
#
# No. After a flip the best action is another one: left and right change places, so the stored
# action must be flipped with the picture. In PointReach that works, by changing the sign of its
# first entry. In Pendulum the torque changes its sign. A shift is special in that neither action
# nor reward have to know about it.
#
# ```python
# room = PointReach()
# image, _ = room.reset(seed=1)
# room.position, room.goal = room.position * [-1, 1], room.goal * [-1, 1]  # left is right
# assert np.abs(room.observe().astype(int) - image[:, :, ::-1]).max() <= 1
# ```
#
# </details>

# %% [markdown]
# **Exercise 4.** Why is the noise clipped in updates, but not when the agent acts?
#
# <details>
# <summary>Solution</summary>
#
# Acting with much noise finds out new things. An update asks what the policy is worth: with noise
# of 1 the next action would be anywhere, and the target would be the value of a random policy.
# Small noise in the target is useful: a sharp peak of the critic, which is mostly an error, is
# averaged with its surroundings (Fujimoto et al. 2018).
#
# ```python
# noise = torch.from_numpy(np.random.default_rng(0).normal(size=10_000))
# bold, careful = (noisy_action(torch.zeros(10_000), noise, clip) for clip in (None, 0.3))
# assert bold.abs().max() == 1 and careful.abs().max() <= 0.3
# ```
#
# </details>

# %% [markdown]
# **Exercise 5, a planted bug.** This function moves images by random shifts, and its shapes are
# right. Yet it is not what the algorithm asks for. Why? Compare the images of a batch.


# %%
def random_shift_with_a_bug(images, pad, generator):
    """As `random_shift`, with a bug."""
    dy, dx = generator.integers(2 * pad + 1, size=2)
    return shift_images(images, np.full((2, len(images)), [[dy], [dx]]), pad)


several = np.repeat(seen[None], 6, axis=0)
for function in (random_shift_with_a_bug, random_shift):
    shifted = function(several, 4, np.random.default_rng(1))
    different = len({image.tobytes() for image in shifted})
    print(f"{function.__name__}: {different} different images of 6")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# It draws one shift for the whole batch, as the printed numbers show. Each image is still moved
# anew whenever it is drawn, so something is gained. But observation and next observation always
# move together, and the gradient of a batch points where its one shift wants it, so the steps are
# noisier. `random_shift` draws a shift for each image.
#
# ```python
# def random_shift_with_a_bug(images, pad, generator):
#     """As `random_shift`, without the bug."""
#     shifts = generator.integers(2 * pad + 1, size=(2, len(images)))
#     return shift_images(images, shifts, pad)
#
#
# mended = random_shift_with_a_bug(several, 4, np.random.default_rng(1))
# assert len({image.tobytes() for image in mended}) > 1
# ```
#
# </details>

# %%
one = random_shift_with_a_bug(several, 4, np.random.default_rng(1))
assert len({image.tobytes() for image in one}) == 1
assert len({image.tobytes() for image in random_shift(several, 4, np.random.default_rng(1))}) > 1

# %% [markdown]
# ## Using it
#
# ```python
# from rlbook.drqv2 import DrQv2
#
# agent = DrQv2("rlbook/PointReach-v0", hidden=(128, 128), gamma=0.9, seed=1)
# agent.learn(6_000)
# agent.evaluate(episodes=20).mean
# ```
#
# ```
# rlbook train drqv2 --config point_reach --run-dir runs/a
# rlbook predict runs/a --observation image.npy
# rlbook watch runs/a --out agent.gif
# ```
#
# ## References
#
# - D. Yarats, R. Fergus, A. Lazaric, L. Pinto (2021). *Mastering Visual Continuous Control:
#   Improved Data-Augmented Reinforcement Learning*. arXiv:2107.09645. Their code:
#   github.com/facebookresearch/drqv2.
# - I. Kostrikov, D. Yarats, R. Fergus (2021). *Image Augmentation Is All You Need: Regularizing
#   Deep Reinforcement Learning from Pixels*. ICLR.
# - T. Lillicrap et al. (2016). *Continuous control with deep reinforcement learning*. ICLR.
# - S. Fujimoto, H. van Hoof, D. Meger (2018). *Addressing Function Approximation Error in
#   Actor-Critic Methods*. ICML.
# - V. Mnih et al. (2015). *Human-level control through deep reinforcement learning*. Nature 518.
