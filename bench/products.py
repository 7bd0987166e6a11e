"""The matrix products of updates and nothing else: of the library's sizes, in its own memory.

What lies between the products (ReLU, targets, losses, Adam) is left out, and so are products that
the library does not make: it goes back through a layer of one output without one, and in SAC's
policy step each row goes back through one critic alone.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from timing import Work
from torch import Tensor

from rlbook.drqv2 import ENCODERS
from rlbook.ensemble import Ensemble, Layer, Room
from rlbook.sac import Critics, SACModel

Widths = tuple[int, ...]
Product = partial[Tensor]
Products = list[Product]


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Product:
    """Return one product of matrices, or one for each member, into memory that is there already."""
    multiply = torch.mm if a.ndim == 2 else torch.bmm
    return partial(multiply, a, b, out=multiply(a, b) if out is None else out)


def random_product(rows: int, inner: int, columns: int) -> Product:
    """Return a product of two random matrices."""
    return product(torch.rand(rows, inner), torch.rand(inner, columns))


def all_of(works: Iterable[Work], times: int = 1) -> Work:
    """Return one function that does all works, and that some times over."""
    todo = list(works) * times

    def run() -> None:
        for work in todo:
            work()

    return run


def multiplications(works: Products) -> int:
    """Count how many pairs of numbers products multiply."""
    return sum(work.args[0].numel() * work.args[1].shape[-1] for work in works)


# Linear layers ------------------------------------------------------------------------------------


def lay_out(ensemble: Ensemble, apart: bool) -> Ensemble:
    """Let members go through the passes one by one, or all at once in batched products."""
    views = ensemble.views()
    views.apart = apart
    views.layers, views.slots = views.cut(ensemble.weights.detach()), views.cut(views.gradient)
    return ensemble


def up_through(x: Tensor, layers: list[Layer], rooms: list[Room]) -> Products:
    """Return the products of `rlbook.ensemble.forward_pass`."""
    works = []
    for layer, room in zip(layers[:-1], rooms, strict=True):
        works.append(product(x, layer.matrix, room.out))
        x = room.full
    last = layers[-1].matrix
    thin = 1 < last.shape[-1] < 8  # the library lays so few columns out as rows
    return [*works, product(x, last.mT.contiguous().mT if thin else last)]


def down_through(
    x: Tensor, layers: list[Layer], rooms: list[Room], slots: list[Layer] | None
) -> tuple[Products, Tensor]:
    """Return the products of `rlbook.ensemble.backward_pass`, and the slope it arrives with."""
    works, last = [], len(layers) - 1
    inputs = [x, *(room.full for room in rooms)]
    delta = torch.rand(*x.shape[:-1], layers[-1].matrix.shape[-1])
    for i in range(last, -1, -1):
        if slots:
            pair = (delta.mT, inputs[i]) if i == last else (inputs[i].mT, delta)
            works.append(product(*pair, None if i == last else slots[i].matrix))
        if i and delta.shape[-1] == 1:  # one output: no product
            delta = rooms[i - 1].out
        elif i:
            works.append(product(delta, layers[i].back))
            delta = torch.rand(rooms[i - 1].out.shape)
    return works, delta


def layer_products(
    ensemble: Ensemble,
    batch: int,
    *,
    forward: bool = True,
    weights: bool = True,  # the way back to the weights
    columns: slice | None = None,  # the way back to these columns of the inputs
    members: int | None = None,
) -> Products:
    """Return the products of a pass through an ensemble, there and back as far as asked."""
    views, works = ensemble.views(), []
    groups = views.layers if members is None else views.chosen(list(range(members)))
    x = views.inputs((torch.rand(batch, ensemble.sizes[0][0]),), members)
    for i, layers in enumerate(groups):
        rooms = ensemble.rooms.take(layers, batch)
        works += up_through(x, layers, rooms) if forward else []
        if not weights and columns is None:
            continue
        down, delta = down_through(x, layers, rooms, views.slots[i] if weights else None)
        works += down if columns is None else [*down, product(delta, layers[0].back[..., columns])]
    return works


def forward_products(ensemble: Ensemble, batch: int, members: int | None = None) -> Products:
    """Return the products of the way there alone, of some members or all."""
    return layer_products(ensemble, batch, weights=False, members=members)


# LSTM and convolutions ----------------------------------------------------------------------------


def lstm_products(steps: int, batch: int, inputs: int, units: int, learn: bool) -> Products:
    """Return the products of an LSTM over a chunk: one a step, the inputs' all at once."""
    many, gates = steps * batch, 4 * units
    works = [random_product(many, inputs, gates)]
    works += [random_product(batch, units, gates)] * steps
    if learn:
        works.append(random_product(many, gates, inputs))
        works += [random_product(batch, gates, units)] * steps
        works += [random_product(inputs, many, gates), random_product(units, many, gates)]
    return works


def convolution_products(batch: int, shape: Widths, layers: Any, learn: bool) -> Products:
    """Return the products that convolutions are, once their patches are laid out as rows."""
    works, (channels, height, width) = [], shape
    for i, (outputs, kernel, stride) in enumerate(layers):
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        rows, inner = batch * height * width, channels * kernel**2
        works.append(random_product(rows, inner, outputs))
        if learn:
            works.append(random_product(inner, rows, outputs))
            works += [random_product(rows, outputs, inner)] * (i > 0)
        channels = outputs
    return works


# Whole updates ------------------------------------------------------------------------------------


def dqn_products(widths: Widths, batch: int, together: int = 16) -> Products:
    """Return the products of some updates of DQN, whose successors are valued together."""
    network = Ensemble(widths, 1)
    return [
        *forward_products(network, together * batch),
        *layer_products(network, batch) * together,
    ]


def acting_products(widths: Widths) -> Products:
    """Return the products of choosing one action."""
    return forward_products(Ensemble(widths, 1), 1)


def sac_products(inputs: int, actions: int, hidden: Widths, batch: int) -> Products:
    """Return the products of one update of SAC as this book makes it."""
    model, target = SACModel(inputs, actions, hidden), Critics(inputs, actions, hidden, 2)
    actor, critics = model.actor, model.critics
    # One by one, each row goes back through the lower critic alone: about half through each.
    rows = batch // 2 if critics.views().apart else batch
    action = slice(inputs, None)
    return [
        *forward_products(actor, 2 * batch),
        *forward_products(target, batch),
        *layer_products(critics, batch),
        *forward_products(critics, batch),
        *layer_products(critics, rows, forward=False, weights=False, columns=action),
        *layer_products(actor, batch, forward=False),
    ]


def sb3_sac_products(inputs: int, actions: int, hidden: Widths, batch: int) -> Products:
    """Return the products of the same update as Stable-Baselines3 makes it."""
    model = SACModel(inputs, actions, hidden)
    return [
        *forward_products(model.actor, batch),
        *forward_products(model.critics, batch),
        *layer_products(model.critics, batch),
        # All rows through both critics, with slopes of their weights that nobody uses.
        *layer_products(model.critics, batch, columns=slice(None)),
        *layer_products(model.actor, batch),
    ]


def redq_products(model: SACModel, inputs: int, batch: int, subset: int, policy: bool) -> Products:
    """Return the products of one update of REDQ, with or without one of the policy."""
    critics, action = model.critics, slice(inputs, None)
    works = [
        *forward_products(model.actor, batch * (1 + policy)),
        *forward_products(critics, batch, members=subset),
        *layer_products(critics, batch),
    ]
    if policy:
        works += layer_products(critics, batch, weights=False, columns=action)
        works += layer_products(model.actor, batch, forward=False)
    return works


def recurrent_products(agent: Any) -> Products:
    """Return the products of an update of DRQN or R2D2, which learns after its burn-in alone."""
    config, burn_in = agent.config, getattr(agent.config, "burn_in", 0)
    sizes, batch = (agent.sight.inputs, *config.hidden), config.batch_size
    encoder, head = Ensemble(sizes, 1), Ensemble((config.units, agent.choices), 1)
    steps, works = config.chunk_length + 1 - burn_in, []
    for learn in (True, False):  # the network that learns, and its target
        if burn_in:
            works += forward_products(encoder, burn_in * batch)
            works += lstm_products(burn_in, batch, sizes[-1], config.units, learn=False)
        works += layer_products(encoder, steps * batch, weights=learn)
        works += lstm_products(steps, batch, sizes[-1], config.units, learn)
        back = slice(None) if learn else None
        works += layer_products(head, steps * batch, weights=learn, columns=back)
    return works


def drqv2_products(agent: Any) -> Products:
    """Return the products of `policy_delay` updates of DrQ-v2, one of them with its actor's."""
    config, shape = agent.config, agent.observation_space.shape
    batch, actions = config.batch_size, agent.action_space.shape[0]
    seen, layers, whole = agent.model.encoder.outputs, ENCODERS[config.encoder], slice(None)
    trunk = Ensemble((seen, config.features), 1)
    policy = Ensemble((config.features, *config.hidden, actions), 1)
    critics = lay_out(Critics(config.features, actions, config.hidden, 2), apart=False)
    judge = [
        *convolution_products(batch, shape, layers, learn=False),
        *convolution_products(batch, shape, layers, learn=True),
        *forward_products(trunk, batch) * 2,  # of the actor and of the slow critics
        *forward_products(policy, batch),
        *forward_products(critics, batch),
        *layer_products(critics, batch, columns=whole),
        *layer_products(trunk, batch, columns=whole),
    ]
    improve = [
        *layer_products(trunk, batch),
        *layer_products(policy, batch, columns=whole),
        *forward_products(trunk, batch),
        *layer_products(critics, batch, weights=False, columns=whole),
    ]
    return judge * config.policy_delay + improve
