"""Tensors to all-reduce, of every dtype and many layouts, and how near the result has to be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor

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
AllReduce = Callable[[Tensor, Any], None]


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


def cases() -> st.SearchStrategy[Case]:
    def of(dtype: torch.dtype) -> st.SearchStrategy[Case]:
        return st.builds(
            Case,
            dtype=st.just(dtype),
            length=st.integers(0, 40),
            layout=st.sampled_from(sorted(LAYOUTS)),
            average=st.booleans() if dtype in ROUNDED else st.just(False),
            seed=st.integers(0, 10_000),
        )

    return st.sampled_from(ROUNDED + EXACT).flatmap(of)


def reduce_all(
    rank: int, todo: Sequence[Case], all_reduce: AllReduce
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
