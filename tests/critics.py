"""What the tests of SAC and REDQ share: inputs of their targets and losses, gradients."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def random_loss_inputs(
    seed: int, batch: int, critics: int, subset: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Values (batch, critics) and what makes their target, a third of the steps terminated."""
    generator = np.random.default_rng(seed)
    q = torch.from_numpy(generator.normal(size=(batch, critics)))
    numbers: dict[str, Any] = {
        "reward": generator.normal(size=batch),
        "discount": generator.uniform(0.9, 1, size=batch),
        "terminated": generator.random(batch) < 1 / 3,
        "next_q": generator.normal(size=(batch, subset)),
        "next_log_prob": generator.normal(size=batch),
        "alpha": np.array(0.3),
    }
    return q, {name: torch.from_numpy(np.asarray(value)) for name, value in numbers.items()}


def gradients(module: nn.Module) -> list[Tensor]:
    """Copies of the gradients of all parameters that have one."""
    found = [parameter.grad for parameter in module.parameters()]
    return [gradient.clone() for gradient in found if gradient is not None]
