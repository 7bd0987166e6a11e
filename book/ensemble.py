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
from typing import Any, NamedTuple

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
# Within a row the bias of a layer comes right after its weights, so that both together are one
# matrix whose last row is the bias. If the input of the layer has a last column of ones, one product
# multiplies by the weights and adds the bias:
#
# $$\begin{pmatrix} x & 1 \end{pmatrix} \begin{pmatrix} W \\ b \end{pmatrix} = x W + b.$$
#
# By hand: layers of 2 → 1 and 1 → 1 have $2 + 1$ and $1 + 1$ numbers, together 5, so two members
# are a matrix of 2 × 5. Unpack one row, and you have the layers of one network; unpack the matrix,
# and each layer has one dimension more, `(members, inputs + 1, outputs)`.

# %%
#| export
Sizes = tuple[tuple[int, int], ...]  # inputs and outputs of each layer


class Layer(NamedTuple):
    """A view of the numbers of one layer."""

    matrix: Tensor  # (..., inputs + 1, outputs), the bias as the last row
    weight: Tensor  # (..., inputs, outputs), the same without the bias
    back: Tensor  # (..., outputs, inputs), for the way back


def as_layer(matrix: Tensor) -> Layer:
    """View a matrix as a layer."""
    weight = matrix[..., :-1, :]
    return Layer(matrix, weight, weight.mT)


def unpack(weights: Tensor, sizes: Sizes) -> list[Layer]:
    """View a row of weights, or a matrix with a row for each member, as layers."""
    shapes = [(inputs + 1, outputs) for inputs, outputs in sizes]
    parts = weights.split([rows * columns for rows, columns in shapes], dim=-1)
    matrices = [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]
    return [as_layer(matrix) for matrix in matrices]


def with_ones(*columns: Tensor) -> Tensor:
    """Put tensors (batch, ...) side by side, and a column of ones beside them."""
    return torch.cat([*columns, columns[0].new_ones(len(columns[0]), 1)], dim=1)

# %%
rows = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 2.0, 0.0]])
SIZES = ((2, 1), (1, 1))
first, last = unpack(rows, SIZES)
assert first.matrix.shape == (2, 3, 1) and first.weight.shape == (2, 2, 1)
assert last.weight.flatten().tolist() == [1.0, 2.0]
assert unpack(rows[0], SIZES)[0].weight.shape == (2, 1)
first.matrix[:, -1] += 0.5  # a view: the bias in the row changes with it
assert rows[:, 2].tolist() == [0.5, 0.5]
first.matrix[:, -1] -= 0.5
assert with_ones(torch.tensor([[3.0], [4.0]])).tolist() == [[3.0, 1.0], [4.0, 1.0]]

# %% [markdown]
# ## Forward
#
# Every member sees the same inputs. What each layer puts out is the input of the next, and the way
# back needs it again, so it is written into a *room* that is made once and used by many passes: a
# matrix whose last column is one and stays one. ReLU works in place, between the layers and not
# after the last. The same lines serve one network and many: `bmm` is `mm`, a product of matrices,
# for a stack of them.
#
# By hand, with the two rows above: for $x = (0.5, 0.25)$ the hidden unit is 0.75, so the members
# say 0.75 and 1.5; for $x = (0.5, -1)$ ReLU is shut and both say 0.

# %%
#| export
class Room(NamedTuple):
    """Where a layer writes what it puts out."""

    full: Tensor  # (..., batch, width + 1), the last column all ones
    out: Tensor  # (..., batch, width), the same without the ones


def make_rooms(layers: list[Layer], batch: int) -> list[Room]:
    """Make room for what all layers but the last put out."""
    rooms = []
    for matrix, *_ in layers[:-1]:
        *members, _, width = matrix.shape
        aligned = 16 * math.ceil((width + 1) / 16)  # each row starts where memory is read quickly
        full = matrix.new_ones(*members, batch, aligned)[..., : width + 1]
        rooms.append(Room(full, full[..., :-1]))
    return rooms


def forward_pass(x: Tensor, layers: list[Layer], rooms: list[Room]) -> Tensor:
    """Return the outputs (..., batch, outputs) for x (..., batch, inputs + 1), ones included."""
    multiply: Callable[..., Tensor] = torch.mm if x.ndim == 2 else torch.bmm
    for layer, room in zip(layers[:-1], rooms, strict=True):
        multiply(x, layer.matrix, out=room.out).relu_()
        x = room.full
    last = layers[-1].matrix
    if 1 < last.shape[-1] < 8:  # so few columns are multiplied more quickly when they lie as rows
        last = last.mT.contiguous().mT
    return multiply(x, last)

# %%
x = with_ones(torch.tensor([[0.5, 0.25], [0.5, -1.0]]))
one = unpack(rows[1], SIZES)
assert forward_pass(x, one, make_rooms(one, batch=2)).tolist() == [[1.5], [0.0]]  # one network
layers = unpack(rows, SIZES)
x, rooms = x.expand(2, 2, 3), make_rooms(layers, batch=2)  # the same inputs for both members
out = forward_pass(x, layers, rooms)
assert out.squeeze(2).tolist() == [[0.75, 0.0], [1.5, 0.0]]  # (members, batch)
assert rooms[0].full[0].tolist() == [[0.75, 1.0], [0.0, 1.0]]

# %% [markdown]
# ## Backward
#
# Say you know $\delta$, the slope of a loss with respect to the outputs. The chain rule goes back
# layer by layer. With $x$ the input of a layer, ones included, and $\delta$ the slope at its output,
#
# $$\frac{\partial L}{\partial \begin{pmatrix} W \\ b \end{pmatrix}} = x^\top \delta, \qquad
# \delta \leftarrow \delta\, W^\top \text{, and zero where ReLU was shut } (x = 0).$$
#
# The last row of $x^\top \delta$ is $\delta$ summed over the batch, the slope at the bias. Here a
# weight is (inputs, outputs) and a batch has its samples in rows; in DQN's `nn.Linear` it is
# (outputs, inputs).
#
# When critics learn, the gradients of their weights are wanted; when they only judge, while a policy
# learns, the slope with respect to their input is enough, and the gradients of the weights, a third
# of all products, are never computed. So the pass writes the gradients into `slots`, layers of the
# same shapes, if you give it any. It stops at the outputs of the first layer: from there
# $\delta\, W^\top$ leads to the inputs, and whoever wants it can take the columns that it needs.
#
# If there is one output, the first step back needs no product: each row of the new $\delta$ is the
# weights of the open units, times a number. The last room is where this is worked out, since nobody
# needs what was there any more: memory that was used a moment ago is the fastest.
#
# By hand: let the loss be the sum of all outputs, so $\delta = 1$. The second example has ReLU
# shut. For the first, the slope with respect to $x$ is $(1, 1)$ in the first member and $(2, 2)$
# in the second. The second member's output weight gets its input, 0.75, its output bias gets 2, one
# for each example, and its first layer gets $2x = (1, 0.5)$ and 2.

# %%
#| export
shut = torch.ops.aten.threshold_backward.grad_input  # zero where ReLU was shut


def backward_pass(
    delta: Tensor,  # (..., batch, outputs), the slope of the loss at the outputs
    x: Tensor,  # (..., batch, inputs + 1)
    rooms: list[Room],
    layers: list[Layer],
    slots: list[Layer] | None = None,
) -> Tensor:
    """Write slopes of weights into the slots; return those at the first layer; use up the rooms."""
    multiply: Callable[..., Tensor] = torch.mm if delta.ndim == 2 else torch.bmm
    inputs, last = [x, *(room.full for room in rooms)], len(layers) - 1
    for i in range(last, -1, -1):
        if slots and i == last:  # a few columns: again quicker as rows
            slots[i].matrix.copy_(multiply(delta.mT, inputs[i]).mT)
        elif slots:
            multiply(inputs[i].mT, delta, out=slots[i].matrix)
        if i == 0:
            break
        back, out = layers[i].back, rooms[i - 1].out
        if delta.shape[-1] == 1:
            delta = shut(back.expand_as(out), out, 0, grad_input=out).mul_(delta)
        else:
            delta = multiply(delta, back)
            shut(delta, out, 0, grad_input=delta)
    return delta

# %%
slopes = torch.empty_like(rows)
delta = backward_pass(torch.ones_like(out), x, rooms, layers, unpack(slopes, SIZES))
slope_x = torch.bmm(delta, layers[0].weight.mT)
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
        """Run all members on the same inputs (batch, inputs), in rooms of their own."""
        layers, seen = unpack(weights, sizes), with_ones(x).expand(len(weights), -1, -1)
        rooms = make_rooms(layers, len(x))
        ctx.save_for_backward(weights, seen, *(room.full for room in rooms))
        ctx.sizes = sizes
        return forward_pass(seen, layers, rooms)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        """Return the slopes with respect to inputs and weights, but for those nobody wants."""
        weights, seen, *filled = ctx.saved_tensors
        wants_x, wants_weights = ctx.needs_input_grad[:2]
        # What a layer of one output leaves behind is used up, and autograd may come again.
        used = [outputs == 1 for _, outputs in ctx.sizes[1:]]
        filled = [full.clone() if gone else full for full, gone in zip(filled, used, strict=True)]
        layers, rooms = unpack(weights, ctx.sizes), [Room(full, full[..., :-1]) for full in filled]
        gradient = torch.empty_like(weights) if wants_weights else None
        slots = None if gradient is None else unpack(gradient, ctx.sizes)
        delta = backward_pass(delta, seen, rooms, layers, slots)
        slope_x = torch.bmm(delta, layers[0].weight.mT).sum(dim=0) if wants_x else None
        return slope_x, gradient, None

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
# ensemble cuts its rows into groups: all members together, or each alone if they are wide.
#
# For the same reason rooms are shared: by groups that go there and back one after the other, and by
# ensembles that belong together, such as critics and their targets. Who needs what a pass left while
# others go on asks for another `place`.

# %%
#| export
class Rooms:
    """Rooms that networks share: what a pass leaves there stays until the next one."""

    def __init__(self) -> None:
        self.made: dict[Any, list[Room]] = {}

    def take(self, layers: list[Layer], batch: int, place: int = 0) -> list[Room]:
        """Return the rooms at a place for these layers and a batch of this size."""
        first = layers[0].matrix
        widths = tuple(layer.matrix.shape[-1] for layer in layers[:-1])
        key = batch, place, widths, first.shape[:-2], first.dtype, first.device
        if key not in self.made:
            if len(self.made) > 63:  # sizes came and went: start anew
                self.made.clear()
            with torch.inference_mode(False):  # they outlive an evaluation
                self.made[key] = make_rooms(layers, batch)
        return self.made[key]

# %%
shared = Rooms()
assert shared.take(layers, batch=4) is shared.take(layers, batch=4)
assert shared.take(layers, batch=4) is not shared.take(layers, batch=4, place=1)

# %% [markdown]
# On the way back each group finds its part of what the forward pass left, the *trace*.

# %%
#| export
class Trace(NamedTuple):
    """What the way back needs."""

    x: Tensor  # (..., batch, inputs + 1)
    rooms: list[list[Room]]  # of each group

    def after(self, rows: int) -> "Trace":
        """Return the batch without its first rows."""
        rooms = [[Room(*(part[..., rows:, :] for part in room)) for room in g] for g in self.rooms]
        return Trace(self.x[..., rows:, :], rooms)

# %% [markdown]
# The views of weights and gradient are made once, and anew if the weights move in memory, for
# example to another device.

# %%
#| export
class Views:
    """Weights and gradient as layers of the groups that go through the passes together."""

    def __init__(self, weights: Tensor, sizes: Sizes) -> None:
        self.sizes, self.where = sizes, weights.data_ptr()
        widest = max(outputs for _, outputs in sizes)
        self.apart = len(weights) == 1 or widest >= 128  # found by timing both ways
        self.gradient = torch.zeros_like(weights)
        self.layers, self.slots = self.cut(weights), self.cut(self.gradient)

    def cut(self, rows: Tensor) -> list[list[Layer]]:
        """View rows of weights as the layers of each group."""
        return [unpack(group, self.sizes) for group in (rows.unbind() if self.apart else [rows])]

    def chosen(self, members: list[int]) -> list[list[Layer]]:
        """Return the layers of some members."""
        if self.apart:
            return [self.layers[member] for member in members]
        matrices = [layer.matrix[members] for layer in self.layers[0]]
        return [[as_layer(matrix) for matrix in matrices]]

    def inputs(self, columns: tuple[Tensor, ...], members: int | None = None) -> Tensor:
        """Return the inputs with ones: as they are, or the same for each member."""
        x = with_ones(*columns)
        return x if self.apart else x.expand(members or len(self.gradient), *x.shape)

    def join(self, outputs: list[Tensor]) -> Tensor:
        """Return what the groups said as (members, batch, outputs)."""
        return torch.stack(outputs) if self.apart else outputs[0]

    def go_back(
        self, delta: Tensor, trace: Trace, slots: list[list[Layer]] | None = None
    ) -> list[Tensor]:
        """Take all groups back, from a slope at the outputs to the slopes at the first layers."""
        reached = []
        for i, slope in enumerate(delta.unbind() if self.apart else [delta]):
            wanted = slots[i] if slots else None
            reached.append(backward_pass(slope, trace.x, trace.rooms[i], self.layers[i], wanted))
        return reached

# %% [markdown]
# ## The module
#
# `Ensemble` owns the matrix of weights. They start as those of `nn.Linear` do, uniform within
# $1/\sqrt{\text{inputs}}$. `outputs` is for autograd, and computes only the `chosen` members if you
# name some; `values` does the same without autograd, and takes inputs that stand side by side, such
# as an observation and an action, as they are.

# %%
#| export
class WeightRows(nn.Module):
    """Networks of the same widths side by side; the weights of each are a row of one matrix."""

    def __init__(self, widths: tuple[int, ...], members: int) -> None:
        super().__init__()
        self.rooms = Rooms()  # another ensemble may have the same ones
        self.sizes: Sizes = tuple(pairwise(widths))
        bounds = [(1 / math.sqrt(n), (n + 1) * m) for n, m in self.sizes]
        rows = [torch.empty(members, count).uniform_(-bound, bound) for bound, count in bounds]
        self.weights = nn.Parameter(torch.cat(rows, dim=1))  # (members, weights of one)
        self.made: Views | None = None

    def views(self) -> Views:
        """Return views of weights and gradient, made anew if the weights moved."""
        if self.made is None or self.made.where != self.weights.data_ptr():
            with torch.inference_mode(False):  # they outlive an evaluation
                self.made = Views(self.weights.detach(), self.sizes)
        return self.made

    def outputs(self, x: Tensor, chosen: Tensor | None = None, learn: bool = True) -> Tensor:
        """Return the outputs (members, batch, outputs); without `learn` the weights are fixed."""
        weights = self.weights if learn else self.weights.detach()
        weights = weights if chosen is None else weights[chosen]
        return EnsembleFunction.apply(x, weights, self.sizes)

    def values(self, *columns: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Return the outputs of all or the chosen members for columns (batch, ...)."""
        views = self.views()
        layers = views.layers if chosen is None else views.chosen(chosen.tolist())
        x = views.inputs(columns, None if chosen is None else len(chosen))
        rooms = [self.rooms.take(group, len(columns[0])) for group in layers]
        passes = zip(layers, rooms, strict=True)
        return views.join([forward_pass(x, *each) for each in passes])

# %% [markdown]
# `learn` finds the gradient of a loss. If the loss of a member does not depend on what the others
# say, a group can go forward and back before the next one starts, in the same rooms: so `learn` is
# told how to find the slope from the outputs. `run` and the two kinds of slopes go there and back
# separately, for all that lies between, and each group has a place of its own. What `run` left is
# used up by the way back, or lost with the next pass through the same rooms. A sample whose slope at a
# member's output is zero needs no way back through it, and where the policy listens to the lower of
# two critics that is half of them: `input_slopes` takes only the others.

# %%
#| export
def pick_rows(rooms: list[Room], rows: Tensor) -> list[Room]:
    """Copy some rows of a batch out of rooms, for a way back that asks for no weights."""
    picked = [room.out.index_select(0, rows) for room in rooms]
    return [Room(part, part) for part in picked]


Slope = Callable[[Tensor], Tensor]  # from outputs (..., batch, outputs) to a slope there


class Ensemble(WeightRows):
    """Rows of weights whose gradient is found by hand."""

    def learn(self, slope: Slope, *columns: Tensor) -> Tensor:
        """Find the gradient of a loss with this slope at the outputs, and return those."""
        views, outputs, batch = self.views(), [], len(columns[0])
        x = views.inputs(columns)
        for layers, slots in zip(views.layers, views.slots, strict=True):
            rooms = self.rooms.take(layers, batch)
            outputs.append(forward_pass(x, layers, rooms))
            backward_pass(slope(outputs[-1]), x, rooms, layers, slots)
        self.weights.grad = views.gradient
        return views.join(outputs)

    def run(self, *columns: Tensor) -> tuple[Tensor, Trace]:
        """Return the outputs, and what the way back needs."""
        views, batch = self.views(), len(columns[0])
        x, groups = views.inputs(columns), views.layers
        rooms = [self.rooms.take(layers, batch, place) for place, layers in enumerate(groups)]
        passes = zip(groups, rooms, strict=True)
        return views.join([forward_pass(x, *each) for each in passes]), Trace(x, rooms)

    def weight_slopes(self, delta: Tensor, trace: Trace) -> Tensor:
        """Return the slopes at the weights, in a tensor that the next call writes over."""
        views = self.views()
        views.go_back(delta, trace, views.slots)
        return views.gradient

    def input_slopes(self, delta: Tensor, trace: Trace, columns: slice = slice(None)) -> Tensor:
        """Return the slopes (batch, columns) at columns of the inputs, summed over members."""
        views = self.views()
        if not views.apart:
            (delta,) = views.go_back(delta, trace)
            return (delta @ views.layers[0][0].back[..., columns]).sum(dim=0)
        total = delta.new_zeros(delta.shape[1], trace.x.shape[1] - 1)[:, columns]
        for slope, rooms, layers in zip(delta.unbind(), trace.rooms, views.layers, strict=True):
            rows = slope.any(dim=1).nonzero().squeeze(1)  # where there is anything to take back
            if len(rows) == len(slope):
                total += backward_pass(slope, trace.x, rooms, layers) @ layers[0].back[:, columns]
            else:
                reached = backward_pass(slope[rows], trace.x, pick_rows(rooms, rows), layers)
                total.index_add_(0, rows, reached @ layers[0].back[:, columns])
        return total

# %%
for widths in ((5, 8, 8, 1), (5, 128, 128, 1)):  # together, and one by one
    ensemble = Ensemble(widths, members=3)
    x = torch.randn(6, 5)
    assert ensemble.outputs(x).shape == (3, 6, 1)
    few = torch.tensor([2, 0])
    torch.testing.assert_close(ensemble.outputs(x, few), ensemble.outputs(x)[few])
    torch.testing.assert_close(ensemble.values(x, chosen=few), ensemble.outputs(x)[few].detach())
    ensemble.outputs(x).square().sum().backward()
    expected, (out, trace) = ensemble.weights.grad, ensemble.run(x[:, :2], x[:, 2:])
    torch.testing.assert_close(ensemble.weight_slopes(2 * out, trace), expected)
    torch.testing.assert_close(ensemble.learn(lambda out: 2 * out, x), out)
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
    ensemble.learn(lambda out: 2 * out, x)


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
# layers = unpack(torch.zeros(1, 67_329), ((4, 256), (256, 256), (256, 1)))
# first, middle, last = [layer.weight.numel() for layer in layers]
# assert middle / (first + middle + last) > 0.98
# ```
#
# </details>

# %% [markdown]
# **Exercise 3 (a planted bug).** This backward pass for one hidden layer agrees with autograd on the
# first example and not on the second. What is missing?

# %%
def buggy_slope(x: torch.Tensor, weights: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    first, last = unpack(weights, sizes)
    delta = torch.ones(len(weights), len(x), 1) * last.weight.mT
    return torch.bmm(delta, first.weight.mT).sum(dim=0)


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
#     first, last = unpack(weights, sizes)
#     hidden = with_ones(x) @ first.matrix  # before ReLU
#     delta = torch.ones(len(weights), len(x), 1) * last.weight.mT * (hidden > 0)
#     return torch.bmm(delta, first.weight.mT).sum(dim=0)
#
# assert buggy_slope(torch.tensor([[0.5, -1.0]]), rows, SIZES).tolist() == [[0.0, 0.0]]
# ```
#
# </details>

# %% [markdown]
# **Exercise 4.** Why does the column of ones survive ReLU, pass after pass, and why may the way back
# leave it out?
#
# <details>
# <summary>Solution</summary>
#
# ReLU and the product both write into `room.out`, which ends before the last column. The ones do not
# depend on anything, so no slope has to go through them: $\delta W^\top$ takes the weights without
# their last row. What they multiply, the bias, does get its slope, in $x^\top \delta$.
#
# ```python
# ensemble = Ensemble((3, 8, 8, 1), members=2)
# _, trace = ensemble.run(torch.randn(4, 3))
# assert all((room.full[..., -1] == 1).all() for group in trace.rooms for room in group)
# slopes = ensemble.weight_slopes(torch.ones(2, 4, 1), trace)
# assert (slopes[:, -1] == 4).all()  # the last bias of each member: one for each of four examples
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
# critics.learn(lambda out: 2 * (out - y), x)    # y is (batch, 1); leaves the gradient of the
#                                                # squared errors
# ```
#
# ## References
#
# - D. Rumelhart, G. Hinton, R. Williams (1986). Learning representations by back-propagating errors.
#   *Nature* 323.
