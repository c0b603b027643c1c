"""Recipes against the truth: the kinds of bugs, who differs, and what is drawn."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from labkit.testing.compare import Comparison, gradients, largest_difference
from labkit.testing.verdict import (
    gradient_of,
    kind_of,
    moved,
    verdicts,
    weights,
)

TRUE = [torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])]


def on_ranks(*of_ranks: list[torch.Tensor]) -> list[dict[str, list[torch.Tensor]]]:
    return [{"it": found} for found in of_ranks]


@pytest.mark.parametrize(
    ("comparison", "kind"),
    [
        (Comparison(1.0, 1.0), "right"),
        (Comparison(1.004, 0.99995), "right"),  # as rounding to bfloat16 leaves it
        (Comparison(1.01, 1.0), "scale bug"),
        (Comparison(0.25, 1.0), "scale bug"),
        (Comparison(1.0, 0.999), "direction bug"),
        (Comparison(4.0, -1.0), "direction bug"),
        (Comparison(math.inf, math.nan), "not finite"),
        (Comparison(math.nan, math.nan), "not finite"),
        (Comparison(0.0, math.nan), "zero"),
    ],
)
def test_two_figures_make_a_kind(comparison, kind):
    assert kind_of(comparison) == kind


@given(st.floats(0.05, 100).filter(lambda factor: abs(factor - 1) > 0.01))
def test_one_factor_on_all_is_a_scale_bug_and_on_one_tensor_a_direction_bug(factor):
    all_of_it = [g.double() * factor for g in TRUE]
    one_of_it = [TRUE[0].double() * (factor + 1), TRUE[1].double()]
    (scaled,) = verdicts(on_ranks(all_of_it, all_of_it), [g.double() for g in TRUE])
    assert scaled.kind == "scale bug"
    assert scaled.comparison.ratio == pytest.approx(factor)
    (turned,) = verdicts(on_ranks(one_of_it, one_of_it), [g.double() for g in TRUE])
    assert turned.kind == "direction bug"


def test_one_bit_on_the_last_rank_gives_a_verdict_for_each_rank():
    other = [g.clone() for g in TRUE]
    other[1][0, 0] = torch.nextafter(other[1][0, 0], torch.tensor(torch.inf))
    judged = verdicts(on_ranks(TRUE, TRUE, other), TRUE)
    assert [v.ranks for v in judged] == ["rank 0", "rank 1", "rank 2"]
    assert [v.ranks for v in verdicts(on_ranks(TRUE, TRUE, TRUE), TRUE)] == ["all"]


def test_infinities_zeros_and_nans_are_verdicts_and_a_truth_of_zeros_an_error():
    broken = [torch.tensor([torch.nan, 4.0]), torch.tensor([[torch.inf]])]
    zeros = [torch.zeros_like(g) for g in TRUE]
    (not_finite,) = verdicts(on_ranks(broken, broken), TRUE)
    assert (not_finite.ranks, not_finite.kind) == ("all", "not finite")
    (zero,) = verdicts(on_ranks(zeros, zeros), TRUE)
    assert (zero.comparison.ratio, zero.kind) == (0.0, "zero")
    with pytest.raises(ValueError, match="true gradient is zero"):
        verdicts(on_ranks(TRUE, TRUE), zeros)


def test_other_variants_or_shapes_are_refused_by_name():
    with pytest.raises(ValueError, match=r"rank 0 tried \['a'\], rank 1 \['b'\]"):
        verdicts([{"a": TRUE}, {"b": TRUE}], TRUE)
    for found in ([TRUE[0]], [torch.zeros(3), torch.zeros(1, 1)]):
        with pytest.raises(ValueError, match="different shapes"):
            verdicts(on_ranks(found), TRUE)


def test_gradient_of_leaves_the_model_alone_and_moved_is_the_way_from_the_start():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    model(x).sum().backward()
    before = gradients(model)
    start = weights(model)
    found = gradient_of(model, lambda m: m(x).square().sum())
    assert largest_difference(gradients(model), before) == 0
    assert largest_difference(weights(model), start) == 0
    (expected,) = torch.autograd.grad(model(x).square().sum(), [model.weight])
    assert torch.equal(found[0], expected)

    torch.optim.SGD(model.parameters(), lr=0.5).step()
    way = moved(model, start)
    assert largest_difference(way, [-0.5 * g for g in before]) < 1e-6
