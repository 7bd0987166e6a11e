"""Made from book/policy_gradient.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "A2C",
    "A2CConfig",
    "CategoricalPolicy",
    "GaussianPolicy",
    "RolloutBatch",
    "RolloutBuffer",
    "RolloutConfig",
    "TanhMLP",
    "ValueNetwork",
    "a2c_loss",
    "clip_gradients",
    "explained_variance",
    "gae",
    "normalize",
    "sample_action",
    "train_a2c",
    "warn_of_bounds",
]

# %% book/policy_gradient.py · Policy gradient: REINFORCE to A2C
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Self

import gymnasium as gym
import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from rlbook.agent import Agent, Metrics, Transition, UpdateResult, seeded_torch
from rlbook.callbacks import Callbacks
from rlbook.dqn import check_shapes, decayed, set_learning_rate
from rlbook.envs import Mistake
from rlbook.replay import storage_dtype
from rlbook.run import RunResult, train
from rlbook.settings import Config


# %% book/policy_gradient.py · The policy
class TanhMLP(nn.Sequential):
    """Linear layers with tanh between them, initialised orthogonally unless told otherwise."""

    def __init__(self, sizes: tuple[int, ...], last_gain: float, orthogonal: bool = True) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.Tanh()]
        super().__init__(*layers[:-1])  # none after the last layer
        if orthogonal:
            linear = [layer for layer in self if isinstance(layer, nn.Linear)]
            for layer in linear:
                nn.init.orthogonal_(layer.weight, last_gain if layer is linear[-1] else 2**0.5)
                nn.init.zeros_(layer.bias)


class CategoricalPolicy(nn.Module):
    """From observations to a probability for each of a few actions."""

    def __init__(
        self, inputs: int, actions: int, hidden: tuple[int, ...], orthogonal: bool = True
    ) -> None:
        super().__init__()
        self.mlp = TanhMLP((inputs, *hidden, actions), 0.01, orthogonal)

    def forward(self, obs: Tensor) -> Distribution:
        """Return a distribution over actions (batch,) for observations (batch, inputs)."""
        return Categorical(logits=self.mlp(obs.float()), validate_args=False)


class GaussianPolicy(nn.Module):
    """From observations to a Gaussian over actions, whose spread is the same everywhere."""

    def __init__(
        self,
        inputs: int,
        actions: int,
        hidden: tuple[int, ...],
        orthogonal: bool = True,
        initial_std: float = 1.0,
    ) -> None:
        super().__init__()
        self.mlp = TanhMLP((inputs, *hidden, actions), 0.01, orthogonal)
        self.log_std = nn.Parameter(torch.full((actions,), math.log(initial_std)))

    def forward(self, obs: Tensor) -> Distribution:
        """Return a distribution over actions (batch, dimensions)."""
        mean = self.mlp(obs.float())
        gaussian = Normal(mean, self.log_std.exp().expand_as(mean), validate_args=False)
        return Independent(gaussian, 1, validate_args=False)  # log_prob sums over the dimensions


def sample_action(distribution: Distribution, generator: np.random.Generator) -> Tensor:
    """Sample an action for each observation, with the randomness of `generator`."""
    if isinstance(distribution, Categorical):
        logits = distribution.logits
        noise = generator.gumbel(size=logits.shape).astype(np.float32)
        return (logits + torch.from_numpy(noise).to(logits.device)).argmax(dim=-1)
    parts = distribution.base_dist if isinstance(distribution, Independent) else distribution
    if isinstance(parts, Normal):
        mean = parts.mean
        noise = generator.standard_normal(mean.shape, dtype=np.float32)
        return mean + parts.stddev * torch.from_numpy(noise).to(mean.device)
    with seeded_torch(int(generator.integers(2**32))):  # of another kind, in a policy of your own
        return distribution.sample()


# %% book/policy_gradient.py · How noisy is it?
class ValueNetwork(nn.Module):
    """From observations to the value of the state."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], orthogonal: bool = True) -> None:
        super().__init__()
        self.mlp = TanhMLP((inputs, *hidden, 1), 1.0, orthogonal)

    def forward(self, obs: Tensor) -> Tensor:
        """Return values (batch,) of observations (batch, inputs)."""
        return self.mlp(obs.float()).squeeze(-1)


# %% book/policy_gradient.py · Generalised advantage estimation
def gae(
    reward: Tensor,  # (time, envs), and so are all others
    value: Tensor,  # of the observation
    next_value: Tensor,  # of the true next observation, also where the episode was cut off
    terminated: Tensor,
    ended: Tensor,  # terminated or cut off: what follows belongs to another episode
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Return the advantages (time, envs): TD errors, summed with the weights (gamma lambda)^k."""
    arguments = {"value": value, "next_value": next_value, "terminated": terminated, "ended": ended}
    for name, tensor in arguments.items():
        if tensor.shape != reward.shape or reward.ndim != 2:
            shapes = f"{tuple(tensor.shape)} and {tuple(reward.shape)}"
            raise ValueError(f"{name} and reward must both be (time, envs), not {shapes}.")
    td_error = reward + gamma * next_value * ~terminated - value
    advantage = torch.zeros_like(td_error)
    following = torch.zeros_like(td_error[0])  # the advantage one step later
    for t in reversed(range(len(td_error))):
        following = td_error[t] + gamma * gae_lambda * following * ~ended[t]
        advantage[t] = following
    return advantage


# %% book/policy_gradient.py · The rollout buffer
class RolloutBuffer:
    """The steps of all environments since the last update, in their order."""

    arrays: tuple[str, ...] = ("obs", "next_obs", "action", "reward", "terminated", "ended")

    def __init__(
        self, num_steps: int, num_envs: int, observation_space: gym.Space, action_space: gym.Space
    ) -> None:
        def zeros(dtype: Any, shape: tuple[int, ...] = ()) -> np.ndarray:
            return np.zeros((num_steps, num_envs, *shape), dtype)

        self.obs = zeros(*storage_dtype(observation_space))
        self.next_obs = zeros(*storage_dtype(observation_space))
        self.action = zeros(*storage_dtype(action_space))
        self.reward = zeros(np.float32)
        self.terminated, self.ended = zeros(np.bool_), zeros(np.bool_)
        self.size = 0  # steps of each environment so far

    @property
    def full(self) -> bool:
        """Whether it is time to learn."""
        return self.size == len(self.reward)

    def add(self, transition: Transition, action: np.ndarray, reward: np.ndarray) -> None:
        """Store one step of all environments, with the action as it was sampled."""
        if self.full:
            raise ValueError("The rollout is full: learn from it and clear it before you go on.")
        t = self.size
        if t > 0:  # `learn` may start new episodes without an end of the old ones
            self.ended[t - 1] |= transition.episode_start
        self.obs[t], self.next_obs[t] = transition.obs, transition.next_obs
        self.action[t], self.reward[t] = action, reward
        self.terminated[t] = transition.terminated
        self.ended[t] = transition.terminated | transition.truncated
        self.size += 1

    def clear(self) -> None:
        """Drop the steps: they were chosen by a policy that has changed since."""
        self.size = 0

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """Return all arrays (time, envs, ...) by name as tensors of their own."""
        return {name: torch.tensor(getattr(self, name), device=device) for name in self.arrays}

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far."""
        stored = {name: torch.from_numpy(getattr(self, name)) for name in self.arrays}
        return {**stored, "size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the stored steps."""
        for name in self.arrays:
            here, stored = getattr(self, name), state[name].cpu().numpy()
            if here.shape != stored.shape:
                raise ValueError(f"A rollout of {stored.shape} was stored, not {here.shape}.")
            here[:] = stored
        self.size = state["size"]


@dataclass
class RolloutBatch:
    """Steps of a rollout as tensors, with what they turned out to be worth."""

    obs: Tensor  # (batch, ...)
    action: Tensor  # (batch,) or (batch, dimensions), as sampled
    advantage: Tensor  # (batch,)
    returns: Tensor  # (batch,), what the value network is trained towards
    log_prob: Tensor  # (batch,), when the action was taken
    value: Tensor  # (batch,), when the action was taken

    def __getitem__(self, indices: Tensor | slice) -> Self:
        """Choose some of the steps."""
        return type(self)(*(getattr(self, name)[indices] for name in self.__dataclass_fields__))

    def __len__(self) -> int:
        return len(self.advantage)


# %% book/policy_gradient.py · The loss
def normalize(advantage: Tensor) -> Tensor:
    """Shift and scale advantages (batch,) to mean 0 and standard deviation 1."""
    return (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)


def explained_variance(value: Tensor, returns: Tensor) -> Tensor:
    """Say how much of the returns the values explain: 1 for all, 0 for no more than their mean."""
    unexplained = (returns - value).var(correction=0)
    return 1 - unexplained / returns.var(correction=0).clamp(min=1e-8)


def a2c_loss(
    log_prob: Tensor,  # (batch,), of the actions that were taken, with gradient
    entropy: Tensor,  # (batch,), of the policy, with gradient
    value: Tensor,  # (batch,), with gradient
    advantage: Tensor,  # (batch,)
    returns: Tensor,  # (batch,)
    value_coefficient: float,
    entropy_coefficient: float,
) -> tuple[Tensor, Metrics]:
    """Return the loss of policy and value network together, and metrics."""
    vectors = {"entropy": entropy, "value": value, "advantage": advantage, "returns": returns}
    check_shapes(len(log_prob), log_prob=log_prob, **vectors)
    policy_loss = -(log_prob * advantage).mean()
    value_loss = (value - returns).square().mean()
    loss = policy_loss + value_coefficient * value_loss - entropy_coefficient * entropy.mean()
    return loss, {
        "loss": loss.detach(),
        "policy_loss": policy_loss.detach(),
        "value_loss": value_loss.detach(),
        "entropy": entropy.detach().mean(),
        "explained_variance": explained_variance(value.detach(), returns),
    }


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
    """Shorten the gradient of all parameters together to `max_norm`, if it is longer."""
    if max_norm is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, max_norm)


# %% book/policy_gradient.py · Settings
class RolloutConfig(Config):
    """The settings of agents that learn from rollouts."""

    num_envs: int = Field(default=8, ge=1, description="Environments that step side by side.")
    num_steps: int = Field(default=16, ge=1, description="Steps of each environment in a rollout.")
    gamma: float = Field(
        default=0.99, ge=0, le=1, description="Discount of a reward one step later."
    )
    gae_lambda: float = Field(
        default=0.95, ge=0, le=1, description="Weight of later TD errors in an advantage."
    )
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(64, 64), description="Units of each hidden layer, of both networks."
    )
    orthogonal_init: bool = Field(
        default=True, description="Orthogonal initial weights, small in the policy's last layer."
    )
    initial_std: float = Field(
        default=1.0, gt=0, description="Standard deviation of continuous actions at the start."
    )
    lr: float = Field(default=1e-3, gt=0, description="Learning rate of Adam.")
    lr_decay_from: float = Field(
        default=1.0, ge=0, le=1, description="Fraction of the run after which lr falls to 0."
    )
    normalize_advantages: bool = Field(
        default=False, description="Give the advantages of a batch mean 0 and deviation 1."
    )
    reward_scale: float = Field(default=1.0, gt=0, description="Factor of each reward.")
    bootstrap_truncated: bool = Field(
        default=True, description="Whether an episode that was cut off still has a future."
    )

    @property
    def rollout_size(self) -> int:
        """The steps of all environments in a rollout."""
        return self.num_steps * self.num_envs

    @model_validator(mode="after")
    def check_rollout(self) -> Self:
        """Raise where normalised advantages would all be 0."""
        if self.normalize_advantages and self.rollout_size == 1:
            raise ValueError(
                "Setting 'normalize_advantages' needs a rollout of at least two steps: raise "
                "'num_steps' or 'num_envs'."
            )
        return self

    def lr_now(self, step: int) -> float:
        """Return the learning rate at a step."""
        return decayed(self.lr, step / self.total_steps, self.lr_decay_from)


class A2CConfig(RolloutConfig):
    """The settings of A2C."""

    value_coefficient: float = Field(default=0.5, ge=0, description="Weight of the value loss.")
    entropy_coefficient: float = Field(
        default=0.0, ge=0, description="Weight of the entropy bonus."
    )
    max_grad_norm: float | None = Field(
        default=0.5, gt=0, description="Longer gradients are shortened to this norm."
    )


# %% book/policy_gradient.py · The agent
def warn_of_bounds(env_id: Any, space: gym.spaces.Box, std: float) -> None:
    """Say so if a Gaussian at 0 with this deviation hardly ever falls within the bounds."""
    if (space.low > 3 * std).any() or (space.high < -3 * std).any():
        advice = "wrap it in gymnasium.wrappers.RescaleAction(env, -1, 1)"
        warnings.warn(
            f"{env_id!r} has actions in {space}, and the policy starts around 0: {advice}.",
            stacklevel=2,
        )


class A2C(Agent):
    """A policy that learns from the advantages of its own actions."""

    name: ClassVar[str] = "a2c"
    config_class: ClassVar[type[Config]] = A2CConfig
    actions: ClassVar[str] = "discrete or continuous"
    parts: ClassVar[tuple[str, ...]] = ("policy", "value_network", "optimizer", "rollout")
    compiled: ClassVar[tuple[str, ...]] = ("compute_gradients",)
    config: A2CConfig
    observation_space: gym.spaces.Box
    action_space: gym.spaces.Discrete | gym.spaces.Box
    sampled: np.ndarray = np.empty(0)  # the last actions in a Box, before they were clipped
    clipped: np.ndarray = np.empty(0)  # and as the environments got them

    def build(self) -> None:
        """Make networks, optimiser and buffer."""
        config, space = self.config, self.action_space
        if isinstance(space, gym.spaces.Box) and np.dtype(space.dtype).kind != "f":
            raise ValueError(f"{config.env_id!r} has actions that are not real numbers ({space}).")
        if isinstance(space, gym.spaces.Box):
            warn_of_bounds(config.env_id, space, config.initial_std)
        self.policy = self.make_policy().to(self.device)
        self.value_network = self.make_value_network().to(self.device)
        parameters = [*self.policy.parameters(), *self.value_network.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=config.lr, eps=1e-5, fused=True)
        self.rollout = RolloutBuffer(
            config.num_steps, config.num_envs, self.observation_space, space
        )

    def make_policy(self) -> nn.Module:
        """Make a network from observations (batch, inputs) to a distribution over actions."""
        config, space, (inputs,) = self.config, self.action_space, self.observation_space.shape
        if isinstance(space, gym.spaces.Discrete):
            return CategoricalPolicy(inputs, int(space.n), config.hidden, config.orthogonal_init)
        (actions,), std = space.shape, config.initial_std
        return GaussianPolicy(inputs, actions, config.hidden, config.orthogonal_init, std)

    def make_value_network(self) -> nn.Module:
        """Make a network from observations (batch, inputs) to values (batch,)."""
        (inputs,) = self.observation_space.shape
        return ValueNetwork(inputs, self.config.hidden, self.config.orthogonal_init)

    @torch.no_grad()
    def act(
        self, obs: np.ndarray, state: Any, episode_start: np.ndarray, explore: bool
    ) -> tuple[np.ndarray, Any]:
        """Sample from the policy, or take the likeliest action."""
        distribution = self.policy(torch.as_tensor(obs, device=self.device))
        return self.choose(distribution, explore), state

    def choose(self, distribution: Distribution, explore: bool) -> np.ndarray:
        """Return actions as the environments want them, and remember them as they were sampled."""
        action = sample_action(distribution, self.generator) if explore else distribution.mode
        chosen = action.cpu().numpy()
        if isinstance(self.action_space, gym.spaces.Discrete):
            return chosen + self.action_space.start
        low, high, dtype = self.action_space.low, self.action_space.high, self.action_space.dtype
        clipped = np.clip(chosen, low, high).astype(dtype)
        if explore:
            self.sampled, self.clipped = chosen, clipped
        return clipped

    def as_sampled(self, action: np.ndarray) -> np.ndarray:
        """Return the actions of the environments as they were sampled from the policy."""
        if isinstance(self.action_space, gym.spaces.Discrete):
            return action - self.action_space.start
        if not np.array_equal(action, self.clipped, equal_nan=True):  # `update` finds a NaN
            raise Mistake(
                f"The actions that {self.name} observes are not those that it sampled last: "
                "let a `copy.deepcopy` of it play elsewhere while it learns."
            )
        return self.sampled

    def observe(self, transition: Transition) -> None:
        """Store one step of all environments."""
        action, reward = self.as_sampled(transition.action), transition.reward
        self.rollout.add(transition, action, reward * self.config.reward_scale)

    @torch.no_grad()
    def finish_rollout(self) -> RolloutBatch:
        """Compute advantages and returns of the rollout, with the networks that collected it."""
        steps = self.rollout.tensors(self.device)
        obs, next_obs, action = (steps[n].flatten(0, 1) for n in ("obs", "next_obs", "action"))
        value, next_value = self.value_network(obs), self.value_network(next_obs)  # (batch,)
        advantage = self.advantages(steps, value, next_value)
        log_prob = self.policy(obs).log_prob(action)
        return RolloutBatch(obs, action, advantage, advantage + value, log_prob, value)

    def advantages(self, steps: dict[str, Tensor], value: Tensor, next_value: Tensor) -> Tensor:
        """Return the advantages (batch,) of a rollout from the values (batch,) of its steps."""
        config, terminated, ended = self.config, steps["terminated"], steps["ended"]
        if not config.bootstrap_truncated:
            terminated = ended  # as if nothing could follow
        return gae(
            steps["reward"],
            value.view_as(ended),
            next_value.view_as(ended),
            terminated,
            ended,
            config.gamma,
            config.gae_lambda,
        ).flatten()

    def batches(self) -> Iterator[RolloutBatch]:
        """Yield each rollout once, when it is full."""
        if self.rollout.full:
            yield self.finish_rollout()
            self.rollout.clear()

    def forward(self, batch: RolloutBatch) -> tuple[Distribution, Tensor]:
        """Return the policy and the values (batch,) at the steps of a batch."""
        return self.policy(batch.obs), self.value_network(batch.obs)

    def compute_gradients(self, batch: RolloutBatch) -> Metrics:
        """Backpropagate the loss of a batch."""
        config, advantage = self.config, batch.advantage
        if config.normalize_advantages:
            advantage = normalize(advantage)
        distribution, value = self.forward(batch)
        loss, metrics = a2c_loss(
            distribution.log_prob(batch.action),
            distribution.entropy(),
            value,
            advantage,
            batch.returns,
            config.value_coefficient,
            config.entropy_coefficient,
        )
        loss.backward()
        return metrics

    def update(self, batch: RolloutBatch) -> UpdateResult:
        """Make one gradient step of both networks."""
        config = self.config
        self.optimizer.zero_grad()
        metrics = self.compute_gradients(batch)
        clip_gradients(self.optimizer, config.max_grad_norm)
        set_learning_rate(self.optimizer, config.lr_now(self.global_step))
        self.optimizer.step()
        return UpdateResult(metrics)

    @torch.no_grad()
    def values(self, obs: np.ndarray) -> np.ndarray:
        """Return the values (batch,) of observations (batch, inputs), as `act` gets them."""
        return self.value_network(torch.as_tensor(obs, device=self.device)).cpu().numpy()

    @torch.no_grad()
    def probabilities(self, obs: np.ndarray) -> np.ndarray:
        """Return the probability of each action (batch, actions), given what `act` gets."""
        distribution = self.policy(torch.as_tensor(obs, device=self.device))
        if not isinstance(distribution, Categorical):
            raise ValueError("Continuous actions have a density, not a list of probabilities.")
        return distribution.probs.cpu().numpy()


def train_a2c(config: A2CConfig, progress: bool = True, callbacks: Callbacks = ()) -> RunResult:
    """Train A2C with these settings."""
    return train(A2C(config=config), progress, callbacks)
