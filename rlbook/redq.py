"""Made from book/redq.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "REDQ",
    "REDQConfig",
    "REDQModel",
    "disagreement",
    "random_subset",
    "redq_loss",
    "train_redq",
]

# %% book/redq.py · REDQ
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rlbook.run import RunResult, train
from rlbook.sac import SAC, SACConfig, SACModel, sac_loss
from rlbook.settings import Config, setting


# %% book/redq.py · The model
def disagreement(q: Tensor) -> float:
    """Return the standard deviation between the critics, averaged over the batch."""
    return float(q.detach().cpu().numpy().std(axis=1).mean())


class REDQModel(SACModel):
    """SAC's actor, and an ensemble of critics whose mean the policy maximises."""

    def __init__(
        self,
        inputs: int,
        actions: int,
        hidden: tuple[int, ...],
        num_critics: int = 10,
        policy_value: str = "mean",
    ) -> None:
        super().__init__(inputs, actions, hidden, num_critics)
        self.policy_value = policy_value

    def share(self, q: Tensor) -> Tensor:
        """Return how much each critic (batch, critics) counts for the policy: all the same."""
        if self.policy_value == "lowest":  # SAC's way, to compare with
            return super().share(q)
        return torch.full_like(q, 1 / q.shape[1])

    def opinions(self, q: Tensor) -> dict[str, float]:
        """Return how much the critics disagree."""
        return {"q_std": disagreement(q)}


# %% book/redq.py · The random subset
def random_subset(members: int, size: int, generator: torch.Generator) -> Tensor:
    """Draw `size` different indices below `members`, each set as likely as any other."""
    return torch.randperm(members, generator=generator, device=generator.device)[:size]


# %% book/redq.py · The loss
def redq_loss(
    q: Tensor,  # (batch, num_critics), with gradient
    reward: Tensor,  # (batch,)
    discount: Tensor,  # (batch,)
    terminated: Tensor,  # (batch,)
    next_q: Tensor,  # (batch, subset_size), of the chosen target critics alone
    next_log_prob: Tensor,  # (batch,)
    alpha: Tensor | float,
) -> tuple[Tensor, dict[str, float]]:
    """Return SAC's loss, with the smallest value of the subset in the target, and named metrics."""
    loss, metrics = sac_loss(q, reward, discount, terminated, next_q, next_log_prob, alpha)
    return loss, metrics | {"q_std": disagreement(q)}


# %% book/redq.py · Settings
@dataclass(kw_only=True)
class REDQConfig(SACConfig):
    """The settings of REDQ: those of SAC, more critics and more updates per step."""

    num_critics: int = setting(10, "Critics in the ensemble (N).", low=1)
    subset_size: int = setting(2, "Critics drawn for each target (M).", low=1)
    updates_per_step: int = setting(20, "Updates per environment step (UTD).", low=1)
    policy_delay: int = setting(20, "Updates of the critics per update of the policy.", low=1)
    policy_value: Literal["mean", "lowest"] = setting("mean", "Value that the policy climbs.")

    def check(self) -> None:
        """Raise where settings contradict each other."""
        super().check()
        if self.subset_size > self.num_critics:
            raise ValueError(
                f"Setting 'subset_size' ({self.subset_size}) must not exceed 'num_critics' "
                f"({self.num_critics})."
            )


# %% book/redq.py · The agent
class REDQ(SAC):
    """SAC with an ensemble of critics, a random few of them in each target."""

    name: ClassVar[str] = "redq"
    config_class: ClassVar[type[Config]] = REDQConfig
    config: REDQConfig

    def make_model(self, inputs: int, actions: int) -> REDQModel:
        """Make actor and critics."""
        config = self.config
        sizes = inputs, actions, config.hidden, config.num_critics
        return REDQModel(*sizes, config.policy_value)

    def choose_critics(self) -> Tensor:
        """Draw the target critics that judge the next action in this update."""
        return random_subset(self.config.num_critics, self.config.subset_size, self.noise.generator)


def train_redq(config: REDQConfig, progress: bool = True) -> RunResult:
    """Train REDQ with these settings."""
    return train(REDQ(config=config), progress)
