"""Made from book/ensemble.py: edit the chapter, then run `rlbook tangle`."""

__all__ = [
    "Ensemble",
    "EnsembleFunction",
    "Layer",
    "Room",
    "Rooms",
    "Sizes",
    "Slope",
    "Trace",
    "Views",
    "WeightRows",
    "as_layer",
    "backward_pass",
    "forward_pass",
    "make_rooms",
    "pick_rows",
    "shut",
    "unpack",
    "with_ones",
]

# %% book/ensemble.py · Ensembles: several networks as one
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# %% book/ensemble.py · One matrix for all weights
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


# %% book/ensemble.py · Forward
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


# %% book/ensemble.py · Backward
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


# %% book/ensemble.py · For autograd, too
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


# %% book/ensemble.py · Together or one by one
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


class Trace(NamedTuple):
    """What the way back needs."""

    x: Tensor  # (..., batch, inputs + 1)
    rooms: list[list[Room]]  # of each group

    def after(self, rows: int) -> "Trace":
        """Return the batch without its first rows."""
        rooms = [[Room(*(part[..., rows:, :] for part in room)) for room in g] for g in self.rooms]
        return Trace(self.x[..., rows:, :], rooms)


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


# %% book/ensemble.py · The module
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
