"""Made from book/ppo.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "PPO",
    "PPOConfig",
    "approximate_kl",
    "check_minibatches",
    "clipped_objective",
    "ppo_loss",
    "train_ppo",
]

# %% book/ppo.py · PPO: more from each rollout
from collections.abc import Iterator
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlbook.agent import Metrics, UpdateResult
from rlbook.callbacks import Callbacks
from rlbook.dqn import check_shapes, decayed, set_learning_rate
from rlbook.policy_gradient import (
    A2C,
    A2CConfig,
    RolloutBatch,
    clip_gradients,
    explained_variance,
    normalize,
)
from rlbook.run import RunResult, train
from rlbook.settings import Config


# %% book/ppo.py · The clipped objective
def clipped_objective(ratio: Tensor, advantage: Tensor, clip_range: Tensor | float) -> Tensor:
    """Return what PPO maximises, for each step: no gain from a ratio beyond the clip range."""
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)  # type: ignore[arg-type]
    return torch.minimum(ratio * advantage, clipped * advantage)


# %% book/ppo.py · The loss
def approximate_kl(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Estimate from actions of the old policy how far the new one is from it: never below 0."""
    log_ratio = log_prob - old_log_prob
    return (log_ratio.exp() - 1 - log_ratio).mean()


def ppo_loss(
    log_prob: Tensor,  # (batch,), of the actions that were taken, with gradient
    old_log_prob: Tensor,  # (batch,), when they were taken
    entropy: Tensor,  # (batch,), of the policy, with gradient
    value: Tensor,  # (batch,), with gradient
    old_value: Tensor,  # (batch,), when the actions were taken
    advantage: Tensor,  # (batch,)
    returns: Tensor,  # (batch,)
    clip_range: Tensor | float,
    value_coefficient: float,
    entropy_coefficient: float,
    clip_value_loss: bool = False,
) -> tuple[Tensor, Metrics]:
    """Return the clipped loss of policy and value network together, and metrics."""
    check_shapes(
        len(log_prob),
        log_prob=log_prob,
        old_log_prob=old_log_prob,
        entropy=entropy,
        value=value,
        old_value=old_value,
        advantage=advantage,
        returns=returns,
    )
    ratio = (log_prob - old_log_prob).exp()
    policy_loss = -clipped_objective(ratio, advantage, clip_range).mean()
    squared_error = (value - returns).square()
    if clip_value_loss:
        near = value.clamp(old_value - clip_range, old_value + clip_range)
        squared_error = torch.maximum(squared_error, (near - returns).square())
    value_loss = squared_error.mean()
    loss = policy_loss + value_coefficient * value_loss - entropy_coefficient * entropy.mean()
    with torch.no_grad():
        metrics = {
            "loss": loss.detach(),
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach().mean(),
            "approximate_kl": approximate_kl(log_prob, old_log_prob),
            "clip_fraction": ((ratio - 1).abs() > clip_range).float().mean(),
            "explained_variance": explained_variance(old_value, returns),
        }
    return loss, metrics


# %% book/ppo.py · Settings
def check_minibatches(rollout_size: int, minibatch_size: int) -> None:
    """Raise unless a rollout divides into minibatches."""
    if rollout_size % minibatch_size:
        raise ValueError(
            f"Setting 'minibatch_size' ({minibatch_size}) must divide a rollout, "
            f"'num_steps' times 'num_envs' ({rollout_size})."
        )


class PPOConfig(A2CConfig):
    """The settings of PPO."""

    num_steps: int = Field(default=128, ge=1, description="Steps of each environment in a rollout.")
    epochs: int = Field(default=10, ge=1, description="How often each rollout is learned from.")
    minibatch_size: int = Field(default=256, ge=1, description="Steps of one update.")
    lr: float = Field(default=3e-4, gt=0, description="Learning rate of Adam.")
    clip_range: float = Field(
        default=0.2, gt=0, description="How far a probability ratio may move from 1."
    )
    clip_range_decay_from: float = Field(
        default=1.0, ge=0, le=1, description="Fraction of the run after which clip_range falls."
    )
    clip_value_loss: bool = Field(
        default=False, description="Clip how far values move, too, by the same range."
    )
    target_kl: float | None = Field(
        default=None, gt=0, description="Leave a rollout when the approximate KL exceeds this."
    )
    normalize_advantages: bool = Field(
        default=True, description="Give the advantages of a minibatch mean 0 and deviation 1."
    )

    @model_validator(mode="after")
    def check_division(self) -> Self:
        """Raise unless a rollout divides into minibatches that can be normalised."""
        check_minibatches(self.rollout_size, self.minibatch_size)
        if self.normalize_advantages and self.minibatch_size == 1:
            raise ValueError(
                "Setting 'normalize_advantages' needs a 'minibatch_size' of at least two steps."
            )
        return self

    def clip_range_now(self, step: int) -> float:
        """Return the clip range at a step."""
        return decayed(self.clip_range, step / self.total_steps, self.clip_range_decay_from)


# %% book/ppo.py · The agent
class PPO(A2C):
    """A policy that learns from each rollout for several epochs of clipped steps."""

    name: ClassVar[str] = "ppo"
    config_class: ClassVar[type[Config]] = PPOConfig
    config: PPOConfig

    def batches(self) -> Iterator[RolloutBatch]:
        """Yield minibatches of a full rollout, for several epochs."""
        if not self.rollout.full:
            return
        config, rollout = self.config, self.finish_rollout()
        for _ in range(config.epochs):
            for indices in self.shuffled(len(rollout)).split(config.minibatch_size):
                yield rollout[indices]
            if config.target_kl is not None and self.kl_from(rollout) > config.target_kl:
                break  # the policy has moved far enough from the one that collected the rollout
        self.rollout.clear()

    def shuffled(self, count: int) -> Tensor:
        """Return the indices of `count` steps in random order."""
        return torch.from_numpy(self.generator.permutation(count)).to(self.device)

    @torch.no_grad()
    def kl_from(self, rollout: RolloutBatch) -> Tensor:
        """Estimate how far the policy is from the one that collected a rollout."""
        distribution, _ = self.forward(rollout)
        return approximate_kl(distribution.log_prob(rollout.action), rollout.log_prob)

    def compute_gradients(
        self, batch: RolloutBatch, clip_range: Tensor | float = torch.inf
    ) -> Metrics:
        """Backpropagate the loss of a minibatch, clipped if there is a clip range."""
        config, advantage = self.config, batch.advantage
        if config.normalize_advantages:
            advantage = normalize(advantage)
        distribution, value = self.forward(batch)
        loss, metrics = ppo_loss(
            distribution.log_prob(batch.action),
            batch.log_prob,
            distribution.entropy(),
            value,
            batch.value,
            advantage,
            batch.returns,
            clip_range,
            config.value_coefficient,
            config.entropy_coefficient,
            config.clip_value_loss,
        )
        loss.backward()
        return metrics

    def update(self, batch: RolloutBatch) -> UpdateResult:
        """Make one gradient step of both networks."""
        config = self.config
        clip_range = torch.tensor(config.clip_range_now(self.global_step), device=self.device)
        self.optimizer.zero_grad()
        metrics = self.compute_gradients(batch, clip_range)
        clip_gradients(self.optimizer, config.max_grad_norm)
        set_learning_rate(self.optimizer, config.lr_now(self.global_step))
        self.optimizer.step()
        return UpdateResult(metrics)


def train_ppo(config: PPOConfig, progress: bool = True, callbacks: Callbacks = ()) -> RunResult:
    """Train PPO with these settings."""
    return train(PPO(config=config), progress, callbacks)
