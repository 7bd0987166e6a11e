"""Made from book/ensemble.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "Ensemble",
    "EnsembleFunction",
    "Sizes",
    "ensemble_backward",
    "ensemble_forward",
    "unpack",
]

# %% book/ensemble.py · Ensembles: several networks as one
import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

# %% book/ensemble.py · One matrix for all weights
Sizes = tuple[tuple[int, int], ...]  # inputs and outputs of each layer


def unpack(weights: Tensor, sizes: Sizes) -> list[tuple[Tensor, Tensor]]:
    """View rows of weights, one a member, as weight (members, inputs, outputs) and bias a layer."""
    counts = [count for inputs, outputs in sizes for count in (inputs * outputs, outputs)]
    parts = iter(weights.split(counts, dim=1))
    return [(next(parts).view(-1, *size), next(parts).unsqueeze(1)) for size in sizes]


# %% book/ensemble.py · Forward
def ensemble_forward(x: Tensor, weights: Tensor, sizes: Sizes) -> tuple[Tensor, list[Tensor]]:
    """Return outputs (members, batch, outputs) for x (batch, inputs), and the layers' inputs."""
    *hidden, (last, last_bias) = unpack(weights, sizes)
    kept = [x.expand(len(weights), *x.shape)]  # (members, batch, inputs), not copied
    for weight, bias in hidden:
        kept.append(torch.baddbmm(bias, kept[-1], weight).relu_())
    return torch.baddbmm(last_bias.mT, last.mT, kept[-1].mT).mT, kept


# %% book/ensemble.py · Backward
def ensemble_backward(
    delta: Tensor,  # (members, batch, outputs), the slope of the loss at the outputs
    kept: list[Tensor],
    weights: Tensor,
    sizes: Sizes,
    wants_x: bool = False,
    wants_weights: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the slopes with respect to x (batch, inputs) and to the weights, empty if unwanted."""
    layers, last = unpack(weights, sizes), len(sizes) - 1
    gradient = torch.empty_like(weights) if wants_weights else weights.new_empty(0)
    slots = unpack(gradient, sizes) if wants_weights else []
    for i in reversed(range(len(layers))):
        weight = layers[i][0]
        if slots:
            slot, bias_slot = slots[i]
            if i == last:  # thin: rows again
                torch.bmm(delta.mT, kept[i], out=slot.mT)
            else:
                torch.bmm(kept[i].mT, delta, out=slot)
            torch.sum(delta, dim=1, keepdim=True, out=bias_slot)
        if i or wants_x:
            delta = delta * weight.mT if delta.shape[2] == 1 else torch.bmm(delta, weight.mT)
        if i:  # where ReLU was shut, nothing passes
            shut = torch.ops.aten.threshold_backward.grad_input
            shut(delta, kept[i], 0, grad_input=delta)
    return (delta.sum(dim=0) if wants_x else weights.new_empty(0)), gradient


# %% book/ensemble.py · For autograd, too
class EnsembleFunction(torch.autograd.Function):
    """The two passes, as one operation that autograd knows how to go back through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, sizes: Sizes) -> Tensor:
        """Run all members on the same inputs."""
        out, kept = ensemble_forward(x, weights, sizes)
        ctx.save_for_backward(weights, *kept)
        ctx.sizes = sizes
        return out

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        """Return the slopes with respect to inputs and weights, but for those nobody wants."""
        weights, *kept = ctx.saved_tensors
        wants = ctx.needs_input_grad[:2]
        slopes = ensemble_backward(delta, kept, weights, ctx.sizes, *wants)
        return *(slope if want else None for slope, want in zip(slopes, wants, strict=True)), None


# %% book/ensemble.py · The module
class Ensemble(nn.Module):
    """Networks of the same widths side by side; the weights of each are a row of one matrix."""

    def __init__(self, widths: tuple[int, ...], members: int) -> None:
        super().__init__()
        self.sizes: Sizes = tuple(pairwise(widths))
        bounds = [(1 / math.sqrt(n), (n + 1) * m) for n, m in self.sizes]
        rows = [torch.empty(members, count).uniform_(-bound, bound) for bound, count in bounds]
        self.weights = nn.Parameter(torch.cat(rows, dim=1))  # (members, weights of one)

    def outputs(self, x: Tensor, chosen: Tensor | None = None, learn: bool = True) -> Tensor:
        """Return the outputs (members, batch, outputs); without `learn` the weights are fixed."""
        weights = self.weights if learn else self.weights.detach()
        weights = weights if chosen is None else weights[chosen]
        return EnsembleFunction.apply(x, weights, self.sizes)

    @torch.no_grad()
    def run(self, x: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs of all or the chosen members, and what the way back needs."""
        weights = self.weights if chosen is None else self.weights[chosen]
        return ensemble_forward(x, weights, self.sizes)

    @torch.no_grad()
    def weight_slopes(self, delta: Tensor, kept: list[Tensor]) -> Tensor:
        """Return the slopes with respect to the weights."""
        return ensemble_backward(delta, kept, self.weights, self.sizes)[1]

    @torch.no_grad()
    def input_slopes(self, delta: Tensor, kept: list[Tensor]) -> Tensor:
        """Return the slopes (batch, inputs) with respect to the inputs, summed over members."""
        return ensemble_backward(delta, kept, self.weights, self.sizes, True, False)[0]
