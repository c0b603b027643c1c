"""Which factor repairs a loss: found on real ranks, and refused where ranks disagree."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.testing.factors import Experiment, factor_table, is_right, try_factors
from miniddp.manual import average_gradients

torch.manual_seed(5)
INPUTS, TARGETS = torch.randn(6, 3), torch.randn(6, 2)
MODEL = nn.Linear(3, 2)


def own_sum_over_all(outputs, targets):
    return F.mse_loss(outputs, targets, reduction="sum") / (6 * 2)


@pytest.mark.parametrize("counts", [(1, 5), (2, 1, 3)])
def test_a_global_denominator_needs_the_world_size(counts):
    experiment = Experiment(MODEL, INPUTS, TARGETS, average_gradients)
    found = try_factors(experiment, own_sum_over_all, F.mse_loss, counts)
    assert [name for name, one in found.items() if is_right(one)] == ["×W"]
    assert found["×1"].ratio == pytest.approx(1 / len(counts), rel=1e-5)
    assert factor_table(found).split()[-2:] == ["1.0000", "×W"]


def test_own_means_of_unequal_counts_are_never_right():
    experiment = Experiment(MODEL, INPUTS, TARGETS, average_gradients)
    found = try_factors(experiment, F.mse_loss, F.mse_loss, counts=(1, 5))
    assert not any(map(is_right, found.values()))
    assert factor_table(found).split()[-1] == "none"


def test_ranks_that_end_with_different_gradients_are_an_error():
    experiment = Experiment(MODEL, INPUTS, TARGETS, combine=lambda module: dist.barrier())
    with pytest.raises(RuntimeError, match="the ranks hold different gradients"):
        try_factors(experiment, F.mse_loss, F.mse_loss)


def test_nans_in_the_same_places_on_all_ranks_are_compared_and_no_factor_is_right():
    def overflow(module):
        average_gradients(module)
        module.weight.grad[0, 0] = torch.nan

    experiment = Experiment(MODEL, INPUTS, TARGETS, overflow)
    found = try_factors(experiment, own_sum_over_all, F.mse_loss)
    assert all(math.isnan(one.ratio) for one in found.values())
    assert not any(map(is_right, found.values()))


def test_a_combined_gradient_of_zeros_is_a_value_error():
    experiment = Experiment(MODEL, INPUTS, TARGETS, combine=lambda module: module.zero_grad())
    with pytest.raises(ValueError, match="compared gradient is zero"):
        try_factors(experiment, F.mse_loss, F.mse_loss)
