"""All-reduce from send and recv: the result, the same bits everywhere, and the promised cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from labkit.ranks import run_ranks
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
ROUNDED = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ROUNDED += [torch.complex64, torch.complex128]
EXACT = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
LAYOUTS = {
    "contiguous": lambda t: t,
    "every other element": lambda t: t.repeat_interleave(2)[::2],
    "transposed": lambda t: t[: len(t) // 2 * 2].view(-1, 2).t(),
    "0-d": lambda t: t.sum().to(t.dtype),
    "conjugated": lambda t: t.conj(),
    "not from the start of its storage": lambda t: torch.cat([t[:1], t])[1:],
}


@dataclass(frozen=True)
class Case:
    algorithm: str
    dtype: torch.dtype
    length: int
    layout: str
    average: bool
    seed: int

    def tensor(self, rank: int) -> Tensor:
        """What this rank brings: other numbers on every rank."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        shape = (self.length, 2) if self.dtype.is_complex else (self.length,)
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if self.dtype.is_complex:
            values = torch.view_as_complex(values)
        elif not self.dtype.is_floating_point:
            values = (values * 5).round() if self.dtype.is_signed else values.abs() * 5
        return LAYOUTS[self.layout](values.to(self.dtype))

    @property
    def op(self) -> Any:
        return dist.ReduceOp.AVG if self.average else dist.ReduceOp.SUM


def cases() -> st.SearchStrategy[Case]:
    def of(dtype: torch.dtype) -> st.SearchStrategy[Case]:
        return st.builds(
            Case,
            algorithm=st.sampled_from(sorted(ALGORITHMS)),
            dtype=st.just(dtype),
            length=st.integers(0, 40),
            layout=st.sampled_from(sorted(LAYOUTS)),
            average=st.booleans() if dtype in ROUNDED else st.just(False),
            seed=st.integers(0, 10_000),
        )

    return st.sampled_from(ROUNDED + EXACT).flatmap(of)


def reduce_all(rank: int, todo: list[Case]) -> list[tuple[Tensor, Tensor]]:
    """For each case: our result, and torch's on a contiguous copy."""
    results = []
    for case in todo:
        ours = case.tensor(rank)
        # gloo has no 16-bit integers, and reduces a strided view wrongly, without a word
        theirs = ours.resolve_conj().contiguous()
        theirs = theirs.to(torch.int32) if case.dtype == torch.int16 else theirs.clone()
        returned = ALGORITHMS[case.algorithm](ours, case.op)
        assert returned is None
        dist.all_reduce(theirs, case.op)
        results.append((ours.resolve_conj(), theirs.to(case.dtype)))
    return results


def bits(tensor: Tensor) -> bytes:
    return bytes(torch.cat([tensor.reshape(-1)]).view(torch.uint8).tolist())


def tolerance(case: Case, everybodys: list[Tensor]) -> float:
    """A bound on the rounding of any order of additions: W · ε · Σ|x|, at the greatest element."""
    if case.dtype not in ROUNDED:
        return 0.0
    magnitude = sum(t.abs().double() for t in everybodys)
    size = float(magnitude.max()) if magnitude.numel() else 0.0
    return (len(everybodys) + 1) * torch.finfo(case.dtype).eps * size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
# No shrinking: a failing case is one line of the message already, and each try starts ranks.
@settings(max_examples=3, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(todo=st.lists(cases(), min_size=25, max_size=50))
def test_the_result_is_that_of_dist_all_reduce_and_has_the_same_bits_on_every_rank(
    world_size: int, todo: list[Case]
) -> None:
    of_rank = run_ranks(reduce_all, world_size, todo)
    for number, case in enumerate(todo):
        brought = [case.tensor(rank).resolve_conj() for rank in range(world_size)]
        exact = sum(t.to(wide(case.dtype)) for t in brought)
        exact = exact / world_size if case.average else exact
        for results in of_rank:
            ours, theirs = results[number]
            assert ours.shape == theirs.shape == brought[0].shape, case
            assert ours.dtype == case.dtype, case
            assert bits(ours) == bits(of_rank[0][number][0]), case
            for wanted in (theirs, exact.to(case.dtype)):
                difference = (ours.to(wide(case.dtype)) - wanted.to(wide(case.dtype))).abs()
                bound = tolerance(case, brought)
                assert not difference.numel() or difference.max() <= bound, case


def wide(dtype: torch.dtype) -> torch.dtype:
    """A dtype in which a handful of numbers of `dtype` add up without rounding to speak of."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def count_messages(rank: int, world_size: int, lengths: list[int]) -> list[tuple[str, int, int]]:
    """For each algorithm and length: how many steps this rank took, and the elements it sent."""
    counted = []
    for name, all_reduce in ALGORITHMS.items():
        for length in lengths:
            tensor = torch.arange(length) + rank
            really = dist.batch_isend_irecv
            with mock.patch.object(dist, "batch_isend_irecv", wraps=really) as exchange:
                all_reduce(tensor)
            steps = [
                sum(o.tensor.numel() for o in call.args[0] if o.op is dist.isend)
                for call in exchange.call_args_list
            ]
            everybodys = torch.arange(length) * world_size + sum(range(world_size))
            assert torch.equal(tensor, everybodys)
            counted.append((name, len(steps), sum(steps)))
    return counted


def promised(name: str, rank: int, world_size: int, length: int) -> tuple[int, int]:
    """Steps and elements sent by `rank`, as the docstrings of `miniddp.collectives` have them."""
    if world_size == 1:
        return 0, 0
    if name == "naive":
        others = world_size - 1
        return (2 * others, others * length) if rank == 0 else (2, length)
    if name == "ring":
        chunks = [len(c) for c in torch.empty(length).tensor_split(world_size)]
        left_out = chunks[(rank + 1) % world_size] + chunks[(rank + 2) % world_size]
        return 2 * (world_size - 1), 2 * length - left_out
    doublings = int(math.log2(world_size))
    power = 2**doublings
    if rank >= power:
        return 2, length
    stands_in = rank + power < world_size
    return doublings + 2 * stands_in, (doublings + stands_in) * length


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 8])
def test_each_rank_takes_the_steps_and_sends_the_bytes_of_the_docstring(world_size: int) -> None:
    lengths = [0, 1, world_size, 7 * world_size, 7 * world_size + 1, 1000]
    of_rank = run_ranks(count_messages, world_size, lengths)
    for rank, counted in enumerate(of_rank):
        wanted = [
            (name, *promised(name, rank, world_size, length))
            for name in ALGORITHMS
            for length in lengths
        ]
        assert counted == wanted


def test_the_ring_sends_the_least_that_any_all_reduce_can() -> None:
    length, world_size = 1200, 5
    of_rank = run_ranks(count_messages, world_size, [length])
    bound = 2 * (world_size - 1) / world_size * length
    busiest = {name: max(dict_of(c)[name] for c in of_rank) for name in ALGORITHMS}
    assert busiest == {
        "naive": (world_size - 1) * length,
        "ring": bound,
        "recursive doubling": 3 * length,
    }


def dict_of(counted: list[tuple[str, int, int]]) -> dict[str, int]:
    return {name: elements for name, _, elements in counted}


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


def reduce_strided_views(rank: int) -> tuple[list[Tensor], Tensor]:
    ours = []
    for all_reduce in ALGORITHMS.values():
        whole = torch.arange(6.0) + rank
        all_reduce(whole[::2])
        ours.append(whole)
    theirs = torch.arange(6.0) + rank
    dist.all_reduce(theirs[::2])
    return ours, theirs


def test_a_strided_view_is_reduced_where_torchs_gloo_takes_the_wrong_memory() -> None:
    for rank, (ours, theirs) in enumerate(run_ranks(reduce_strided_views, 2)):
        wanted = [1.0, 1.0 + rank, 5.0, 3.0 + rank, 9.0, 5.0 + rank]
        assert all(tensor.tolist() == wanted for tensor in ours)
        assert theirs.tolist() != wanted


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


def reduce_a_parameter(rank: int) -> list[tuple[Tensor, bool]]:
    results = []
    for all_reduce in ALGORITHMS.values():
        parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
        all_reduce(parameter)
        all_reduce(parameter.data[:2])
        results.append((parameter.detach(), parameter.requires_grad))
    return results


def test_a_parameter_is_reduced_in_place_and_still_requires_its_gradient() -> None:
    for results in run_ranks(reduce_a_parameter, 3):
        for values, requires_grad in results:
            assert values.tolist() == [9.0, 9.0, 3.0]
            assert requires_grad


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
            assert said[0].startswith("ValueError: op is RedOpType.MAX: take ReduceOp.SUM or")
            assert said[1].startswith("TypeError: an average of torch.int64 needs fractions")
            assert said[2].startswith("TypeError: the tensor's layout is torch.sparse_coo")
