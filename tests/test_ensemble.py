"""Ensembles: the same numbers and the same gradients as separate networks under autograd."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlbook.ensemble import Ensemble, EnsembleFunction, ensemble_backward, unpack


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
    torch.testing.assert_close(ensemble.run(x, chosen)[0], ensemble.run(x)[0][chosen])


def test_members_that_only_judge_get_no_gradient() -> None:
    ensemble, x = Ensemble((3, 8, 1), members=2), torch.randn(4, 3, requires_grad=True)
    ensemble.outputs(x, learn=False).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    assert ensemble.weights.grad is None


def test_unwanted_slopes_are_empty() -> None:
    ensemble, x = Ensemble((3, 8, 1), members=2), torch.randn(4, 3)
    out, kept = ensemble.run(x)
    weights, sizes, delta = ensemble.weights.detach(), ensemble.sizes, torch.ones_like(out)
    x_slope, weight_slope = ensemble_backward(delta, kept, weights, sizes, wants_weights=False)
    assert x_slope.numel() == weight_slope.numel() == 0


def test_going_back_leaves_its_inputs_alone() -> None:
    ensemble, x = Ensemble((3, 8, 8, 1), members=2), torch.randn(4, 3)
    out, kept = ensemble.run(x)
    delta, before = torch.randn_like(out), [copy.deepcopy(h) for h in kept]
    again = delta.clone()
    first = ensemble.weight_slopes(delta, kept)
    assert torch.equal(first, ensemble.weight_slopes(delta, kept))
    assert torch.equal(delta, again)
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


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
