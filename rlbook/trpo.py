"""Made from book/trpo.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "TRPO",
    "Product",
    "TRPOConfig",
    "conjugate_gradient",
    "fisher_product",
    "flatten",
    "largest_step",
    "line_search",
    "mean_kl",
    "set_parameters",
    "train_trpo",
    "trpo_loss",
    "value_loss",
]

# %% book/trpo.py · TRPO: steps of a known size
from collections.abc import Callable, Iterable
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.distributions import Distribution, kl_divergence

from rlbook.agent import Metrics, UpdateResult
from rlbook.callbacks import Callbacks
from rlbook.dqn import check_shapes, set_learning_rate
from rlbook.policy_gradient import A2C, RolloutBatch, RolloutConfig, explained_variance, normalize
from rlbook.ppo import check_minibatches
from rlbook.run import RunResult, train
from rlbook.settings import Config


# %% book/trpo.py · How far has the policy moved?
def mean_kl(old: Distribution, new: Distribution) -> Tensor:
    """Return the KL divergence of the new policy from the old one, averaged over states."""
    return kl_divergence(old, new).mean()


# %% book/trpo.py · What would the new policy get?
def trpo_loss(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor) -> Tensor:
    """Return the negative surrogate objective of a rollout; all arguments are (batch,)."""
    check_shapes(len(log_prob), log_prob=log_prob, old_log_prob=old_log_prob, advantage=advantage)
    ratio = (log_prob - old_log_prob).exp()
    return -(ratio * advantage).mean()


def value_loss(value: Tensor, returns: Tensor) -> Tensor:
    """Return the mean squared error of the values; both arguments are (batch,)."""
    check_shapes(len(returns), value=value, returns=returns)
    return (value - returns).square().mean()


# %% book/trpo.py · Products with the Fisher matrix
Product = Callable[[Tensor], Tensor]  # from a vector to a matrix times that vector


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Return all numbers of some tensors as one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@torch.no_grad()
def set_parameters(parameters: list[nn.Parameter], vector: Tensor) -> None:
    """Copy a vector into the parameters, the reverse of `flatten`."""
    parts = vector.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.copy_(part.view_as(parameter))


def fisher_product(kl: Tensor, parameters: list[nn.Parameter], damping: float) -> Product:
    """Return the function v -> (F + damping) v, where F is the second derivative of `kl`."""
    gradient = flatten(torch.autograd.grad(kl, parameters, create_graph=True))  # first pass

    def product(vector: Tensor) -> Tensor:
        along = gradient @ vector
        second = torch.autograd.grad(along, parameters, retain_graph=True)  # second pass
        return flatten(second) + damping * vector

    return product


# %% book/trpo.py · Conjugate gradients
def conjugate_gradient(product: Product, b: Tensor, iterations: int) -> Tensor:
    """Solve A x = b for a symmetric positive definite A, known by its products alone."""
    x = torch.zeros_like(b)
    residual = direction = b  # b - A x
    squared = initial = b @ b
    for _ in range(iterations):
        if squared <= 1e-10 * initial:  # solved, or there was nothing to solve
            break
        image = product(direction)
        length = squared / (direction @ image)
        x = x + length * direction
        residual = residual - length * image
        before, squared = squared, residual @ residual
        direction = residual + squared / before * direction
    return x


# %% book/trpo.py · The largest step
def largest_step(product: Product, direction: Tensor, target_kl: float) -> Tensor:
    """Stretch a direction until its KL divergence, to second order and damped, is `target_kl`."""
    curvature = direction @ product(direction)
    return (2 * target_kl / curvature.clamp(min=1e-12)).sqrt() * direction


# %% book/trpo.py · The line search
def line_search(
    attempt: Callable[[float], tuple[Tensor, Tensor]],  # fraction of the step -> improvement, KL
    target_kl: float,
    shrink: float,
    steps: int,
) -> tuple[float, int]:
    """Return the first of 1, shrink, shrink^2, ... that is good, or 0, and how many were tried."""
    for i in range(steps):
        improvement, kl = attempt(shrink**i)
        if improvement > 0 and kl <= target_kl:
            return shrink**i, i + 1
    return 0.0, steps


# %% book/trpo.py · Settings
class TRPOConfig(RolloutConfig):
    """The settings of TRPO."""

    num_steps: int = Field(default=128, ge=1, description="Steps of each environment in a rollout.")
    target_kl: float = Field(
        default=0.01, gt=0, description="How far, in KL divergence, a step may move the policy."
    )
    cg_iterations: int = Field(
        default=10, ge=1, description="Iterations of conjugate gradients; 1 is the plain gradient."
    )
    damping: float = Field(
        default=0.1, ge=0, description="What is added to the diagonal of the Fisher matrix."
    )
    line_search: bool = Field(
        default=True, description="Shorten steps that are too long or do not improve."
    )
    line_search_steps: int = Field(
        default=10, ge=1, description="How many lengths are tried before the step is dropped."
    )
    line_search_shrink: float = Field(
        default=0.8, gt=0, lt=1, description="Factor from one length to the next."
    )
    value_epochs: int = Field(
        default=10, ge=1, description="How often the values learn from each rollout."
    )
    minibatch_size: int = Field(default=128, ge=1, description="Steps of one update of the values.")
    normalize_advantages: bool = Field(
        default=True, description="Give the advantages of a rollout mean 0 and deviation 1."
    )

    @model_validator(mode="after")
    def check_division(self) -> Self:
        """Raise unless a rollout divides into minibatches."""
        check_minibatches(self.rollout_size, self.minibatch_size)
        return self


# %% book/trpo.py · The agent
class TRPO(A2C):
    """A policy that takes one step a rollout, and stays in a trust region."""

    name: ClassVar[str] = "trpo"
    config_class: ClassVar[type[Config]] = TRPOConfig
    config: TRPOConfig  # type: ignore[assignment]  # A2C's loss has coefficients, ours has none

    def build(self) -> None:
        """Make what A2C is made of; but Adam trains the value network alone."""
        super().build()
        values = self.value_network.parameters()
        self.optimizer = torch.optim.Adam(values, lr=self.config.lr, eps=1e-5, fused=True)

    def update_policy(self, batch: RolloutBatch) -> Metrics:
        """Go along the natural gradient, and back until it improves and stays in the region."""
        config, parameters = self.config, list(self.policy.parameters())
        advantage = normalize(batch.advantage) if config.normalize_advantages else batch.advantage
        with torch.no_grad():
            old = self.policy(batch.obs)
        new = self.policy(batch.obs)
        loss = trpo_loss(new.log_prob(batch.action), batch.log_prob, advantage)
        gradient = -flatten(torch.autograd.grad(loss, parameters, retain_graph=True))
        fisher = fisher_product(mean_kl(old, new), parameters, config.damping)
        direction = conjugate_gradient(fisher, gradient, config.cg_iterations)
        step = largest_step(fisher, direction, config.target_kl)
        start = flatten(parameters).detach()

        def attempt(fraction: float) -> tuple[Tensor, Tensor]:
            """Go this fraction of the step; return the improvement and the KL divergence."""
            # Not 0 times the step, which is no zero if the step is infinite.
            set_parameters(parameters, start + fraction * step if fraction > 0 else start)
            new = self.policy(batch.obs)
            new_loss = trpo_loss(new.log_prob(batch.action), batch.log_prob, advantage)
            return (loss - new_loss).detach(), mean_kl(old, new).detach()

        fraction, steps = 1.0, 0
        if config.line_search:
            limits = config.target_kl, config.line_search_shrink, config.line_search_steps
            fraction, steps = line_search(attempt, *limits)
        improvement, kl = attempt(fraction)  # 0 is back to the start
        return {
            "policy_loss": loss.detach() - improvement,
            "improvement": improvement,
            "kl": kl,
            "line_search_steps": torch.tensor(float(steps)),
            "accepted": torch.tensor(float(fraction > 0)),
            "entropy": self.policy(batch.obs).entropy().detach().mean(),
        }

    def compute_gradients(self, batch: RolloutBatch) -> Metrics:
        """Backpropagate the loss of the values."""
        loss = value_loss(self.value_network(batch.obs), batch.returns)
        loss.backward()
        return {"value_loss": loss.detach()}

    def update(self, batch: RolloutBatch) -> UpdateResult:
        """Take one step of the policy, then train the values on the rollout for some epochs."""
        config = self.config
        metrics = self.update_policy(batch)
        metrics["explained_variance"] = explained_variance(batch.value, batch.returns)
        set_learning_rate(self.optimizer, config.lr_now(self.global_step))
        for _ in range(config.value_epochs):
            order = self.generator.permutation(len(batch))
            for indices in torch.from_numpy(order).to(self.device).split(config.minibatch_size):
                self.optimizer.zero_grad()
                metrics |= self.compute_gradients(batch[indices])
                self.optimizer.step()
        metrics["loss"] = metrics["policy_loss"] + metrics["value_loss"]
        return UpdateResult(metrics)


def train_trpo(config: TRPOConfig, progress: bool = True, callbacks: Callbacks = ()) -> RunResult:
    """Train TRPO with these settings."""
    return train(TRPO(config=config), progress, callbacks)
