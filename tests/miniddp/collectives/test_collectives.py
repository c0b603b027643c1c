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


def test_only_the_ranks_of_the_group_take_part() -> None:
    def work(rank: int) -> None:
        groups = [dist.new_group([3, 1]), dist.new_group([0, 2, 4])]
        wanted = torch.tensor([10101.0, -6.0] if rank % 2 == 0 else [1010.0, -4.0])
        for all_reduce in ALGORITHMS.values():
            tensor = torch.tensor([10.0**rank, -rank])
            all_reduce(tensor, group=groups[rank % 2 == 0])
            assert torch.equal(tensor, wanted)
            with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
                all_reduce(tensor, group=groups[rank % 2 == 1])

    run_ranks(work, 5)


def test_an_average_of_float16_does_not_overflow_though_the_sum_would() -> None:
    def work(rank: int) -> None:
        for all_reduce in ALGORITHMS.values():
            gradient = torch.tensor([40_000.0 + 32 * rank], dtype=torch.float16)
            all_reduce(gradient, dist.ReduceOp.AVG)
            assert abs(gradient.item() - 40_048) <= 64

    run_ranks(work, 4)


def test_what_cannot_be_reduced_is_refused_before_anything_is_sent() -> None:
    def work(rank: int) -> None:
        ints, sparse = torch.ones(2, dtype=torch.int64) + rank, torch.eye(2).to_sparse()
        for all_reduce in ALGORITHMS.values():
            with pytest.raises(ValueError, match=r"op is RedOpType\.MAX: use ReduceOp\.SUM or"):
                all_reduce(torch.ones(2), dist.ReduceOp.MAX)
            with pytest.raises(TypeError, match=r"an average of torch\.int64 needs fractions"):
                all_reduce(ints, dist.ReduceOp.AVG)
            with pytest.raises(TypeError, match=r"the tensor's layout is torch\.sparse_coo"):
                all_reduce(sparse, dist.ReduceOp.SUM)

    run_ranks(work, 2)
