"""Try several ways to compute one gradient on the same ranks, and compare each with the truth.

    def clipped_then_averaged(module, rows):
        F.mse_loss(module(inputs[rows]), targets[rows]).backward()
        clip_grad_norm_(module.parameters(), 1.0)
        average_gradients(module)

    print(try_variants(model, [clipped_then_averaged], truth, counts=[4, 4]).table())

A *variant* is a function of a fresh replica and of the rows that this rank holds. What it leaves in
the replica's gradients is compared, unless it returns something else: a list of tensors, or `Held`
with notes for the table. `under_ddp` makes a variant of a loss.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from labkit.tables import Cell
from labkit.testing.compare import Verdict, Verdicts, gradients, verdicts


class Held(NamedTuple):
    """What a rank holds at the end of a variant, and what its line of the table says besides."""

    tensors: list[Tensor]
    notes: tuple[Cell, ...] = ()


Variant = Callable[[nn.Module, slice], "Held | list[Tensor] | None"]
LossOnRows = Callable[[nn.Module, slice], Tensor]


def try_variants(
    model: nn.Module,
    variants: Sequence[Variant] | Mapping[str, Variant],
    truth: Sequence[Tensor] | Mapping[str, Sequence[Tensor]],
    counts: Sequence[int] = (4, 4, 4, 4),
) -> Verdicts:
    """Run each variant on `len(counts)` ranks and compare what every rank holds with `truth`.

    Args:
        model: copied for each variant, and left as it is.
        variants: by name; of a sequence of functions the names are the functions' own.
        truth: one for all variants, or one for each name.
        counts: rank 0 holds the first `counts[0]` rows, rank 1 the next `counts[1]`, …

    Raises what a rank raised, and ValueError for shapes that differ from the truth's, or for ranks
    that hold the same tensors and different notes: one line could not show both.
    """
    if not isinstance(variants, Mapping):
        variants = {variant.__name__.replace("_", " "): variant for variant in variants}
    rows = rows_of_ranks(counts)
    of_ranks = run_ranks(_on_this_rank, len(counts), model, dict(variants), rows)
    judged = verdicts([{n: h.tensors for n, h in held.items()} for held in of_ranks], truth)
    return Verdicts(
        verdict._replace(notes=_notes_of(verdict, [held[verdict.variant] for held in of_ranks]))
        for verdict in judged
    )


def under_ddp(loss: LossOnRows, **options: Any) -> Variant:
    """The variant that back-propagates `loss` of the replica in torch's DDP with these options."""

    def variant(module: nn.Module, rows: slice) -> None:
        ddp = DistributedDataParallel(module, **options)  # without the name, it would not live
        loss(ddp, rows).backward()

    return variant


def rows_of_ranks(counts: Sequence[int]) -> list[slice]:
    """Consecutive rows: rank 0 owns the first `counts[0]`, rank 1 the next `counts[1]`, …"""
    ends = list(accumulate(counts))
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _on_this_rank(
    rank: int, model: nn.Module, variants: Mapping[str, Variant], rows: Sequence[slice]
) -> dict[str, Held]:
    found = {}
    for name, variant in variants.items():
        module = copy.deepcopy(model)
        held = variant(module, rows[rank])
        tensors = gradients(module) if held is None else held
        found[name] = tensors if isinstance(tensors, Held) else Held(tensors)
    return found


def _notes_of(verdict: Verdict, held: Sequence[Held]) -> tuple[Cell, ...]:
    if verdict.ranks != "all":
        return tuple(held[int(verdict.ranks.removeprefix("rank "))].notes)
    notes = {tuple(one.notes) for one in held}
    if len(notes) > 1:
        raise ValueError(f"{verdict.variant}: equal tensors on all ranks, but notes {notes}")
    return notes.pop()
