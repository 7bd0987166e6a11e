"""Made from book/drqv2.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "ENCODERS",
    "Actor",
    "Critic",
    "DrQv2",
    "DrQv2Config",
    "DrQv2Model",
    "Encoder",
    "Layers",
    "PixelActorCritic",
    "PixelLearner",
    "Trunk",
    "actor_loss",
    "check_images",
    "drqv2_loss",
    "drqv2_target",
    "find_frame_stack",
    "improvement_loss",
    "make_replay",
    "next_values",
    "noise_std",
    "noisy_action",
    "pad_edges",
    "random_shift",
    "shift_images",
    "shifted_batch",
    "smallest_image",
    "train_drqv2",
]

# %% book/drqv2.py · DrQ-v2: control from pixels
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


# %% book/drqv2.py · Shifting an image
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


# %% book/drqv2.py · The model
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


class Trunk(nn.Sequential):
    """A few features in (-1, 1) of what the encoder sees."""

    def __init__(self, inputs: int, features: int) -> None:
        super().__init__(nn.Linear(inputs, features), nn.LayerNorm(features), nn.Tanh())


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


# %% book/drqv2.py · Noise
def noise_std(step: int, start: float, end: float, steps: int) -> float:
    """Go linearly from `start` to `end` in `steps`, then stay there."""
    return start + (end - start) * min(1.0, step / steps)


def noisy_action(action: Tensor, noise: Tensor, clip: float | None = None) -> Tensor:
    """Add noise, itself clipped if asked, and keep the sum in [-1, 1], but its gradient whole."""
    noise = noise if clip is None else noise.clamp(-clip, clip)
    value = (action.detach() + noise).clamp(-1, 1)
    return value + (action - action.detach())  # the second term is 0, and has the gradient


# %% book/drqv2.py · The loss
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


def actor_loss(q: Tensor, unbounded: Tensor, penalty: float) -> Tensor:
    """Return minus the smaller opinion (batch, 2) of actions, plus a price for their saturation."""
    return -q.amin(dim=1).mean() + penalty * unbounded.square().mean()


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


# %% book/drqv2.py · Settings
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


# %% book/drqv2.py · The agent
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


def train_drqv2(config: DrQv2Config, progress: bool = True) -> RunResult:
    """Train DrQ-v2 with these settings."""
    return train(DrQv2(config=config), progress)
