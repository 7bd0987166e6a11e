"""Made from book/dqn.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "DQN",
    "MLP",
    "DQNConfig",
    "QNetwork",
    "check_shapes",
    "decayed",
    "dqn_loss",
    "dqn_target",
    "epsilon_greedy",
    "linear_epsilon",
    "polyak_update",
    "scale_factors",
    "set_learning_rate",
    "train_dqn",
]

# %% book/dqn.py · DQN: learning values with a network
import copy
import math
from itertools import pairwise
from typing import Annotated, Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from rlbook.agent import Agent, Metrics, Transition, UpdateResult
from rlbook.callbacks import Callbacks
from rlbook.envs import derive_seed
from rlbook.replay import (
    Batch,
    NStepAccumulator,
    ReplayBuffer,
    ReplayConfig,
    make_transitions,
    to_batch,
    transition_dtype,
)
from rlbook.run import RunResult, train
from rlbook.settings import Config


# %% book/dqn.py · The Q-network
class MLP(nn.Sequential):
    """Linear layers of the given sizes with ReLU between them."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        super().__init__(*layers[:-1])  # none after the last layer


def scale_factors(observation_scale: tuple[float, ...], inputs: int) -> Tensor:
    """Return a factor for each entry of an observation, 1 where none are given."""
    given = len(observation_scale)
    if given not in (0, inputs):
        raise ValueError(f"Setting 'observation_scale' needs {inputs} factors, not {given}.")
    return torch.tensor(observation_scale or (1.0,) * inputs)


class QNetwork(nn.Module):
    """From an observation to the value of each action."""

    scale: Tensor  # what each entry of the observation is multiplied by

    def __init__(
        self,
        inputs: int,
        actions: int,
        hidden: tuple[int, ...],
        observation_scale: tuple[float, ...] = (),
    ) -> None:
        super().__init__()
        scale = scale_factors(observation_scale, inputs)
        self.register_buffer("scale", scale, persistent=False)  # not learned, not saved
        self.layers = MLP((inputs, *hidden, actions))

    def forward(self, obs: Tensor) -> Tensor:
        """Map observations (batch, inputs) to values (batch, actions)."""
        return self.layers(obs.float() * self.scale)


# %% book/dqn.py · The target
def dqn_target(
    reward: Tensor,
    discount: Tensor,
    terminated: Tensor,
    next_q_target: Tensor,
    next_q: Tensor | None = None,
) -> Tensor:
    """Return the reward plus the discounted value of the next state, if there is one."""
    if next_q is None:
        next_value = next_q_target.amax(dim=-1)
    else:  # Double: the Q-network chooses, the target network values
        choice = next_q.argmax(dim=-1, keepdim=True)
        next_value = next_q_target.gather(-1, choice).squeeze(-1)
    return reward + discount * ~terminated * next_value


# %% book/dqn.py · The loss
def check_shapes(batch_size: int, **vectors: Tensor) -> None:
    """Raise unless each tensor is (batch,): (batch, 1) would broadcast into a wrong loss."""
    for name, vector in vectors.items():
        if vector.shape != (batch_size,):
            shape = tuple(vector.shape)
            raise ValueError(f"{name} must have the shape ({batch_size},), not {shape}.")


def dqn_loss(
    q: Tensor,  # (batch, actions), with gradient
    action: Tensor,  # (batch,)
    reward: Tensor,  # (batch,)
    discount: Tensor,  # (batch,)
    terminated: Tensor,  # (batch,)
    next_q_target: Tensor,  # (batch, actions), of the target network
    next_q: Tensor | None = None,  # (batch, actions), of the Q-network, for Double DQN
    huber: bool = False,
) -> tuple[Tensor, Metrics]:
    """Return the mean squared (or Huber) TD error and named metrics."""
    vectors = {"action": action, "reward": reward, "discount": discount, "terminated": terminated}
    check_shapes(len(q), **vectors)
    with torch.no_grad():
        y = dqn_target(reward, discount, terminated, next_q_target, next_q)
    chosen = q.gather(1, action.unsqueeze(1)).squeeze(1)  # (batch,), of the actions taken
    check_shapes(len(q), chosen=chosen, y=y)
    loss = nn.functional.huber_loss(chosen, y) if huber else nn.functional.mse_loss(chosen, y)
    values = chosen.detach()
    metrics = {
        "loss": loss.detach(),
        "q_mean": values.mean(),
        "target_mean": y.mean(),
        "td_error_abs": (values - y).abs().mean(),
    }
    return loss, metrics


# %% book/dqn.py · The target network
@torch.no_grad()
def polyak_update(target_network: nn.Module, network: nn.Module, tau: float) -> None:
    """Move a target network the fraction `tau` of the way to the network; 1 copies it."""
    for slow, fast in zip(target_network.parameters(), network.parameters(), strict=True):
        slow.lerp_(fast, tau)  # slow += tau * (fast - slow)


# %% book/dqn.py · Exploring
def linear_epsilon(step: int, decay_steps: int, final: float) -> float:
    """Fall linearly from 1 to `final` over `decay_steps`, then stay there."""
    return max(final, 1 - (1 - final) * step / decay_steps)


def epsilon_greedy(
    actions: np.ndarray,
    choices: int,
    epsilon: float | np.ndarray,  # one for all actions, or one for each
    generator: np.random.Generator,
) -> np.ndarray:
    """Replace each action, with probability `epsilon`, by a random one of the `choices`."""
    explores = generator.random(len(actions)) < epsilon
    return np.where(explores, generator.integers(choices, size=len(actions)), actions)


# %% book/dqn.py · Settings
def decayed(initial: float, progress: float, decay_from: float) -> float:
    """Keep `initial` up to the fraction `decay_from` of a run, then fall linearly to 0."""
    if progress <= decay_from or decay_from == 1:
        return initial
    return initial * max(0.0, (1 - progress) / (1 - decay_from))  # the last step may overshoot


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use this learning rate from now on."""
    for group in optimizer.param_groups:
        group["lr"] = lr


class DQNConfig(ReplayConfig):
    """The settings of DQN."""

    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(64, 64), description="Units of each hidden layer."
    )
    observation_scale: tuple[float, ...] = Field(
        default=(), description="Factor for each entry of the observation."
    )
    lr: float = Field(default=1e-3, gt=0, description="Learning rate of Adam.")
    lr_decay_from: float = Field(
        default=1.0, ge=0, le=1, description="Fraction of the run after which lr falls to 0."
    )
    n_step: int = Field(default=1, ge=1, description="Rewards summed before the target bootstraps.")
    double: bool = Field(default=True, description="Whether the Q-network chooses the next action.")
    huber: bool = Field(default=False, description="Huber loss instead of squared error.")
    tau: float = Field(
        default=1.0, gt=0, le=1, description="Fraction that a target update moves; 1 copies."
    )
    target_update_interval: int = Field(
        default=500, ge=1, description="Updates between two moves of the target network."
    )
    final_epsilon: float = Field(
        default=0.05, ge=0, le=1, description="Probability of a random action at the end."
    )
    epsilon_decay_steps: int = Field(
        default=10_000, ge=1, description="Environment steps until epsilon has fallen from 1."
    )
    max_grad_norm: float | None = Field(
        default=None, gt=0, description="Longer gradients are shortened to this norm."
    )

    def epsilon(self, step: int) -> float:
        """Return the probability of a random action at a step."""
        return linear_epsilon(step, self.epsilon_decay_steps, self.final_epsilon)

    def lr_now(self, step: int) -> float:
        """Return the learning rate at a step."""
        return decayed(self.lr, step / self.total_steps, self.lr_decay_from)


# %% book/dqn.py · The agent
class DQN(Agent):
    """A Q-network that learns from replay."""

    name: ClassVar[str] = "dqn"
    config_class: ClassVar[type[Config]] = DQNConfig
    parts: ClassVar[tuple[str, ...]] = (
        "q_network", "target_network", "optimizer", "n_step", "replay"
    )
    compiled: ClassVar[tuple[str, ...]] = ("compute_gradients",)
    config: DQNConfig
    action_space: gym.spaces.Discrete

    def build(self) -> None:
        """Make networks, optimiser and buffer."""
        config = self.config
        self.q_network = self.make_network().to(self.device)
        self.target_network = copy.deepcopy(self.q_network)
        self.optimizer = torch.optim.Adam(self.q_network.parameters(), lr=config.lr, fused=True)
        dtype = transition_dtype(self.observation_space, self.action_space)
        self.replay = ReplayBuffer(config.buffer_size, dtype, derive_seed(config.seed, "replay"))
        self.n_step = NStepAccumulator(config.n_step, config.gamma, config.num_envs, dtype)

    def make_network(self) -> nn.Module:
        """Make a network from observations (batch, inputs) to values (batch, actions)."""
        inputs, actions = math.prod(self.observation_space.shape or ()), int(self.action_space.n)
        return QNetwork(inputs, actions, self.config.hidden, self.config.observation_scale)

    @torch.no_grad()
    def q_values(self, obs: np.ndarray) -> np.ndarray:
        """Return values (batch, actions) of observations (batch, inputs), as `act` gets them."""
        seen = torch.as_tensor(obs, dtype=torch.float32, device=self.device)
        return self.q_network(seen).cpu().numpy()

    def act(
        self, obs: np.ndarray, state: Any, episode_start: np.ndarray, explore: bool
    ) -> tuple[np.ndarray, Any]:
        """Take the best action, or with probability epsilon any."""
        actions = self.q_values(obs).argmax(axis=1)
        if explore:
            epsilon = self.config.epsilon(self.global_step)
            actions = epsilon_greedy(actions, int(self.action_space.n), epsilon, self.generator)
        return actions + self.action_space.start, state

    def observe(self, transition: Transition) -> None:
        """Store the n-step transitions that this step completes."""
        step = make_transitions(
            self.replay.storage.dtype,
            obs=transition.obs,
            action=transition.action - self.action_space.start,
            reward=transition.reward,
            next_obs=transition.next_obs,
            terminated=transition.terminated,
            discount=self.config.gamma,
        )
        self.n_step.drop(transition.episode_start)  # `learn` may start new episodes
        self.replay.add(self.n_step.add(step, transition.truncated))

    def sample(self) -> Batch:
        """Draw a batch from the replay buffer."""
        return to_batch(self.replay.sample(self.config.batch_size), self.device)

    def compute_gradients(self, batch: Batch) -> Metrics:
        """Backpropagate the loss of a batch, and clip the gradient if it is asked for."""
        with torch.no_grad():
            next_q_target = self.target_network(batch.next_obs)
            next_q = self.q_network(batch.next_obs) if self.config.double else None
        q = self.q_network(batch.obs)
        loss, metrics = dqn_loss(
            q,
            batch.action,
            batch.reward,
            batch.discount,
            batch.terminated,
            next_q_target,
            next_q,
            huber=self.config.huber,
        )
        loss.backward()
        if self.config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.q_network.parameters(), self.config.max_grad_norm)
        return metrics

    def update(self, batch: Batch) -> UpdateResult:
        """Make one gradient step on the TD error, then move the target network if it is time."""
        config = self.config
        self.optimizer.zero_grad()
        metrics = self.compute_gradients(batch)
        set_learning_rate(self.optimizer, config.lr_now(self.global_step))
        self.optimizer.step()
        if (self.updates + 1) % config.target_update_interval == 0:
            polyak_update(self.target_network, self.q_network, config.tau)
        return UpdateResult(metrics)


def train_dqn(config: DQNConfig, progress: bool = True, callbacks: Callbacks = ()) -> RunResult:
    """Train DQN with these settings."""
    return train(DQN(config=config), progress, callbacks)
