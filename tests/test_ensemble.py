"""Ensembles: the same numbers and the same gradients as separate networks under autograd."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlbook.ensemble import Ensemble, EnsembleFunction, backward_pass, unpack


def plain(ensemble: Ensemble, x: Tensor) -> Tensor:
    """The same networks one by one, with autograd's own backward: (members, batch, outputs)."""
    outputs, layers = [], unpack(ensemble.weights, ensemble.sizes)
    for member in range(len(ensemble.weights)):
        h = x
        for i, (weight, bias) in enumerate(layers):
            h = h @ weight[member] + bias[member]
            h = torch.relu(h) if i < len(layers) - 1 else h
        outputs.append(h)
    return torch.stack(outputs)


@pytest.mark.parametrize("hidden", [(7, 5), (6,), (4, 4, 4), ()])
@pytest.mark.parametrize("outputs", [1, 3])
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
    out, kept = ensemble.run(x)
    torch.testing.assert_close(out, theirs.detach())
    torch.testing.assert_close(ensemble.input_slopes(direction, kept), expected[0])
    torch.testing.assert_close(ensemble.weight_slopes(direction, kept), expected[1])
    passes: list[Any] = [x, ensemble.weights, ensemble.sizes]
    assert torch.autograd.gradcheck(EnsembleFunction.apply, passes)


def test_chosen_members_are_rows_of_all() -> None:
    ensemble, x, chosen = Ensemble((3, 8, 2), members=5), torch.randn(4, 3), torch.tensor([3, 0])
    torch.testing.assert_close(ensemble.outputs(x, chosen), ensemble.outputs(x)[chosen])
    torch.testing.assert_close(ensemble.values(x, chosen), ensemble.run(x)[0][chosen])


def test_members_that_only_judge_get_no_gradient() -> None:
    ensemble, x = Ensemble((3, 8, 1), members=2), torch.randn(4, 3, requires_grad=True)
    ensemble.outputs(x, learn=False).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    assert ensemble.weights.grad is None


def test_unwanted_slopes_are_not_computed() -> None:
    ensemble, x = Ensemble((3, 8, 1), members=4), torch.randn(4, 3)
    out, kept = ensemble.run(x)
    layers = unpack(ensemble.weights.detach(), ensemble.sizes)
    stopped = backward_pass(torch.ones_like(out), kept[0], layers)
    assert stopped.shape == (4, 4, 8)  # at the hidden layer: nobody asked for the inputs'


@pytest.mark.parametrize("width", [8, 128])
def test_wide_members_go_one_by_one_to_the_same_numbers(width: int) -> None:
    torch.manual_seed(0)
    ensemble, x = Ensemble((3, width, width, 2), members=4), torch.randn(5, 3)
    out, kept = ensemble.run(x)
    assert len(kept) == (4 if width == 128 else 1)
    torch.testing.assert_close(out, plain(ensemble, x).detach())
    torch.testing.assert_close(ensemble.values(x, torch.tensor([3, 1])), out[[3, 1]])


def test_views_follow_weights_that_move() -> None:
    ensemble, x = Ensemble((3, 8, 1), members=2), torch.randn(4, 3)
    before = ensemble.run(x)[0]
    torch.testing.assert_close(ensemble.double().run(x.double())[0].float(), before)


def test_going_back_leaves_its_inputs_alone() -> None:
    ensemble, x = Ensemble((3, 8, 8, 1), members=2), torch.randn(4, 3)
    out, kept = ensemble.run(x)
    delta, before = torch.randn_like(out), copy.deepcopy(kept)
    again = delta.clone()
    first = ensemble.weight_slopes(delta, kept).clone()
    assert torch.equal(first, ensemble.weight_slopes(delta, kept))
    assert torch.equal(delta, again)
    for group, old in zip(kept, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(group, old, strict=True))


def test_weights_start_like_those_of_linear_layers() -> None:
    torch.manual_seed(0)
    widths = (9, 64, 64, 1)
    layers = unpack(Ensemble(widths, members=20).weights.detach(), tuple(pairwise(widths)))
    for (weight, bias), (inputs, outputs) in zip(layers, pairwise(widths), strict=True):
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
