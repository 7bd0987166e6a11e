"""Ensembles: the same numbers and the same gradients as separate networks under autograd."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlbook.ensemble import Ensemble, EnsembleFunction, Room, make_rooms, unpack


def plain(ensemble: Ensemble, x: Tensor) -> Tensor:
    """The same networks one by one, with autograd's own backward: (members, batch, outputs)."""
    outputs, layers = [], unpack(ensemble.weights, ensemble.sizes)
    for member in range(len(ensemble.weights)):
        h = x
        for i, layer in enumerate(layers):
            h = h @ layer.matrix[member, :-1] + layer.matrix[member, -1]
            h = torch.relu(h) if i < len(layers) - 1 else h
        outputs.append(h)
    return torch.stack(outputs)


@pytest.mark.parametrize("hidden", [(7, 5), (6,), (4, 4, 4), (), (128,)])
@pytest.mark.parametrize("outputs", [1, 3, 9])  # as they lie, as rows, as they lie
@pytest.mark.parametrize("members", [1, 4])
def test_members_are_separate_networks(
    hidden: tuple[int, ...], outputs: int, members: int
) -> None:
    torch.manual_seed(0)
    ensemble = Ensemble((5, *hidden, outputs), members).double()
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    ours, theirs = ensemble.outputs(x), plain(ensemble, x)
    assert ours.shape == (members, 6, outputs)
    torch.testing.assert_close(ours, theirs)
    direction = torch.randn_like(theirs)
    inputs: list[Any] = [x, ensemble.weights]
    expected = torch.autograd.grad((theirs * direction).sum(), inputs)
    for a, b in zip(torch.autograd.grad((ours * direction).sum(), inputs), expected, strict=True):
        torch.testing.assert_close(a, b)
    seen = x.detach()
    out, trace = ensemble.run(seen)
    torch.testing.assert_close(out, theirs.detach())
    torch.testing.assert_close(ensemble.input_slopes(direction, trace), expected[0])
    out, trace = ensemble.run(seen[:, :2], seen[:, 2:])
    two = ensemble.input_slopes(direction, trace, slice(3, None))
    torch.testing.assert_close(two, expected[0][:, 3:])
    out, trace = ensemble.run(seen)
    torch.testing.assert_close(ensemble.weight_slopes(direction, trace), expected[1])
    passes: list[Any] = [x, ensemble.weights, ensemble.sizes]
    assert torch.autograd.gradcheck(EnsembleFunction.apply, passes)


@pytest.mark.parametrize("hidden", [(8, 8), (128, 128)])  # together, and one by one
@pytest.mark.parametrize("outputs", [1, 2])
def test_samples_without_slope_are_left_out_of_the_way_back(
    hidden: tuple[int, ...], outputs: int
) -> None:
    torch.manual_seed(0)
    ensemble = Ensemble((5, *hidden, outputs), members=3).double()
    x = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    theirs = plain(ensemble, x)
    direction = torch.randn_like(theirs)
    direction[0, ::2], direction[1] = 0.0, 0.0  # half of the samples, and all of them
    (expected,) = torch.autograd.grad((theirs * direction).sum(), [x])
    _, trace = ensemble.run(x.detach())
    slopes = ensemble.input_slopes(direction, trace, slice(2, 4))
    torch.testing.assert_close(slopes, expected[:, 2:4])


def test_chosen_members_are_rows_of_all() -> None:
    ensemble, x, chosen = Ensemble((3, 8, 2), members=5), torch.randn(4, 3), torch.tensor([3, 0])
    torch.testing.assert_close(ensemble.outputs(x, chosen), ensemble.outputs(x)[chosen])
    torch.testing.assert_close(ensemble.values(x, chosen=chosen), ensemble.run(x)[0][chosen])


def test_members_that_only_judge_get_no_gradient() -> None:
    ensemble, x = Ensemble((3, 8, 1), members=2), torch.randn(4, 3, requires_grad=True)
    ensemble.outputs(x, learn=False).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    assert ensemble.weights.grad is None


def test_unwanted_slopes_are_not_computed() -> None:
    ensemble, x = Ensemble((3, 8, 1), members=4), torch.randn(4, 3)
    out, trace = ensemble.run(x)
    views = ensemble.views()
    views.gradient.fill_(7.0)
    stopped = views.go_back(torch.ones_like(out), trace)
    assert stopped[0].shape == (4, 4, 8)  # at the hidden layer: nobody asked for the inputs'
    assert (views.gradient == 7.0).all()


@pytest.mark.parametrize("width", [8, 128])
def test_wide_members_go_one_by_one_to_the_same_numbers(width: int) -> None:
    torch.manual_seed(0)
    ensemble, x = Ensemble((3, width, width, 2), members=4), torch.randn(5, 3)
    out, trace = ensemble.run(x)
    assert len(trace.rooms) == (4 if width == 128 else 1)
    torch.testing.assert_close(out, plain(ensemble, x).detach())
    torch.testing.assert_close(ensemble.values(x, chosen=torch.tensor([3, 1])), out[[3, 1]])


def test_views_follow_weights_that_move() -> None:
    ensemble, x = Ensemble((3, 8, 1), members=2), torch.randn(4, 3)
    before = ensemble.run(x)[0]
    torch.testing.assert_close(ensemble.double().run(x.double())[0].float(), before)


@pytest.mark.parametrize("width", [8, 128])
def test_a_pass_finds_its_rooms_as_it_needs_them(width: int) -> None:
    torch.manual_seed(0)
    ensemble, x = Ensemble((3, width, width, 1), members=2), torch.randn(4, 3)
    out, trace = ensemble.run(x)
    delta = torch.randn_like(out)
    before, first = delta.clone(), ensemble.weight_slopes(delta, trace).clone()
    assert torch.equal(delta, before)  # going back uses up the rooms, but not the slope
    ensemble.values(torch.randn(4, 3))  # the same rooms with something else in them
    ensemble.values(torch.randn(9, 3))
    assert torch.equal(ensemble.weight_slopes(delta, ensemble.run(x)[1]), first)
    for group in trace.rooms:
        assert all((room.full[..., -1] == 1).all() for room in group)


def test_going_back_by_autograd_can_be_repeated() -> None:
    ensemble, x = Ensemble((3, 8, 8, 1), members=2), torch.randn(4, 3)
    loss = ensemble.outputs(x).square().sum()
    first = torch.autograd.grad(loss, ensemble.weights, retain_graph=True)[0]
    ensemble.run(torch.randn(4, 3))
    assert torch.equal(torch.autograd.grad(loss, ensemble.weights)[0], first)


def test_rows_after_the_first_go_back_alone() -> None:
    torch.manual_seed(0)
    ensemble, x = Ensemble((3, 8, 2), members=1), torch.randn(6, 3)
    delta = torch.randn(1, 2, 2)
    expected = ensemble.weight_slopes(delta, ensemble.run(x[4:])[1]).clone()
    torch.testing.assert_close(ensemble.weight_slopes(delta, ensemble.run(x)[1].after(4)), expected)


def test_what_an_evaluation_made_can_be_learned_with() -> None:
    ensemble, x = Ensemble((3, 8, 8, 1), members=2), torch.randn(4, 3)
    with torch.inference_mode():
        ensemble.values(x)
    ensemble.learn(torch.ones_like, x)
    assert ensemble.weights.grad is not None
    ensemble.weights.data.add_(ensemble.weights.grad)


def test_rooms_of_sizes_that_came_and_went_are_let_go() -> None:
    ensemble = Ensemble((3, 4, 1), members=2)
    for batch in range(1, 200):
        ensemble.values(torch.randn(batch, 3))
    assert len(ensemble.rooms.made) <= 64


def test_rows_of_a_room_are_aligned_and_end_with_one() -> None:
    layers = unpack(torch.zeros(2, 5 * 20 + 21), ((4, 20), (20, 1)))
    (room,) = make_rooms(layers, batch=3)
    assert isinstance(room, Room) and room.full.shape == (2, 3, 21) and room.out.shape == (2, 3, 20)
    assert room.full.stride() == (3 * 32, 32, 1) and (room.full == 1).all()


def test_weights_start_like_those_of_linear_layers() -> None:
    torch.manual_seed(0)
    widths = (9, 64, 64, 1)
    layers = unpack(Ensemble(widths, members=20).weights.detach(), tuple(pairwise(widths)))
    for layer, (inputs, outputs) in zip(layers, pairwise(widths), strict=True):
        weight, bias = layer.weight, layer.matrix[:, -1]
        linear = nn.Linear(inputs, outputs)
        bound = float(inputs) ** -0.5
        assert float(linear.weight.detach().abs().max()) <= bound
        assert float(weight.abs().max()) <= bound and float(bias.abs().max()) <= bound
        assert float(weight.std()) == pytest.approx(bound / 3**0.5, rel=0.1)
        assert (weight[0] != weight[1]).any()  # members start apart


def test_a_copy_shares_nothing() -> None:
    ensemble, x = Ensemble((3, 8, 1), members=2), torch.randn(4, 3)
    twin = copy.deepcopy(ensemble)
    before = twin.run(x)[0].clone()
    with torch.no_grad():
        ensemble.weights.add_(1)
    assert torch.equal(twin.run(x)[0], before)
    assert (ensemble.run(x)[0] != before).any()


@pytest.mark.parametrize("widths", [(3, 5, 1, 1), (3, 1, 4, 1), (3, 4, 6, 2)])
def test_autograd_may_go_back_twice(widths: tuple[int, ...]) -> None:
    ensemble = Ensemble(widths, members=2)
    x = torch.randn(7, 3, requires_grad=True)
    loss = ensemble.outputs(x).square().sum()
    first = torch.autograd.grad(loss, [x, ensemble.weights], retain_graph=True)
    second = torch.autograd.grad(loss, [x, ensemble.weights])
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)
