"""Made from book/sac.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "LOG_STD",
    "SAC",
    "ActionScale",
    "Actor",
    "Critics",
    "SACConfig",
    "Temperature",
    "actor_loss",
    "alpha_loss",
    "check_bounds",
    "critic_loss",
    "log_det_tanh",
    "sac_target",
    "squashed_sample",
    "train_sac",
]

# %% book/sac.py · SAC: continuous actions
import copy
import math
from itertools import pairwise
from typing import Annotated, Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Adam

from rlbook.agent import Agent, Metrics, Transition, UpdateResult
from rlbook.callbacks import Callbacks
from rlbook.dqn import MLP, check_shapes, polyak_update
from rlbook.envs import derive_seed
from rlbook.replay import (
    Batch,
    ReplayBuffer,
    ReplayConfig,
    make_transitions,
    to_batch,
    transition_dtype,
)
from rlbook.run import RunResult, train
from rlbook.settings import Config


# %% book/sac.py · The actor: a squashed Gaussian
def log_det_tanh(u: Tensor) -> Tensor:
    """Return log(1 - tanh(u)^2), also where tanh(u) rounds to 1."""
    return 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))


def squashed_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Turn standard normal noise into actions in (-1, 1) and their log-probabilities (batch,)."""
    u = mean + log_std.exp() * noise  # (batch, action dimensions)
    log_gaussian = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    return u.tanh(), (log_gaussian - log_det_tanh(u)).sum(dim=1)


LOG_STD = -20.0, 2.0  # the limits of the log standard deviation


class Actor(nn.Module):
    """From observations to the mean and log standard deviation of a Gaussian over actions."""

    def __init__(self, inputs: int, actions: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.mlp = MLP((inputs, *hidden, 2 * actions))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation, each (batch, action dimensions)."""
        mean, log_std = self.mlp(obs.float()).chunk(2, dim=1)
        return mean, log_std.clamp(*LOG_STD)


# %% book/sac.py · The critics
class Critics(nn.Module):
    """An ensemble of Q-functions of an observation and an action, computed together."""

    def __init__(
        self, inputs: int, actions: int, hidden: tuple[int, ...], num_critics: int
    ) -> None:
        super().__init__()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for n, outputs in pairwise((inputs + actions, *hidden, 1)):
            bound = 1 / math.sqrt(n)  # as in nn.Linear
            # a ParameterList turns the tensors that it is given into parameters
            self.weights.append(torch.empty(num_critics, n, outputs).uniform_(-bound, bound))
            self.biases.append(torch.empty(num_critics, 1, outputs).uniform_(-bound, bound))

    def forward(self, obs: Tensor, action: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Return the values (batch, critics) of all critics, or of the chosen ones alone."""
        x = torch.cat([obs.float(), action], dim=1).unsqueeze(0)  # (1, batch, inputs + actions)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if chosen is not None:
                weight, bias = weight[chosen], bias[chosen]
            # the first layer gives all critics the same input, later ones have an input for each
            x = x.relu() if i > 0 else x.expand(len(weight), -1, -1)
            x = torch.baddbmm(bias, x, weight)  # (critics, batch, outputs)
        return x.squeeze(2).t()


# %% book/sac.py · The buffer, and actions within bounds
def check_bounds(env_id: str, space: gym.spaces.Box) -> None:
    """Raise unless each action dimension has a lower and a higher bound, both finite."""
    if not space.is_bounded("both"):
        raise ValueError(
            f"{env_id!r} has actions without finite bounds on both sides ({space}): give it such "
            "bounds, for example with gymnasium.wrappers.TransformAction."
        )
    if not (space.low < space.high).all() or np.dtype(space.dtype).kind != "f":
        raise ValueError(f"{env_id!r} has actions that cannot vary between real bounds ({space}).")


class ActionScale:
    """Between the actions [-1, 1] of the policy and those of the environment."""

    def __init__(self, space: gym.spaces.Box) -> None:
        self.low, self.high, self.dtype = space.low, space.high, space.dtype
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        self.center, self.half = low / 2 + high / 2, high / 2 - low / 2

    def to_env(self, action: np.ndarray) -> np.ndarray:
        """Map [-1, 1] to the bounds, and never a rounding error beyond them."""
        scaled = (self.center + self.half * action).astype(self.dtype)
        return np.clip(scaled, self.low, self.high)

    def from_env(self, action: np.ndarray) -> np.ndarray:
        """Map the bounds to [-1, 1]."""
        return (action - self.center) / self.half


# %% book/sac.py · The critics' loss
def sac_target(
    reward: Tensor,  # (batch,)
    discount: Tensor,  # (batch,)
    terminated: Tensor,  # (batch,)
    next_q: Tensor,  # (batch, critics), of the target critics
    next_log_prob: Tensor,  # (batch,)
    alpha: Tensor | float,
) -> Tensor:
    """Return the reward plus the discounted soft value of the next state, (batch,)."""
    vectors = {"reward": reward, "discount": discount, "terminated": terminated}
    check_shapes(len(next_q), **vectors, next_log_prob=next_log_prob)
    if next_q.ndim != 2:
        raise ValueError(f"next_q must be (batch, critics), not {tuple(next_q.shape)}.")
    next_value = next_q.amin(dim=1) - alpha * next_log_prob
    return reward + discount * ~terminated * next_value


def critic_loss(q: Tensor, target: Tensor) -> tuple[Tensor, Metrics]:
    """Return the squared TD error of q (batch, critics), summed over the critics, and metrics."""
    check_shapes(len(q), target=target)
    if q.ndim != 2:
        raise ValueError(f"q must be (batch, critics), not {tuple(q.shape)}.")
    td_error = q - target.unsqueeze(1)  # (batch, critics)
    loss = td_error.square().mean(dim=0).sum()
    return loss, {
        "loss": loss.detach(),
        "q_mean": q.detach().mean(),
        "q_std": q.detach().std(dim=1, correction=0).mean(),  # how much the critics disagree
        "target_mean": target.mean(),
        "td_error_abs": td_error.detach().abs().mean(),
    }


# %% book/sac.py · The actor's loss
def actor_loss(value: Tensor, log_prob: Tensor, alpha: Tensor | float) -> tuple[Tensor, Metrics]:
    """Return the mean of alpha log pi - Q, from value and log_prob (batch,), and metrics."""
    check_shapes(len(value), value=value, log_prob=log_prob)
    loss = (alpha * log_prob - value).mean()
    return loss, {"actor_loss": loss.detach(), "entropy": -log_prob.detach().mean()}


# %% book/sac.py · The entropy coefficient
class Temperature(nn.Module):
    """The entropy coefficient, learned through its logarithm so that it stays positive."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(math.log(alpha)))

    def forward(self) -> Tensor:
        """Return alpha."""
        return self.log_alpha.exp()


def alpha_loss(
    log_alpha: Tensor, log_prob: Tensor, target_entropy: float
) -> tuple[Tensor, Metrics]:
    """Return the loss that lowers alpha while the entropy is above its target, and metrics."""
    check_shapes(len(log_prob), log_prob=log_prob)
    loss = -(log_alpha * (log_prob.detach() + target_entropy)).mean()
    return loss, {"alpha": log_alpha.detach().exp()}


# %% book/sac.py · Settings
class SACConfig(ReplayConfig):
    """The settings of SAC."""

    env_id: str = Field(
        default="Pendulum-v1",
        description="Gymnasium id, `module:Name-v0`, or `module:function` that makes one.",
    )
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(256, 256), description="Units of each hidden layer."
    )
    lr: float = Field(default=3e-4, gt=0, description="Learning rate of Adam, for all networks.")
    batch_size: int = Field(default=256, ge=1, description="Transitions of one update.")
    buffer_size: int = Field(
        default=100_000, ge=1, description="Transitions that the buffer holds."
    )
    learning_starts: int = Field(
        default=1_000, ge=0, description="Random steps before the first update."
    )
    train_frequency: int = Field(default=1, ge=1, description="Environment steps between updates.")
    num_critics: int = Field(default=2, ge=1, description="Critics in the ensemble (N).")
    policy_delay: int = Field(
        default=1, ge=1, description="Critic updates per update of the actor."
    )
    tau: float = Field(
        default=0.005, gt=0, le=1, description="Fraction that the target critics move per update."
    )
    initial_alpha: float = Field(default=1.0, gt=0, description="Entropy coefficient at the start.")
    learn_alpha: bool = Field(
        default=True, description="Whether the entropy coefficient is learned."
    )
    target_entropy: float | None = Field(
        default=None,
        description="Entropy to hold; by default minus the number of action dimensions.",
    )


# %% book/sac.py · The agent
class SAC(Agent):
    """An actor that maximises what its critics say, and its entropy."""

    name: ClassVar[str] = "sac"
    config_class: ClassVar[type[Config]] = SACConfig
    actions: ClassVar[str] = "continuous"
    parts: ClassVar[tuple[str, ...]] = (
        "actor",
        "critics",
        "target_critics",
        "temperature",
        "actor_optimizer",
        "critic_optimizer",
        "alpha_optimizer",
        "replay",
    )
    compiled: ClassVar[tuple[str, ...]] = ("critic_gradients", "actor_gradients")
    config: SACConfig
    observation_space: gym.spaces.Box
    action_space: gym.spaces.Box

    def build(self) -> None:
        """Make networks, optimisers and buffer."""
        config, (dimensions,) = self.config, self.action_space.shape
        check_bounds(config.env_id, self.action_space)
        self.scale = ActionScale(self.action_space)
        self.actor = self.make_actor().to(self.device)
        self.critics = self.make_critics().to(self.device)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.temperature = Temperature(config.initial_alpha).to(self.device)
        self.actor_optimizer = Adam(self.actor.parameters(), lr=config.lr, fused=True)
        self.critic_optimizer = Adam(self.critics.parameters(), lr=config.lr, fused=True)
        self.alpha_optimizer = Adam(self.temperature.parameters(), lr=config.lr, fused=True)
        entropy = config.target_entropy
        self.target_entropy = -float(dimensions) if entropy is None else entropy
        dtype = transition_dtype(self.observation_space, gym.spaces.Box(-1, 1, (dimensions,)))
        self.replay = ReplayBuffer(config.buffer_size, dtype, derive_seed(config.seed, "replay"))

    def make_actor(self) -> nn.Module:
        """Make the actor; any module with the inputs and outputs of `Actor` will do."""
        (inputs,), (actions,) = self.observation_space.shape, self.action_space.shape
        return Actor(inputs, actions, self.config.hidden)

    def make_critics(self) -> nn.Module:
        """Make the critics; any module with the inputs and outputs of `Critics` will do."""
        (inputs,), (actions,) = self.observation_space.shape, self.action_space.shape
        return Critics(inputs, actions, self.config.hidden, self.config.num_critics)

    def sample_noise(self, count: int) -> Tensor:
        """Sample standard normal noise (count, action dimensions) from the agent's generator."""
        shape = (count, *self.action_space.shape)
        noise = self.generator.standard_normal(shape, dtype=np.float32)
        return torch.from_numpy(noise).to(self.device)

    @torch.no_grad()
    def act(
        self, obs: np.ndarray, state: Any, episode_start: np.ndarray, explore: bool
    ) -> tuple[np.ndarray, Any]:
        """Sample from the policy, or take its median; at first act at random within the bounds."""
        if explore and self.global_step < self.config.learning_starts:
            action = self.generator.uniform(-1, 1, (len(obs), *self.action_space.shape))
        else:
            tensor = torch.as_tensor(obs, dtype=torch.float32, device=self.device)
            mean, log_std = self.actor(tensor)
            u = mean + log_std.exp() * self.sample_noise(len(obs)) if explore else mean
            action = u.tanh().cpu().numpy()
        return self.scale.to_env(action), state

    def observe(self, transition: Transition) -> None:
        """Store one step of all environments, with actions in [-1, 1]."""
        self.replay.add(
            make_transitions(
                self.replay.storage.dtype,
                obs=transition.obs,
                action=self.scale.from_env(transition.action),
                reward=transition.reward,
                next_obs=transition.next_obs,
                terminated=transition.terminated,
                discount=self.config.gamma,
            )
        )

    def sample(self) -> Batch:
        """Sample the transitions of one update."""
        return to_batch(self.replay.sample(self.config.batch_size), self.device)

    def choose_critics(self) -> Tensor | None:
        """Choose the target critics whose minimum is in the target; None means all of them."""
        return None

    def actor_value(self, q: Tensor) -> Tensor:
        """Return what the actor maximises (batch,): the smallest value of q (batch, critics)."""
        return q.amin(dim=1)

    def critic_gradients(self, batch: Batch, next_noise: Tensor, chosen: Tensor | None) -> Metrics:
        """Backpropagate the critics' loss of a batch."""
        with torch.no_grad():
            mean, log_std = self.actor(batch.next_obs)
            next_action, next_log_prob = squashed_sample(mean, log_std, next_noise)
            next_q = self.target_critics(batch.next_obs, next_action, chosen)
            alpha = self.temperature()
            target = sac_target(
                batch.reward, batch.discount, batch.terminated, next_q, next_log_prob, alpha
            )
        loss, metrics = critic_loss(self.critics(batch.obs, batch.action), target)
        loss.backward()
        return metrics

    def actor_gradients(self, obs: Tensor, noise: Tensor) -> Metrics:
        """Backpropagate the losses of the actor and of the entropy coefficient."""
        mean, log_std = self.actor(obs)
        action, log_prob = squashed_sample(mean, log_std, noise)
        value = self.actor_value(self.critics(obs, action))
        loss, metrics = actor_loss(value, log_prob, self.temperature().detach())
        entropy_loss, more_metrics = alpha_loss(
            self.temperature.log_alpha, log_prob, self.target_entropy
        )
        # Neither loss has a gradient for what the other trains, and the critics get none at all.
        trained = [*self.actor.parameters(), *self.temperature.parameters()]
        (loss + entropy_loss).backward(inputs=trained)
        return metrics | more_metrics

    def update(self, batch: Batch) -> UpdateResult:
        """Update the critics and, when it is due, the actor and the entropy coefficient."""
        self.critic_optimizer.zero_grad()
        next_noise = self.sample_noise(len(batch.reward))
        metrics = self.critic_gradients(batch, next_noise, self.choose_critics())
        self.critic_optimizer.step()

        if (self.updates + 1) % self.config.policy_delay == 0:
            self.actor_optimizer.zero_grad()
            self.alpha_optimizer.zero_grad()
            metrics |= self.actor_gradients(batch.obs, self.sample_noise(len(batch.reward)))
            self.actor_optimizer.step()
            if self.config.learn_alpha:
                self.alpha_optimizer.step()

        polyak_update(self.target_critics, self.critics, self.config.tau)
        return UpdateResult(metrics)

    @torch.no_grad()
    def q_values(self, obs: np.ndarray, action: np.ndarray | None = None) -> np.ndarray:
        """Return each critic's value (batch, critics) of actions, or of the policy's own.

        Observations are as `act` gets them.
        """
        if action is None:
            action, _ = self.act(obs, None, np.ones(len(obs), dtype=bool), explore=False)
        action = self.scale.from_env(action)
        pair = (torch.as_tensor(x, dtype=torch.float32, device=self.device) for x in (obs, action))
        return self.critics(*pair).cpu().numpy()


def train_sac(config: SACConfig, progress: bool = True, callbacks: Callbacks = ()) -> RunResult:
    """Train SAC with these settings."""
    return train(SAC(config=config), progress, callbacks)
