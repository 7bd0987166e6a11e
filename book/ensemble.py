# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Ensembles: several networks as one
#
# The agents of the next chapters ask several critics for their opinion: SAC two, REDQ ten. You
# could keep a list of networks. Here you build one object that holds them all, with its forward
# and its backward pass written out, because the critics are where those agents spend their time.
# At the end you have networks side by side whose weights are the rows of one matrix, and a
# gradient that you derived yourself.
#
# | | |
# |---|---|
# | the same as [the MLP of DQN](dqn.ipynb) | linear layers with ReLU between them |
# | different | many networks at once; one tensor of weights; the backward pass by hand |

# %%
#| export
import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

# %% [markdown]
# The cells that are not part of the library need a little more.

# %%
import time

import matplotlib.pyplot as plt
import numpy as np

from rlbook.agent import torch_for_learning
from rlbook.dqn import MLP
from rlbook.figures import COLORS, PALETTE, use_style

use_style()

# %% [markdown]
# ## One matrix for all weights
#
# Each network, a *member*, is a row, in which lie all its weights and biases, layer after layer.
# Views of the matrix are the layers, `(members, inputs, outputs)`, and one batched product serves
# all members. An optimiser then has one tensor to move, target networks follow in one operation,
# and a few members are a few rows.
#
# By hand: layers of 2 → 1 and 1 → 1 have $2 + 1$ and $1 + 1$ numbers, together 5, so two members
# are a matrix of 2 × 5.

# %%
#| export
Sizes = tuple[tuple[int, int], ...]  # inputs and outputs of each layer


def unpack(weights: Tensor, sizes: Sizes) -> list[tuple[Tensor, Tensor]]:
    """View rows of weights, one a member, as weight (members, inputs, outputs) and bias a layer."""
    counts = [count for inputs, outputs in sizes for count in (inputs * outputs, outputs)]
    parts = iter(weights.split(counts, dim=1))
    return [(next(parts).view(-1, *size), next(parts).unsqueeze(1)) for size in sizes]

# %%
rows = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 2.0, 0.0]])
SIZES = ((2, 1), (1, 1))
(first, first_bias), (last, last_bias) = unpack(rows, SIZES)
assert first.shape == (2, 2, 1) and first_bias.shape == (2, 1, 1)
assert last.flatten().tolist() == [1.0, 2.0]
first_bias += 0.5  # a view: the row changes with it
assert rows[:, 2].tolist() == [0.5, 0.5]
first_bias -= 0.5

# %% [markdown]
# ## Forward
#
# Every member sees the same inputs. The pass keeps the input of each layer, $h_0 = x$, $h_1$, …,
# because the way back needs them. Two details are for speed. ReLU works in place. And the last
# layer is computed as rows, $w^\top h^\top$: for one or two outputs that is several times as fast
# as $h\,w$, a matrix times a thin column.
#
# By hand, with the two rows above: for $x = (0.5, 0.25)$ the hidden unit is 0.75, so the members
# say 0.75 and 1.5; for $x = (0.5, -1)$ ReLU is shut and both say 0.

# %%
#| export
def ensemble_forward(x: Tensor, weights: Tensor, sizes: Sizes) -> tuple[Tensor, list[Tensor]]:
    """Return outputs (members, batch, outputs) for x (batch, inputs), and the layers' inputs."""
    *hidden, (last, last_bias) = unpack(weights, sizes)
    kept = [x.expand(len(weights), *x.shape)]  # (members, batch, inputs), not copied
    for weight, bias in hidden:
        kept.append(torch.baddbmm(bias, kept[-1], weight).relu_())
    return torch.baddbmm(last_bias.mT, last.mT, kept[-1].mT).mT, kept

# %%
x = torch.tensor([[0.5, 0.25], [0.5, -1.0]])
out, kept = ensemble_forward(x, rows, SIZES)
assert out.squeeze(2).tolist() == [[0.75, 0.0], [1.5, 0.0]]  # (members, batch)
assert kept[1].squeeze(2).tolist() == [[0.75, 0.0], [0.75, 0.0]]

# %% [markdown]
# ## Backward
#
# Say you know $\delta$, the slope of a loss with respect to the outputs. The chain rule goes back
# layer by layer. With $h$ the input of a layer and $\delta$ the slope at its output,
#
# $$\frac{\partial}{\partial W} = h^\top \delta, \qquad
# \frac{\partial}{\partial b} = \sum_{\text{batch}} \delta, \qquad
# \delta \leftarrow \delta\, W^\top \text{, and zero where ReLU was shut } (h = 0).$$
#
# Both gradients are wanted when critics learn; when they only judge, while a policy learns, the
# slope with respect to their input is enough, and the gradients of the weights, a third of all
# products, are never computed.
#
# By hand: let the loss be the sum of all outputs, so $\delta = 1$. The second example has ReLU
# shut. For the first, the slope with respect to $x$ is $(1, 1)$ in the first member and $(2, 2)$
# in the second, in sum $(3, 3)$. The second member's output weight gets its input, 0.75, its
# output bias gets 2, one for each example, and its first layer gets $2x = (1, 0.5)$ and 2.

# %%
#| export
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

# %%
slope_x, slope_rows = ensemble_backward(torch.ones_like(out), kept, rows, SIZES, wants_x=True)
assert slope_x.tolist() == [[3.0, 3.0], [0.0, 0.0]]
assert slope_rows[1].tolist() == [1.0, 0.5, 2.0, 0.75, 2.0]

# %% [markdown]
# ## For autograd, too
#
# Where a network is one part of a larger computation, autograd should call these two functions by
# itself. That takes a class with a `forward`, which leaves in `ctx` what `backward` needs:

# %%
#| export
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

# %% [markdown]
# That the passes are right for any sizes is checked against finite differences:

# %%
WIDE = tuple(pairwise((5, 7, 6, 2)))
numbers = sum((inputs + 1) * outputs for inputs, outputs in WIDE)
pair = (torch.randn(6, 5).double().requires_grad_(), torch.randn(4, numbers).double())
assert torch.autograd.gradcheck(EnsembleFunction.apply, (pair[0], pair[1].requires_grad_(), WIDE))

# %% [markdown]
# ## The module
#
# `Ensemble` owns the matrix. Weights start as those of `nn.Linear` do, uniform within
# $1/\sqrt{\text{inputs}}$. `outputs` is for autograd, and computes only the `chosen` members if
# you name some; `run` and the two kinds of slopes are for going through by hand.

# %%
#| export
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
