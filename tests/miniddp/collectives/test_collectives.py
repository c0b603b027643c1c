"""All-reduce from send and recv: the result, the same bits everywhere, and the promised cost."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from all_reduce_cases import Case, cases, check, reduce_all
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from labkit.launch.ranks import run_ranks
from miniddp.collectives import (
    naive_all_reduce,
    recursive_doubling_all_reduce,
    ring_all_reduce,
)

ALGORITHMS: dict[str, Callable[..., None]] = {
    "naive": naive_all_reduce,
    "ring": ring_all_reduce,
    "recursive doubling": recursive_doubling_all_reduce,
}


def by_each(rank: int, todo: list[Case]) -> dict[str, list[tuple[Tensor, Tensor]]]:
    return {name: reduce_all(rank, todo, all_reduce) for name, all_reduce in ALGORITHMS.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
# No shrinking: a failing case is one line of the message already, and each try starts ranks.
# The first example that Hypothesis tries is its simplest, the second is drawn at random.
@settings(max_examples=2, phases=[Phase.explicit, Phase.generate])
@given(todo=st.lists(cases(), min_size=30, max_size=60))
def test_the_result_is_that_of_dist_all_reduce_and_has_the_same_bits_on_every_rank(
    world_size: int, todo: list[Case]
) -> None:
    of_rank = run_ranks(by_each, world_size, todo)
    for name in ALGORITHMS:
        check(todo, [found[name] for found in of_rank])


def in_two_groups(rank: int) -> list[Tensor]:
    groups = [dist.new_group([3, 1]), dist.new_group([0, 2, 4])]
    group = groups[rank % 2 == 0]
    outside = groups[rank % 2 == 1]
    results = []
    for all_reduce in ALGORITHMS.values():
        tensor = torch.tensor([10.0**rank, -rank])
        all_reduce(tensor, group=group)
        results.append(tensor)
        with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
            all_reduce(tensor, group=outside)
    return results


def test_only_the_ranks_of_the_group_take_part() -> None:
    of_rank = run_ranks(in_two_groups, 5)
    for rank, results in enumerate(of_rank):
        wanted = torch.tensor([10101.0, -6.0] if rank % 2 == 0 else [1010.0, -4.0])
        assert all(torch.equal(result, wanted) for result in results)


def average_large_halves(rank: int) -> list[Tensor]:
    results = []
    for all_reduce in ALGORITHMS.values():
        gradient = torch.tensor([40_000.0 + 32 * rank], dtype=torch.float16)
        all_reduce(gradient, dist.ReduceOp.AVG)
        results.append(gradient)
    return results


def test_an_average_of_float16_does_not_overflow_though_the_sum_would() -> None:
    wanted = torch.tensor([40_048.0]).half()
    for results in run_ranks(average_large_halves, 4):
        assert all((result - wanted).abs() <= 64 for result in results)


def refuse(rank: int) -> list[list[str]]:
    bad = [
        (torch.ones(2), dist.ReduceOp.MAX),
        (torch.ones(2, dtype=torch.int64) + rank, dist.ReduceOp.AVG),
        (torch.eye(2).to_sparse(), dist.ReduceOp.SUM),
    ]
    said = []
    for all_reduce in ALGORITHMS.values():
        of_one = []
        for tensor, op in bad:
            with pytest.raises((TypeError, ValueError)) as caught:
                all_reduce(tensor, op)
            of_one.append(f"{caught.type.__name__}: {caught.value}")
        said.append(of_one)
    return said


def test_what_cannot_be_reduced_is_refused_before_anything_is_sent() -> None:
    for of_rank in run_ranks(refuse, 2):
        for said in of_rank:
            assert said[0].startswith("ValueError: op is RedOpType.MAX: use ReduceOp.SUM or")
            assert said[1].startswith("TypeError: an average of torch.int64 needs fractions")
            assert said[2].startswith("TypeError: the tensor's layout is torch.sparse_coo")
