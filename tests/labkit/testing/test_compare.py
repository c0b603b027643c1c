"""Ratio and cosine: the two numbers against hand-made gradients."""

import math

import pytest
import torch
from torch import nn

from labkit.testing.compare import gradients, largest_difference, ratio_and_cosine

TRUE = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]


def test_another_direction_has_a_smaller_cosine():
    turned = [torch.tensor([0.0, 3.0]), torch.tensor([[4.0]])]
    assert ratio_and_cosine(turned, TRUE) == pytest.approx((1.0, 16 / 25))
    assert ratio_and_cosine([-t for t in TRUE], TRUE) == pytest.approx((1.0, -1.0))


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


@pytest.mark.parametrize("side", [0, 1])
def test_a_zero_gradient_is_refused_and_named(side):
    pair = [TRUE, [torch.zeros_like(t) for t in TRUE]]
    with pytest.raises(ValueError, match=r"the (compared|true) gradient is zero") as caught:
        ratio_and_cosine(pair[1 - side], pair[side])
    assert ("true" in str(caught.value)) == (side == 1)


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="different shapes"):
        ratio_and_cosine([TRUE[0]], TRUE)
    with pytest.raises(ValueError, match="different shapes"):
        largest_difference([t.flatten() for t in TRUE], TRUE)


def test_the_largest_difference_is_over_all_elements():
    assert largest_difference(TRUE, TRUE) == 0
    assert largest_difference([TRUE[0], TRUE[1] - 0.5], TRUE) == 0.5
    assert largest_difference([], []) == 0
    assert math.isnan(largest_difference([torch.tensor(float("nan"))], [torch.tensor(1.0)]))
