"""The thread's function, and the two situations that tell it from DDP."""

from functools import partial

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.scenarios.by_hand import (
    Strategy,
    after_different_seeds,
    average_as_posted,
    with_a_gradient_missing_on_rank_1,
)


def itself(model: nn.Module) -> nn.Module:
    return model


def nothing(model: nn.Module) -> None:
    return None


def summed(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = parameter.new_zeros(parameter.shape)
        dist.all_reduce(parameter.grad)


FINDS_UNUSED = partial(DistributedDataParallel, find_unused_parameters=True)


@pytest.mark.parametrize(
    ("strategy", "replicas"),
    [((itself, average_as_posted), "different"), ((DistributedDataParallel, nothing), "equal")],
)
def test_only_the_wrapper_gives_all_ranks_the_same_initial_weights(strategy: Strategy, replicas):
    assert after_different_seeds(strategy) == replicas


@pytest.mark.parametrize(
    ("strategy", "outcome"),
    [
        ((itself, average_as_posted), "raises AttributeError"),
        ((DistributedDataParallel, nothing), "raises RuntimeError"),
        ((FINDS_UNUSED, nothing), "averaged"),
        ((itself, summed), "wrong"),
    ],
)
def test_a_missing_gradient_is_averaged_raised_or_seen_to_be_wrong(strategy: Strategy, outcome):
    assert with_a_gradient_missing_on_rank_1(strategy) == outcome
