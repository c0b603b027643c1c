"""Ratio, cosine, and verdicts against hand-made gradients; chapters print the rest."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.testing import Held, gradients, try_variants, under_ddp
from labkit.testing.compare import (
    Comparison,
    gradient_of,
    kind_of,
    largest_difference,
    ratio_and_cosine,
    verdicts,
)

TRUE = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]


def test_all_parameters_count_in_every_dtype():
    found = [t.to(d) for t, d in zip(TRUE, [torch.bfloat16, torch.float64], strict=True)]
    assert ratio_and_cosine(found, TRUE) == pytest.approx((1.0, 1.0))
    imaginary = [torch.tensor([3.0 + 4.0j])]
    assert ratio_and_cosine(imaginary, [torch.tensor([4.0 + 3.0j])]).cosine == pytest.approx(
        24 / 25
    )


def test_gradients_of_a_module_count_none_as_zeros_and_leave_out_what_is_frozen():
    module = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(3)])
    module[2].requires_grad_(False)
    module[0](torch.tensor([[5.0, 6.0]])).sum().backward()
    found = gradients(module)
    assert [g.tolist() for g in found] == [[[5.0, 6.0]], [[0.0, 0.0]]]
    module[0].weight.grad.zero_()
    assert found[0].tolist() == [[5.0, 6.0]], "a copy, not a view"


def test_the_gradient_of_a_loss_leaves_the_models_own_alone():
    model = nn.Linear(2, 1, bias=False)
    model(torch.tensor([[5.0, 6.0]])).sum().backward()
    (found,) = gradient_of(model, lambda module: module(torch.tensor([[7.0, 8.0]])).sum())
    assert (found.tolist(), model.weight.grad.tolist()) == ([[7.0, 8.0]], [[5.0, 6.0]])


@pytest.mark.parametrize("side", [0, 1])
def test_a_zero_gradient_is_refused_and_named(side):
    pair = [TRUE, [torch.zeros_like(t) for t in TRUE]]
    with pytest.raises(ValueError, match=r"the (compared|true) gradient is zero") as caught:
        ratio_and_cosine(pair[1 - side], pair[side])
    assert ("true" in str(caught.value)) == (side == 1)


def test_the_largest_difference_is_over_all_elements():
    assert largest_difference(TRUE, TRUE) == 0
    assert largest_difference([TRUE[0], TRUE[1] - 0.5], TRUE) == 0.5
    assert largest_difference([], []) == 0
    assert math.isnan(largest_difference([torch.tensor(float("nan"))], [torch.tensor(1.0)]))


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


def on_ranks(*of_ranks: list[torch.Tensor]) -> list[dict[str, list[torch.Tensor]]]:
    return [{"it": found} for found in of_ranks]


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


MODEL, INPUTS = nn.Linear(3, 1), torch.randn(8, 3)


def mean(model: nn.Module, rows: slice = slice(None)) -> torch.Tensor:
    return model(INPUTS[rows]).square().mean()


def own_with_rank(module: nn.Module, rows: slice) -> Held:
    mean(module, rows).backward()
    return Held(gradients(module), (dist.get_rank(),))


def equal_with_rank(module: nn.Module, rows: slice) -> Held:
    under_ddp(mean)(module, rows)
    return Held(gradients(module), (dist.get_rank(),))


def test_local_gradients_get_one_line_per_rank_with_its_own_notes_and_equal_ones_need_one_note():
    truth = gradient_of(MODEL, mean)
    tried = try_variants(MODEL, [own_with_rank], truth, [4, 4])
    assert [(v.variant, v.ranks, v.notes) for v in tried] == [
        ("own with rank", "rank 0", (0,)),
        ("own with rank", "rank 1", (1,)),
    ]
    with pytest.raises(ValueError, match="equal with rank: equal tensors on all ranks, but notes"):
        try_variants(MODEL, [equal_with_rank], truth, [4, 4])
