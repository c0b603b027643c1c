"""All-reduce from send and recv: the result, and the same bits everywhere.

Cases are tensors of every dtype and many layouts.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from labkit.launch.ranks import run_ranks
from miniddp.collectives import (
    Nodes,
    hierarchical_all_reduce,
    naive_all_reduce,
    recursive_doubling_all_reduce,
    ring_all_reduce,
)
from tests.on_ranks import on_ranks

ROUNDED = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ROUNDED += [torch.complex64, torch.complex128]
EXACT = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "every other element": lambda t: t.repeat_interleave(2)[::2],
    "transposed": lambda t: t[: len(t) // 2 * 2].view(-1, 2).t(),
    "0-d": lambda t: t.sum().to(t.dtype),
    "conjugated": lambda t: t.conj(),
    "not from the start of its storage": lambda t: torch.cat([t[:1], t])[1:],
}


@dataclass(frozen=True)
class Case:
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


def cases(world_size: int) -> list[Case]:
    """Other ones for each number of ranks."""
    draw = random.Random(world_size)

    def case(number: int) -> Case:
        dtype, length = draw.choice(ROUNDED + EXACT), draw.choice([0, 1, 2, 3, 7, 40])
        average = dtype in ROUNDED and draw.random() < 0.5
        return Case(dtype, length, draw.choice(list(LAYOUTS)), average, number)

    return [case(number) for number in range(40)]


def reduce_all(
    rank: int, todo: Sequence[Case], all_reduce: Callable[..., None]
) -> list[tuple[Tensor, Tensor]]:
    """On a rank, for each case: our result, and torch's on a contiguous copy."""
    results = []
    for case in todo:
        ours = case.tensor(rank)
        # gloo has no 16-bit integers, and reduces a strided view wrongly, without a word
        theirs = ours.resolve_conj().contiguous()
        theirs = theirs.to(torch.int32) if case.dtype == torch.int16 else theirs.clone()
        returned = all_reduce(ours, case.op)
        assert returned is None
        dist.all_reduce(theirs, case.op)
        results.append((ours.resolve_conj(), theirs.to(case.dtype)))
    return results


def check(todo: Sequence[Case], of_rank: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> None:
    """Each of ours is the sum, or the average, and torch's, and bitwise equal on all ranks."""
    world_size = len(of_rank)
    for number, case in enumerate(todo):
        brought = [case.tensor(rank).resolve_conj() for rank in range(world_size)]
        exact = sum(t.to(_wide(case.dtype)) for t in brought)
        exact = exact / world_size if case.average else exact
        for results in of_rank:
            ours, theirs = results[number]
            assert ours.shape == theirs.shape == brought[0].shape, case
            assert ours.dtype == case.dtype, case
            assert _bits(ours) == _bits(of_rank[0][number][0]), case
            for wanted in (theirs, exact.to(case.dtype)):
                difference = (ours.to(_wide(case.dtype)) - wanted.to(_wide(case.dtype))).abs()
                bound = _tolerance(case, brought)
                assert not difference.numel() or difference.max() <= bound, case


def _bits(tensor: Tensor) -> bytes:
    return bytes(torch.cat([tensor.reshape(-1)]).view(torch.uint8).tolist())


def _tolerance(case: Case, everybodys: list[Tensor]) -> float:
    """A bound on the rounding of any order of additions: (W + 1) · ε · Σ|x|, at the greatest."""
    if case.dtype not in ROUNDED:
        return 0.0
    magnitude = sum(t.abs().double() for t in everybodys)
    size = float(magnitude.max()) if magnitude.numel() else 0.0
    return (len(everybodys) + 1) * torch.finfo(case.dtype).eps * size


def _wide(dtype: torch.dtype) -> torch.dtype:
    """A dtype in which a handful of numbers of `dtype` add up without rounding to speak of."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


ALGORITHMS: dict[str, Callable[..., None]] = {
    "naive": naive_all_reduce,
    "ring": ring_all_reduce,
    "recursive doubling": recursive_doubling_all_reduce,
}


def by_each(rank: int, world_size: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
    ways = dict(ALGORITHMS)
    for size in range(1, world_size + 1):
        if world_size % size == 0:
            nodes = Nodes.groups(size)
            ways[f"nodes of {size}"] = partial(hierarchical_all_reduce, nodes=nodes)
    return {name: reduce_all(rank, cases(world_size), way) for name, way in ways.items()}


@pytest.mark.parametrize("world_size", range(1, 7))
def test_the_result_is_that_of_dist_all_reduce_and_has_the_same_bits_on_every_rank(
    world_size: int,
) -> None:
    of_rank = run_ranks(by_each, world_size)
    for name in of_rank[0]:
        check(cases(world_size), [found[name] for found in of_rank])


@on_ranks(5)
def test_only_the_ranks_of_the_group_take_part(rank: int) -> None:
    groups = [dist.new_group([3, 1]), dist.new_group([0, 2, 4])]
    wanted = torch.tensor([10101.0, -6.0] if rank % 2 == 0 else [1010.0, -4.0])
    for all_reduce in ALGORITHMS.values():
        tensor = torch.tensor([10.0**rank, -rank])
        all_reduce(tensor, group=groups[rank % 2 == 0])
        assert torch.equal(tensor, wanted)
        with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
            all_reduce(tensor, group=groups[rank % 2 == 1])


@on_ranks(4)
def test_an_average_of_float16_does_not_overflow_though_the_sum_would(rank: int) -> None:
    for all_reduce in ALGORITHMS.values():
        gradient = torch.tensor([40_000.0 + 32 * rank], dtype=torch.float16)
        all_reduce(gradient, dist.ReduceOp.AVG)
        assert abs(gradient.item() - 40_048) <= 64


@on_ranks(2)
def test_what_cannot_be_reduced_is_refused_before_anything_is_sent(rank: int) -> None:
    ints, sparse = torch.ones(2, dtype=torch.int64) + rank, torch.eye(2).to_sparse()
    for all_reduce in ALGORITHMS.values():
        with pytest.raises(ValueError, match=r"op is RedOpType\.MAX: use ReduceOp\.SUM or"):
            all_reduce(torch.ones(2), dist.ReduceOp.MAX)
        with pytest.raises(TypeError, match=r"an average of torch\.int64 needs fractions"):
            all_reduce(ints, dist.ReduceOp.AVG)
        with pytest.raises(TypeError, match=r"the tensor's layout is torch\.sparse_coo"):
            all_reduce(sparse, dist.ReduceOp.SUM)


@on_ranks(3)
def test_a_world_that_is_not_made_of_whole_nodes_is_refused_on_every_rank():
    for ranks_per_node in (0, 2, 4):
        said = f"3 ranks do not divide evenly into nodes of {ranks_per_node}"
        with pytest.raises(ValueError, match=said):
            Nodes.groups(ranks_per_node)
