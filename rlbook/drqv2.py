"""Made from book/drqv2.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "ENCODERS",
    "DrQv2",
    "DrQv2Config",
    "Encoder",
    "Layers",
    "PixelActor",
    "PixelCritic",
    "Trunk",
    "check_image_size",
    "check_images",
    "drqv2_actor_loss",
    "drqv2_critic_loss",
    "noise_std",
    "noisy_action",
    "random_shift",
    "shift_images",
    "smallest_image",
    "train_drqv2",
]

# %% book/drqv2.py · DrQ-v2: control from pixels
import copy
import dataclasses
from typing import Annotated, Any, ClassVar, Literal

import gymnasium as gym
import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from rlbook.agent import Agent, Metrics, Transition, UpdateResult
from rlbook.callbacks import Callbacks
from rlbook.dqn import MLP, check_shapes, polyak_update
from rlbook.envs import derive_seed
from rlbook.pixels import FrameReplay
from rlbook.replay import Batch, ReplayConfig, to_batch
from rlbook.run import RunResult, train
from rlbook.sac import ActionScale, check_bounds, critic_loss
from rlbook.settings import Config


# %% book/drqv2.py · Random shifts
def shift_images(images: Tensor, shifts: Tensor, pad: int) -> Tensor:
    """Shift images (batch, channels, height, width), each by its own `shifts` (2, batch) - pad."""
    channels, height, width = images.shape[1:]
    y = torch.arange(height, device=images.device) + shifts[0].unsqueeze(1) - pad
    x = torch.arange(width, device=images.device) + shifts[1].unsqueeze(1) - pad
    rows, columns = y.clamp(0, height - 1), x.clamp(0, width - 1)  # (batch, height), (batch, width)
    pixels = (rows.unsqueeze(2) * width + columns.unsqueeze(1)).flatten(1)  # (batch, pixels)
    index = pixels.unsqueeze(1).expand(-1, channels, -1)
    return images.flatten(2).gather(2, index).view_as(images)


def random_shift(images: Tensor, pad: int, generator: np.random.Generator) -> Tensor:
    """Shift each image by up to `pad` pixels in both directions, each by its own amount."""
    shifts = generator.integers(2 * pad + 1, size=(2, len(images)))
    return shift_images(images, torch.from_numpy(shifts).to(images.device), pad)


# %% book/drqv2.py · The model
Layers = tuple[tuple[int, int, int], ...]  # output channels, side of the kernel, stride

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
    """Convolutions from images of bytes (batch, channels, height, width) to (batch, outputs)."""

    def __init__(self, channels: int, layers: Layers) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList()
        for outputs, kernel, stride in layers:
            convolution = nn.Conv2d(channels, outputs, kernel, stride)
            nn.init.orthogonal_(convolution.weight, nn.init.calculate_gain("relu"))
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
            self.convolutions.append(convolution)
            channels = outputs

    def forward(self, images: Tensor) -> Tensor:
        """Scale bytes to [-0.5, 0.5] and convolve."""
        x = images / 255 - 0.5
        for convolution in self.convolutions:
            x = convolution(x).relu()
        return x.flatten(1)


class Trunk(nn.Sequential):
    """A few features in (-1, 1) of an encoding."""

    def __init__(self, inputs: int, features: int) -> None:
        super().__init__(nn.Linear(inputs, features), nn.LayerNorm(features), nn.Tanh())


class PixelActor(nn.Module):
    """From an encoding to an action, before tanh bounds it."""

    def __init__(self, inputs: int, features: int, hidden: tuple[int, ...], actions: int) -> None:
        super().__init__()
        self.trunk, self.policy = Trunk(inputs, features), MLP((features, *hidden, actions))

    def forward(self, encoded: Tensor) -> Tensor:
        """Return unbounded actions (batch, actions)."""
        return self.policy(self.trunk(encoded))


class PixelCritic(nn.Module):
    """From an encoding and an action to the values of several Q-networks."""

    def __init__(
        self,
        inputs: int,
        features: int,
        hidden: tuple[int, ...],
        actions: int,
        num_critics: int = 2,
    ) -> None:
        super().__init__()
        self.trunk = Trunk(inputs, features)
        sizes = (features + actions, *hidden, 1)
        self.q_networks = nn.ModuleList(MLP(sizes) for _ in range(num_critics))

    def forward(self, encoded: Tensor, action: Tensor) -> Tensor:
        """Return values (batch, critics) of actions (batch, actions)."""
        x = torch.cat([self.trunk(encoded), action], dim=1)
        return torch.cat([q_network(x) for q_network in self.q_networks], dim=1)


# %% book/drqv2.py · Noise
def noise_std(step: int, start: float, end: float, steps: int) -> float:
    """Go linearly from `start` to `end` in `steps`, then stay there."""
    return start + (end - start) * min(1.0, step / steps)


def noisy_action(action: Tensor, noise: Tensor, clip: float | None = None) -> Tensor:
    """Add noise, clipped if asked, and clamp the sum to [-1, 1] without losing its gradient."""
    noise = noise if clip is None else noise.clamp(-clip, clip)
    clamped = (action.detach() + noise).clamp(-1, 1)
    return clamped + (action - action.detach())  # the second term is 0, and has the gradient


# %% book/drqv2.py · The critic loss
def drqv2_critic_loss(
    q: Tensor,  # (batch, critics), with gradient
    reward: Tensor,  # (batch,), of n steps
    discount: Tensor,  # (batch,), gamma ** n
    terminated: Tensor,  # (batch,)
    next_q: Tensor,  # (batch, critics), of the target critic
) -> tuple[Tensor, Metrics]:
    """Return the mean squared TD error, summed over the critics, and named metrics."""
    check_shapes(len(q), reward=reward, discount=discount, terminated=terminated)
    if q.ndim != 2 or next_q.shape != q.shape:
        raise ValueError(
            f"q and next_q must be (batch, critics), not {tuple(q.shape)} and "
            f"{tuple(next_q.shape)}."
        )
    with torch.no_grad():
        target = reward + discount * ~terminated * next_q.amin(dim=1)  # (batch,)
    return critic_loss(q, target)


# %% book/drqv2.py · The actor loss
def drqv2_actor_loss(
    q: Tensor,  # (batch, critics), with gradient
    unbounded: Tensor,  # (batch, actions), with gradient
    saturation_penalty: float,
) -> tuple[Tensor, Metrics]:
    """Return minus the mean smallest value, plus a penalty on saturated actions, and metrics."""
    if q.ndim != 2 or unbounded.ndim != 2 or len(q) != len(unbounded):
        raise ValueError(
            f"q must be (batch, critics) and unbounded (batch, actions), not {tuple(q.shape)} and "
            f"{tuple(unbounded.shape)}."
        )
    loss = -q.amin(dim=1).mean() + saturation_penalty * unbounded.square().mean()
    return loss, {"actor_loss": loss.detach()}


# %% book/drqv2.py · Settings
class DrQv2Config(ReplayConfig):
    """The settings of DrQ-v2."""

    env_id: str = Field(
        default="rlbook/PointReach-v0",
        description="Gymnasium id, `module:Name-v0`, or `module:function` that makes one.",
    )
    encoder: Literal["small", "nature"] = Field(
        default="small", description="Convolutions: small, or those of Mnih et al. 2015."
    )
    features: int = Field(default=50, ge=1, description="Features of actor and of critic.")
    num_critics: int = Field(
        default=2, ge=1, description="Critics; the smallest of their values counts."
    )
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(256, 256), description="Units of each hidden layer."
    )
    pad: int = Field(default=4, ge=0, description="Pixels of the largest random shift; 0 for none.")
    lr: float = Field(default=1e-3, gt=0, description="Learning rate of Adam.")
    buffer_size: int = Field(
        default=20_000, ge=1, description="Transitions that the replay buffer holds."
    )
    learning_starts: int = Field(
        default=500, ge=0, description="Steps with random actions, before the first update."
    )
    train_frequency: int = Field(default=2, ge=1, description="Environment steps between updates.")
    policy_delay: int = Field(
        default=2, ge=1, description="Updates of the critic per update of the actor."
    )
    n_step: int = Field(default=3, ge=1, description="Rewards summed before the target bootstraps.")
    reward_scale: float = Field(default=1.0, gt=0, description="Factor of the rewards in learning.")
    tau: float = Field(
        default=0.01, gt=0, le=1, description="Fraction that the target moves per update."
    )
    saturation_penalty: float = Field(
        default=0.01, ge=0, description="Penalty on actions far out on the tanh."
    )
    actor_trains_encoder: bool = Field(
        default=False, description="Whether the actor loss trains the encoder, too."
    )
    noise_start: float = Field(
        default=1.0, ge=0, description="Standard deviation of the noise at first."
    )
    noise_end: float = Field(
        default=0.1, ge=0, description="Standard deviation of the noise at the end."
    )
    noise_steps: int = Field(
        default=2_000, ge=1, description="Environment steps from the first to the last noise."
    )
    noise_clip: float = Field(default=0.3, ge=0, description="Largest noise in updates.")


# %% book/drqv2.py · What the environment must offer
def check_images(env_id: str, space: gym.Space) -> None:
    """Raise unless observations are images of bytes."""
    if space.dtype != np.uint8:
        raise ValueError(
            f"{env_id!r} has images of {space.dtype}, but drqv2 needs bytes (uint8) from 0 to 255: "
            "convert them with gymnasium.wrappers.TransformObservation."
        )


def check_image_size(env_id: str, space: gym.Space, encoder: str) -> None:
    """Raise unless images are large enough for all convolutions of an encoder."""
    height, width = (space.shape or ())[1:]
    smallest = smallest_image(ENCODERS[encoder])
    if min(height, width) < smallest:
        raise ValueError(
            f"{env_id!r} has images of {height} x {width} pixels, but the smallest that the "
            f"encoder {encoder!r} can take is {smallest} x {smallest}."
        )


# %% book/drqv2.py · The whole algorithm at a glance
class DrQv2(Agent):
    """A deterministic actor and several critics that learn from randomly shifted images."""

    name: ClassVar[str] = "drqv2"
    config_class: ClassVar[type[Config]] = DrQv2Config
    observations: ClassVar[str] = "image"
    actions: ClassVar[str] = "continuous"
    parts: ClassVar[tuple[str, ...]] = (
        *("encoder", "actor", "critic", "target_critic"),
        *("critic_optimizer", "actor_optimizer", "replay"),
    )
    compiled: ClassVar[tuple[str, ...]] = ("critic_gradients", "actor_gradients")
    config: DrQv2Config
    action_space: gym.spaces.Box

    def build(self) -> None:
        """Make networks, optimisers and buffer."""
        config, images, actions = self.config, self.observation_space, self.action_space
        check_bounds(config.env_id, actions)
        check_images(config.env_id, images)
        self.scale = ActionScale(actions)
        self.encoder = self.make_encoder().to(self.device)
        blank = torch.zeros(1, *(images.shape or ()), dtype=torch.uint8, device=self.device)
        with torch.no_grad():
            inputs = self.encoder(blank).shape[1]
        self.actor = self.make_actor(inputs).to(self.device)
        self.critic = self.make_critic(inputs).to(self.device)
        self.target_critic = copy.deepcopy(self.critic).requires_grad_(False)
        encoder = list(self.encoder.parameters())
        trained = [*encoder, *self.critic.parameters()]
        self.critic_optimizer = torch.optim.Adam(trained, lr=config.lr, fused=True)
        trained = [*self.actor.parameters(), *(encoder if config.actor_trains_encoder else [])]
        self.actor_optimizer = torch.optim.Adam(trained, lr=config.lr, fused=True)
        self.replay = FrameReplay(
            config.buffer_size,
            images,
            gym.spaces.Box(-1, 1, actions.shape),
            frame_stack=self.interface.frame_stack,
            n_step=config.n_step,
            gamma=config.gamma,
            num_envs=config.num_envs,
            seed=derive_seed(config.seed, "replay"),
        )

    def make_encoder(self) -> nn.Module:
        """Make the network from images of bytes to encodings (batch, inputs)."""
        name, images = self.config.encoder, self.observation_space
        check_image_size(self.config.env_id, images, name)
        return Encoder((images.shape or ())[0], ENCODERS[name])

    def make_actor(self, inputs: int) -> nn.Module:
        """Make the network from encodings to unbounded actions (batch, actions)."""
        config, actions = self.config, self.action_space.shape[0]
        return PixelActor(inputs, config.features, config.hidden, actions)

    def make_critic(self, inputs: int) -> nn.Module:
        """Make the network from encodings and actions to values (batch, critics)."""
        config, actions = self.config, self.action_space.shape[0]
        return PixelCritic(inputs, config.features, config.hidden, actions, config.num_critics)

    def sample_noise(self, count: int) -> Tensor:
        """Sample noise (count, actions) with the standard deviation of this step."""
        config, shape = self.config, (count, *self.action_space.shape)
        std = noise_std(self.global_step, config.noise_start, config.noise_end, config.noise_steps)
        noise = std * self.generator.standard_normal(shape, dtype=np.float32)
        return torch.from_numpy(noise).to(self.device)

    @torch.no_grad()
    def act(
        self, obs: np.ndarray, state: Any, episode_start: np.ndarray, explore: bool
    ) -> tuple[np.ndarray, Any]:
        """Take the actor's action, with noise to explore, and at first a random one."""
        if explore and self.global_step < self.config.learning_starts:
            action = self.generator.uniform(-1, 1, (len(obs), *self.action_space.shape))
            return self.scale.to_env(action), state
        chosen = self.actor(self.encoder(torch.as_tensor(obs, device=self.device))).tanh()
        if explore:
            chosen = noisy_action(chosen, self.sample_noise(len(obs)))
        return self.scale.to_env(chosen.cpu().numpy()), state

    def observe(self, transition: Transition) -> None:
        """Store one step of all environments, with actions scaled to (-1, 1)."""
        action = self.scale.from_env(transition.action)
        reward = self.config.reward_scale * transition.reward
        self.replay.add(dataclasses.replace(transition, action=action, reward=reward))

    def sample(self) -> Batch:
        """Sample a batch of n-step transitions."""
        return to_batch(self.replay.sample(self.config.batch_size), self.device)

    def critic_gradients(self, batch: Batch, noise: Tensor) -> Metrics:
        """Backpropagate the critic loss of shifted images, into the encoder as well."""
        with torch.no_grad():
            next_encoded = self.encoder(batch.next_obs)
            next_action = self.actor(next_encoded).tanh()
            next_action = noisy_action(next_action, noise, self.config.noise_clip)
            next_q = self.target_critic(next_encoded, next_action)
        q = self.critic(self.encoder(batch.obs), batch.action)
        loss, metrics = drqv2_critic_loss(q, batch.reward, batch.discount, batch.terminated, next_q)
        loss.backward()
        return metrics

    def actor_gradients(self, obs: Tensor, noise: Tensor) -> Metrics:
        """Backpropagate the actor loss of shifted images, into the encoder only if asked."""
        encoded = self.encoder(obs)
        if not self.config.actor_trains_encoder:
            encoded = encoded.detach()
        unbounded = self.actor(encoded)
        action = noisy_action(unbounded.tanh(), noise, self.config.noise_clip)
        q = self.critic(encoded, action)
        loss, metrics = drqv2_actor_loss(q, unbounded, self.config.saturation_penalty)
        loss.backward()
        return metrics

    def update(self, batch: Batch) -> UpdateResult:
        """Make one gradient step of encoder and critic and, when it is due, one of the actor."""
        obs = random_shift(batch.obs, self.config.pad, self.generator)
        next_obs = random_shift(batch.next_obs, self.config.pad, self.generator)
        batch = dataclasses.replace(batch, obs=obs, next_obs=next_obs)
        self.critic_optimizer.zero_grad()
        metrics = self.critic_gradients(batch, self.sample_noise(len(obs)))
        self.critic_optimizer.step()
        if (self.updates + 1) % self.config.policy_delay == 0:
            self.actor_optimizer.zero_grad()
            metrics |= self.actor_gradients(obs, self.sample_noise(len(obs)))
            self.actor_optimizer.step()
        polyak_update(self.target_critic, self.critic, self.config.tau)
        return UpdateResult(metrics)

    @torch.no_grad()
    def q_values(self, obs: np.ndarray, action: np.ndarray | None = None) -> np.ndarray:
        """Return the critics' values (batch, critics) of actions, by default of the actor's own."""
        encoded = self.encoder(torch.as_tensor(obs, device=self.device))
        if action is None:
            scaled = self.actor(encoded).tanh()
        else:
            numbers = self.scale.from_env(action)
            scaled = torch.as_tensor(numbers, dtype=torch.float32, device=self.device)
        return self.critic(encoded, scaled).cpu().numpy()


def train_drqv2(config: DrQv2Config, progress: bool = True, callbacks: Callbacks = ()) -> RunResult:
    """Train DrQ-v2 with these settings."""
    return train(DrQv2(config=config), progress, callbacks)
