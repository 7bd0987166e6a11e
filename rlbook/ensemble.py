"""Made from book/ensemble.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "Ensemble",
    "EnsembleFunction",
    "Groups",
    "Layers",
    "Sizes",
    "Slope",
    "backward_pass",
    "forward_pass",
    "unpack",
]

# %% book/ensemble.py · Ensembles: several networks as one
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

# %% book/ensemble.py · One matrix for all weights
Sizes = tuple[tuple[int, int], ...]  # inputs and outputs of each layer
Layers = list[tuple[Tensor, Tensor]]  # weight (..., inputs, outputs) and bias (..., 1, outputs)


def unpack(weights: Tensor, sizes: Sizes) -> Layers:
    """View a row of weights, or a matrix with a row for each member, as layers."""
    counts = [count for inputs, outputs in sizes for count in (inputs * outputs, outputs)]
    parts = iter(weights.split(counts, dim=-1))
    return [(next(parts).unflatten(-1, size), next(parts).unsqueeze(-2)) for size in sizes]


# %% book/ensemble.py · Forward
def forward_pass(x: Tensor, layers: Layers) -> tuple[Tensor, list[Tensor]]:
    """Return outputs (..., batch, outputs) for x (batch, inputs), and the layers' inputs."""
    apart = layers[0][0].ndim == 2  # one network, without a dimension for members
    multiply: Callable[..., Tensor] = torch.mm if apart else torch.bmm
    out = x if apart else x.expand(len(layers[0][0]), *x.shape)  # not copied
    kept: list[Tensor] = []
    for weight, bias in layers:
        kept.append(out.relu_() if kept else out)
        out = multiply(kept[-1], weight).add_(bias)
    return out, kept


# %% book/ensemble.py · Backward
def backward_pass(
    delta: Tensor,  # (..., batch, outputs), the slope of the loss at the outputs
    kept: list[Tensor],
    layers: Layers,
    slots: Layers | None = None,
    wants_x: bool = False,
) -> Tensor:
    """Write the slopes of the weights into the slots; return those at x if they are wanted."""
    multiply: Callable[..., Tensor] = torch.mm if delta.ndim == 2 else torch.bmm
    last = len(layers) - 1
    for i in range(last, -1, -1):
        weight = layers[i][0]
        if slots:
            slot, bias_slot = slots[i]
            if i == last:  # a few columns: quicker as rows
                multiply(delta.mT, kept[i], out=slot.mT)
            else:
                multiply(kept[i].mT, delta, out=slot)
            torch.sum(delta, dim=-2, keepdim=True, out=bias_slot)
        if i or wants_x:
            delta = delta * weight.mT if delta.shape[-1] == 1 else multiply(delta, weight.mT)
        if i:  # where ReLU was shut, nothing passes
            shut = torch.ops.aten.threshold_backward.grad_input
            shut(delta, kept[i], 0, grad_input=delta)
    return delta


# %% book/ensemble.py · For autograd, too
class EnsembleFunction(torch.autograd.Function):
    """The two passes, as one operation that autograd knows how to go back through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, sizes: Sizes) -> Tensor:
        """Run all members on the same inputs."""
        out, kept = forward_pass(x, unpack(weights, sizes))
        ctx.save_for_backward(weights, *kept)
        ctx.sizes = sizes
        return out

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        """Return the slopes with respect to inputs and weights, but for those nobody wants."""
        weights, *kept = ctx.saved_tensors
        wants_x, wants_weights = ctx.needs_input_grad[:2]
        gradient = torch.empty_like(weights) if wants_weights else None
        slots = None if gradient is None else unpack(gradient, ctx.sizes)
        slope = backward_pass(delta, kept, unpack(weights, ctx.sizes), slots, wants_x)
        return (slope.sum(dim=0) if wants_x else None), gradient, None


# %% book/ensemble.py · Together or one by one
Slope = Callable[[Tensor], Tensor]  # from outputs (..., batch, outputs) to a slope there


class Groups:
    """Rows of weights as the networks that go through the passes together."""

    def __init__(self, weights: Tensor, sizes: Sizes) -> None:
        widest = max(outputs for _, outputs in sizes)
        self.apart = len(weights) < 3 or widest >= 128  # few or wide: found by timing both ways
        rows = weights.detach()
        self.layers = [unpack(part, sizes) for part in (rows.unbind() if self.apart else [rows])]

    def chosen(self, members: list[int]) -> list[Layers]:
        """Return the layers of some members."""
        if self.apart:
            return [self.layers[member] for member in members]
        return [[(weight[members], bias[members]) for weight, bias in self.layers[0]]]

    def join(self, outputs: list[Tensor]) -> Tensor:
        """Return what the groups said as (members, batch, outputs)."""
        return torch.stack(outputs) if self.apart else outputs[0]

    def forward(self, x: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
        """Return the outputs (members, batch, outputs) and what each group kept."""
        passes = [forward_pass(x, layers) for layers in self.layers]
        return self.join([out for out, _ in passes]), [kept for _, kept in passes]

    def backward(
        self, delta: Tensor, kept: list[list[Tensor]], slots: "Groups | None" = None
    ) -> list[Tensor]:
        """Write the slopes of the weights into the slots, or return those at the inputs."""
        deltas = delta.unbind() if self.apart else [delta]
        wanted = slots.layers if slots else [None] * len(deltas)
        passes = zip(deltas, kept, self.layers, wanted, strict=True)
        return [backward_pass(*each, wants_x=slots is None) for each in passes]

    def learn(self, x: Tensor, slope: Slope, slots: "Groups") -> Tensor:
        """Write the slopes of the weights into the slots, group by group; return the outputs."""
        outputs = []
        for layers, wanted in zip(self.layers, slots.layers, strict=True):
            out, kept = forward_pass(x, layers)
            backward_pass(slope(out), kept, layers, wanted)
            outputs.append(out)
        return self.join(outputs)


# %% book/ensemble.py · The module
class Ensemble(nn.Module):
    """Networks of the same widths side by side; the weights of each are a row of one matrix."""

    def __init__(self, widths: tuple[int, ...], members: int) -> None:
        super().__init__()
        self.sizes: Sizes = tuple(pairwise(widths))
        bounds = [(1 / math.sqrt(n), (n + 1) * m) for n, m in self.sizes]
        rows = [torch.empty(members, count).uniform_(-bound, bound) for bound, count in bounds]
        self.weights = nn.Parameter(torch.cat(rows, dim=1))  # (members, weights of one)
        self.views: tuple[int, Tensor, Groups, Groups] | None = None

    def groups(self) -> tuple[Tensor, Groups, Groups]:
        """Return the gradient, and views of weights and gradient, made anew if they moved."""
        where = self.weights.data_ptr()
        if self.views is None or self.views[0] != where:
            gradient = torch.zeros_like(self.weights.detach())
            views = Groups(self.weights, self.sizes), Groups(gradient, self.sizes)
            self.views = where, gradient, *views
        return self.views[1:]

    def outputs(self, x: Tensor, chosen: Tensor | None = None, learn: bool = True) -> Tensor:
        """Return the outputs (members, batch, outputs); without `learn` the weights are fixed."""
        weights = self.weights if learn else self.weights.detach()
        weights = weights if chosen is None else weights[chosen]
        return EnsembleFunction.apply(x, weights, self.sizes)

    @torch.no_grad()
    def values(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Return the outputs of all or the chosen members, and keep nothing."""
        groups = self.groups()[1]
        layers = groups.layers if chosen is None else groups.chosen(chosen.tolist())
        return groups.join([forward_pass(x, group)[0] for group in layers])

    @torch.no_grad()
    def learn(self, x: Tensor, slope: Slope) -> Tensor:
        """Find the gradient of a loss with this slope at the outputs, and return those."""
        gradient, weights, slots = self.groups()
        self.weights.grad = gradient
        return weights.learn(x, slope, slots)

    @torch.no_grad()
    def run(self, x: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
        """Return the outputs, and what the way back needs."""
        return self.groups()[1].forward(x)

    @torch.no_grad()
    def weight_slopes(self, delta: Tensor, kept: list[list[Tensor]]) -> Tensor:
        """Return the slopes at the weights, in a tensor that the next call writes over."""
        gradient, weights, slots = self.groups()
        weights.backward(delta, kept, slots)
        return gradient

    @torch.no_grad()
    def input_slopes(self, delta: Tensor, kept: list[list[Tensor]]) -> Tensor:
        """Return the slopes (batch, inputs) at the inputs, summed over members."""
        slopes = self.groups()[1].backward(delta, kept)
        return sum(slopes[1:], slopes[0]) if slopes[0].ndim == 2 else slopes[0].sum(dim=0)
