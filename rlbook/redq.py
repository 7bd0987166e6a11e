"""Made from book/redq.py: edit the chapter, then run `rlbook tangle`."""

__all__ = ["REDQ", "REDQConfig", "random_subset", "train_redq"]

# %% book/redq.py · REDQ: many updates for each step
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlbook.callbacks import Callbacks
from rlbook.run import RunResult, train
from rlbook.sac import SAC, SACConfig
from rlbook.settings import Config


# %% book/redq.py · The random subset
def random_subset(num_critics: int, size: int, generator: np.random.Generator) -> Tensor:
    """Draw `size` different indices below `num_critics`, each set as likely as any other."""
    return torch.from_numpy(generator.permutation(num_critics)[:size])


# %% book/redq.py · Settings
class REDQConfig(SACConfig):
    """The settings of REDQ: those of SAC, more critics and more updates for each step."""

    num_critics: int = Field(default=10, ge=1, description="Critics in the ensemble (N).")
    subset_size: int = Field(default=2, ge=1, description="Critics sampled for each target (M).")
    gradient_steps: int = Field(
        default=20, ge=1, description="Updates after each 'train_frequency' steps (UTD)."
    )
    policy_delay: int = Field(
        default=20, ge=1, description="Critic updates per update of the actor."
    )
    actor_value: Literal["mean", "min"] = Field(
        default="mean",
        description="What the actor maximises: the mean or the minimum of the critics.",
    )

    @model_validator(mode="after")
    def check_subset_fits(self) -> Self:
        """Raise unless there are enough critics for the subset."""
        if self.subset_size > self.num_critics:
            raise ValueError(
                f"Setting 'subset_size' ({self.subset_size}) must not exceed 'num_critics' "
                f"({self.num_critics})."
            )
        return self


# %% book/redq.py · The agent
class REDQ(SAC):
    """SAC with an ensemble of critics, a random few of them in each target."""

    name: ClassVar[str] = "redq"
    config_class: ClassVar[type[Config]] = REDQConfig
    config: REDQConfig

    def choose_critics(self) -> Tensor:
        """Draw the target critics whose minimum is in the target of this update."""
        subset = random_subset(self.config.num_critics, self.config.subset_size, self.generator)
        return subset.to(self.device)

    def actor_value(self, q: Tensor) -> Tensor:
        """Return what the actor maximises (batch,): the mean of q (batch, critics)."""
        return q.mean(dim=1) if self.config.actor_value == "mean" else super().actor_value(q)


def train_redq(config: REDQConfig, progress: bool = True, callbacks: Callbacks = ()) -> RunResult:
    """Train REDQ with these settings."""
    return train(REDQ(config=config), progress, callbacks)
