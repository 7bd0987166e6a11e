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
from collections.abc import Callable
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
# ## The problem: ten networks, ten times the fuss
#
# A list of networks is the first thing to try, and it works. But each network brings its own dozen
# of operations, forward, backward and in the optimiser, and each operation costs some microseconds
# before it has multiplied anything. Count the tensors that an optimiser has to visit for ten
# critics, and time one gradient for a batch of 128:

# %%
WIDTHS, BATCH = (14, 64, 64, 1), 128


def list_gradient(networks: list[MLP], x: torch.Tensor) -> None:
    """Find the gradient of the sum of squares of all outputs, network by network."""
    loss = torch.stack([network(x).square().sum() for network in networks]).sum()
    for network in networks:
        network.zero_grad()
    loss.backward()


def milliseconds(work: Callable[[], object], repeat: int = 30) -> float:
    """Return the median time of one call on one core."""
    times = []
    with torch_for_learning(1):
        for _ in range(repeat):
            began = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - began))
    return float(np.median(times))


networks, x = [MLP(WIDTHS) for _ in range(10)], torch.randn(BATCH, WIDTHS[0])
print(sum(len(list(network.parameters())) for network in networks), "tensors of weights,",
      f"{milliseconds(lambda: list_gradient(networks, x)):.2f} ms for one gradient")

# %% [markdown]
# ## One matrix for all weights
#
# Each network, a *member*, is a row, in which lie all its weights and biases, layer after layer.
# The layers are views of the matrix. An optimiser then has one tensor to move, target networks
# follow in one operation, and a few members are a few rows.
#
# By hand: layers of 2 → 1 and 1 → 1 have $2 + 1$ and $1 + 1$ numbers, together 5, so two members
# are a matrix of 2 × 5. Unpack one row, and you have the layers of one network; unpack the matrix,
# and each layer has one dimension more, `(members, inputs, outputs)`.

# %%
#| export
Sizes = tuple[tuple[int, int], ...]  # inputs and outputs of each layer
Layers = list[tuple[Tensor, Tensor]]  # weight (..., inputs, outputs) and bias (..., 1, outputs)


def unpack(weights: Tensor, sizes: Sizes) -> Layers:
    """View a row of weights, or a matrix with a row for each member, as layers."""
    counts = [count for inputs, outputs in sizes for count in (inputs * outputs, outputs)]
    parts = iter(weights.split(counts, dim=-1))
    return [(next(parts).unflatten(-1, size), next(parts).unsqueeze(-2)) for size in sizes]

# %%
rows = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 2.0, 0.0]])
SIZES = ((2, 1), (1, 1))
(first, first_bias), (last, last_bias) = unpack(rows, SIZES)
assert first.shape == (2, 2, 1) and first_bias.shape == (2, 1, 1)
assert last.flatten().tolist() == [1.0, 2.0]
assert unpack(rows[0], SIZES)[0][0].shape == (2, 1)
first_bias += 0.5  # a view: the row changes with it
assert rows[:, 2].tolist() == [0.5, 0.5]
first_bias -= 0.5

# %% [markdown]
# ## Forward
#
# Every member sees the same inputs. The pass keeps the input of each layer, $x_0 = x$, $x_1$, …,
# because the way back needs them. ReLU works in place, between the layers and not after the last.
# The same lines serve one network and many: `bmm` is `mm`, a product of matrices, for a stack of
# them. The bias is added in place. (`addmm` would do both, but copies the bias into all rows first,
# and for wide layers that takes longer.)
#
# By hand, with the two rows above: for $x = (0.5, 0.25)$ the hidden unit is 0.75, so the members
# say 0.75 and 1.5; for $x = (0.5, -1)$ ReLU is shut and both say 0.

# %%
#| export
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

# %%
x = torch.tensor([[0.5, 0.25], [0.5, -1.0]])
out, kept = forward_pass(x, unpack(rows, SIZES))
assert out.squeeze(2).tolist() == [[0.75, 0.0], [1.5, 0.0]]  # (members, batch)
assert kept[1].squeeze(2).tolist() == [[0.75, 0.0], [0.75, 0.0]]
assert forward_pass(x, unpack(rows[1], SIZES))[0].tolist() == [[1.5], [0.0]]  # one network

# %% [markdown]
# ## Backward
#
# Say you know $\delta$, the slope of a loss with respect to the outputs. The chain rule goes back
# layer by layer. With $x$ the input of a layer and $\delta$ the slope at its output,
#
# $$\frac{\partial L}{\partial W} = x^\top \delta, \qquad
# \frac{\partial L}{\partial b} = \sum_{\text{batch}} \delta, \qquad
# \delta \leftarrow \delta\, W^\top \text{, and zero where ReLU was shut } (x = 0).$$
#
# Here a weight is (inputs, outputs) and a batch has its samples in rows; in DQN's `nn.Linear` it is
# (outputs, inputs).
#
# Both gradients are wanted when critics learn; when they only judge, while a policy learns, the
# slope with respect to their input is enough, and the gradients of the weights, a third of all
# products, are never computed. So the pass writes the gradients into `slots`, layers of the same
# shapes, if you give it any, and goes on to the input if you ask for it.
#
# By hand: let the loss be the sum of all outputs, so $\delta = 1$. The second example has ReLU
# shut. For the first, the slope with respect to $x$ is $(1, 1)$ in the first member and $(2, 2)$
# in the second. The second member's output weight gets its input, 0.75, its output bias gets 2, one
# for each example, and its first layer gets $2x = (1, 0.5)$ and 2.

# %%
#| export
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

# %%
slopes = torch.empty_like(rows)
slope_x = backward_pass(torch.ones_like(out), kept, unpack(rows, SIZES), unpack(slopes, SIZES), True)
assert slope_x[0].tolist() == [[1.0, 1.0], [0.0, 0.0]]
assert slope_x[1].tolist() == [[2.0, 2.0], [0.0, 0.0]]
assert slopes[1].tolist() == [1.0, 0.5, 2.0, 0.75, 2.0]

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

# %% [markdown]
# That the passes are right for any sizes is checked against finite differences:

# %%
WIDE = tuple(pairwise((5, 7, 6, 2)))
numbers = sum((inputs + 1) * outputs for inputs, outputs in WIDE)
pair = (torch.randn(6, 5).double().requires_grad_(), torch.randn(4, numbers).double())
assert torch.autograd.gradcheck(EnsembleFunction.apply, (pair[0], pair[1].requires_grad_(), WIDE))

# %% [markdown]
# ## Together or one by one
#
# A batched product saves operations, which is what counts while networks are small. When they are
# wide, something else counts: the numbers on the way, 256 × 256 for each member and layer, no longer
# fit into the fast part of the processor's memory if all members go through a layer before any of
# them goes on. Then it is quicker to take one member from start to end, and then the next. So an
# ensemble cuts its rows into groups: all members together, or each alone if they are wide or few.
# Views are made once, not in each pass.
#
# For the same reason a group that learns goes forward and back before the next one starts, if its
# loss does not depend on what the others say: `learn` is told how to find the slope from the outputs.

# %%
#| export
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

# %% [markdown]
# ## The module
#
# `Ensemble` owns the matrix, and a second one for the gradient. Weights start as those of
# `nn.Linear` do, uniform within $1/\sqrt{\text{inputs}}$. `outputs` is for autograd, and computes
# only the `chosen` members if you name some; `values` does the same without autograd. `learn` finds
# the gradient of a loss; `run` and the two kinds of slopes are for going through by hand.

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

# %%
for widths in ((5, 8, 8, 1), (5, 128, 128, 1)):  # together, and one by one
    ensemble = Ensemble(widths, members=3)
    x = torch.randn(6, 5)
    assert ensemble.outputs(x).shape == (3, 6, 1)
    few = torch.tensor([2, 0])
    torch.testing.assert_close(ensemble.outputs(x, few), ensemble.outputs(x)[few])
    torch.testing.assert_close(ensemble.values(x, few), ensemble.outputs(x)[few].detach())
    ensemble.outputs(x).square().sum().backward()
    expected, (out, kept) = ensemble.weights.grad, ensemble.run(x)
    torch.testing.assert_close(ensemble.weight_slopes(2 * out, kept), expected)
    torch.testing.assert_close(ensemble.learn(x, lambda out: 2 * out), out)
    torch.testing.assert_close(ensemble.weights.grad, expected)

# %% [markdown]
# ## What it buys
#
# The same gradient, for one to twenty networks, as a list under autograd and as an ensemble by
# hand. On a CPU a batched product is no faster than a loop of products, since the arithmetic is
# the same: what is saved is everything around it.

# %%
def ensemble_gradient(ensemble: Ensemble, x: torch.Tensor) -> None:
    """Find the gradient of the sum of squares of all outputs, all members at once."""
    ensemble.learn(x, lambda out: 2 * out)


MEMBERS, x = (1, 2, 5, 10, 20), torch.randn(BATCH, WIDTHS[0])
lists = {n: [MLP(WIDTHS) for _ in range(n)] for n in MEMBERS}
whole = {n: Ensemble(WIDTHS, n) for n in MEMBERS}
as_list = [milliseconds(lambda n=n: list_gradient(lists[n], x)) for n in MEMBERS]
as_one = [milliseconds(lambda n=n: ensemble_gradient(whole[n], x)) for n in MEMBERS]
print("the list takes", ", ".join(f"{a / b:.1f}" for a, b in zip(as_list, as_one, strict=True)),
      "times as long")
assert as_one[-1] < as_list[-1]

# %%
fig, ax = plt.subplots()
ax.plot(MEMBERS, as_list, marker="o", color=COLORS["reference"], label="list, autograd")
ax.plot(MEMBERS, as_one, marker="o", color=PALETTE[0], label="ensemble, by hand")
ax.set(xlabel="networks", ylabel="time of one gradient (ms)", xticks=MEMBERS, ylim=(0, None))
ax.legend()
plt.show()

# %% [markdown]
# The advantage is largest for small networks. With two layers of 256 units the products rule, and
# both come close to what the processor can multiply; `make bench` measures that.
#
# ## Honest edges
#
# - Only ReLU, only fully connected layers, and one input for all members.
# - `threshold_backward` is the operation behind the gradient of `torch.relu`; it is called here with
#   an output to write into, to save a pass over memory.
# - On a GPU the batched product itself is faster, so the reasons are different there.
#
# ## Exercises
#
# **Exercise 1.** How many numbers are in a row for the critics of the next chapters on Pendulum,
# with 3 numbers seen, 1 moved, and two layers of 256?
#
# <details>
# <summary>Solution</summary>
#
# $(4 + 1)\cdot 256 + (256 + 1)\cdot 256 + (256 + 1)\cdot 1 = 1280 + 65792 + 257 = 67329$.
#
# ```python
# assert Ensemble((4, 256, 256, 1), members=2).weights.shape == (2, 67_329)
# ```
#
# </details>

# %% [markdown]
# **Exercise 2.** Count the products of a batch with a 256 × 256 matrix that one gradient of one
# member takes with these layers: forward, for the weights, for the way back. Which can be left out
# when the member only judges?
#
# <details>
# <summary>Solution</summary>
#
# One forward, one for the gradient of the middle weights ($x^\top\delta$), one to bring $\delta$
# back through them: three. A member that judges needs the first and the last. The thin first and
# last layers hardly count: they have 1,024 and 256 of 66,816 weights.
#
# ```python
# (first, _), (middle, _), (last, _) = unpack(torch.zeros(1, 67_329), ((4, 256), (256, 256), (256, 1)))
# assert middle.numel() / (first.numel() + middle.numel() + last.numel()) > 0.98
# ```
#
# </details>

# %% [markdown]
# **Exercise 3 (a planted bug).** This backward pass for one hidden layer agrees with autograd on the
# first example and not on the second. What is missing?

# %%
def buggy_slope(x: torch.Tensor, weights: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    (first, _), (last, _) = unpack(weights, sizes)
    delta = torch.ones(len(weights), len(x), 1) * last.mT
    return torch.bmm(delta, first.mT).sum(dim=0)


for example in ([[0.5, 0.25]], [[0.5, -1.0]]):
    x = torch.tensor(example, requires_grad=True)
    EnsembleFunction.apply(x, rows, SIZES).sum().backward()
    print(f"autograd {x.grad.tolist()}, by hand {buggy_slope(x.detach(), rows, SIZES).tolist()}")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The gate: δ has to be zero where ReLU was shut. The first example has the hidden unit open, so it
# cannot tell. A test of a backward pass needs inputs on both sides of every kink, which is why the
# check above takes random numbers of both signs.
#
# ```python
# def buggy_slope(x: torch.Tensor, weights: torch.Tensor, sizes: Sizes) -> torch.Tensor:
#     (first, _), (last, _) = unpack(weights, sizes)
#     hidden = forward_pass(x, unpack(weights, sizes))[1][1]
#     delta = torch.ones(len(weights), len(x), 1) * last.mT * (hidden > 0)
#     return torch.bmm(delta, first.mT).sum(dim=0)
#
# assert buggy_slope(torch.tensor([[0.5, -1.0]]), rows, SIZES).tolist() == [[0.0, 0.0]]
# ```
#
# </details>

# %% [markdown]
# **Exercise 4.** Adding the bias is a pass over memory of its own. Could you do without biases by
# giving every layer's input a last column of ones? What would it cost?
#
# <details>
# <summary>Solution</summary>
#
# Yes: the bias becomes the last row of the weights, and its gradient comes with $x^\top\delta$. But
# the column has to be written into every $x$, and 257 is an awkward width for a processor that
# multiplies eight or sixteen numbers at a time.
#
# ```python
# h, weight, bias = torch.randn(4, 3), torch.randn(3, 2), torch.randn(2)
# with_ones = torch.cat([h, torch.ones(4, 1)], dim=1)
# torch.testing.assert_close(with_ones @ torch.cat([weight, bias[None]]), h @ weight + bias)
# ```
#
# </details>

# %% [markdown]
# ## Use it
#
# ```python
# from rlbook.ensemble import Ensemble
#
# critics = Ensemble((14, 256, 256, 1), members=10)
# critics.outputs(x)                             # (10, batch, 1), for autograd
# critics.learn(x, lambda out: 2 * (out - y))    # y is (batch, 1); leaves the gradient of the
#                                                # squared errors
# ```
#
# ## References
#
# - D. Rumelhart, G. Hinton, R. Williams (1986). Learning representations by back-propagating errors.
#   *Nature* 323.
