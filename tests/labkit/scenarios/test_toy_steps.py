"""The toy steps are what their docstrings promise, since chapters and labs quote it."""

import pytest
import torch

from labkit.scenarios.toy_steps import loss_of, small_transformer, stack_of_linears
from labkit.testing.compare import flatten, gradients, largest_difference

MIB = 2**20


def test_the_stack_has_twelve_parameters_of_which_six_have_one_mib():
    sizes = [p.nbytes for p in stack_of_linears().model.parameters()]
    assert len(sizes) == 12
    assert sizes.count(MIB) == 6


def test_the_transformer_has_96_parameters_and_24_mib_and_no_two_layers_alike():
    model = small_transformer().model
    sizes = [p.nbytes for p in model.parameters()]
    assert len(sizes) == 96
    assert f"{sum(sizes) / MIB:.1f}" == "24.1"
    first, second = model.layers[0].linear1.weight, model.layers[1].linear1.weight
    assert not torch.equal(first, second)


@pytest.mark.parametrize("make", [stack_of_linears, small_transformer])
def test_the_seed_decides_over_weights_and_inputs(make):
    (model, inputs), (again, same), (other, others) = make(3), make(3), make(4)
    assert torch.equal(flatten(model.parameters()), flatten(again.parameters()))
    assert torch.equal(inputs, same)
    assert not torch.equal(flatten(model.parameters()), flatten(other.parameters()))
    assert not torch.equal(inputs, others)


@pytest.mark.parametrize("make", [stack_of_linears, small_transformer])
def test_the_average_of_equal_shares_is_the_gradient_of_the_whole_batch(make):
    model, inputs = make(samples=4)
    parts = []
    for share in (inputs, *inputs.chunk(2)):
        model.zero_grad()
        loss_of(model(share)).backward()
        parts.append(gradients(model))
    whole, one, other = parts
    average = [(a + b) / 2 for a, b in zip(one, other, strict=True)]
    largest = max(g.abs().max().item() for g in whole)
    assert largest_difference(one, other) > 0.01 * largest, "shares that differ"
    assert largest_difference(average, whole) < 1e-5 * largest
