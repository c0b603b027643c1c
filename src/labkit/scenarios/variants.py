"""Several ways to combine one gradient, each run on the same ranks and compared with the truth.

    def clipped_then_averaged(module, rows):
        problem.loss(module, rows).backward()
        clip_grad_norm_(module.parameters(), 1.0)
        average_gradients(module)

    tried = try_variants(problem, [clipped_then_averaged], truth)
    print(tried.table())

A *variant* is a function of a fresh replica and of the rows that this rank holds. What it leaves in
the replica's gradients is compared, unless it returns something else: a list of tensors, or `Held`
with notes for the table.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from labkit.book.tables import Cell, table
from labkit.launch.ranks import run_ranks
from labkit.scenarios.rare_samples import Problem
from labkit.testing.compare import gradients
from labkit.testing.verdict import Verdict, verdicts


class Held(NamedTuple):
    """What a rank holds at the end of a variant, and what its line of the table says besides."""

    tensors: list[Tensor]
    notes: tuple[Cell, ...] = ()


Variant = Callable[[nn.Module, slice], "Held | list[Tensor] | None"]


class Tried(NamedTuple):
    """The verdicts, one per variant (or per rank where ranks differ), and the notes beside them."""

    verdicts: list[Verdict]
    notes: list[tuple[Cell, ...]]

    def table(self, *headers: str, digits: int = 4) -> str:
        """One line per verdict; `headers` name the columns of notes."""
        lines = zip(self.verdicts, self.notes, strict=True)
        rows = [[v.variant, v.ranks, *v.comparison, v.kind, *notes] for v, notes in lines]
        return table(["variant", "ranks", "ratio", "cosine", "verdict", *headers], rows, digits)


def try_variants(
    problem: Problem,
    variants: Sequence[Variant] | Mapping[str, Variant],
    truth: Sequence[Tensor] | Mapping[str, Sequence[Tensor]],
    world_size: int = 4,
) -> Tried:
    """Run each variant on `world_size` ranks and compare what every rank holds with `truth`.

    Args:
        problem: gives each variant its replica and its rows.
        variants: by name; of a sequence of functions the names are the functions' own.
        truth: one for all variants, or one for each name.
        world_size: how many ranks.

    Raises what a rank raised, ValueError for shapes that differ from the truth's, and ValueError
    for ranks that hold the same tensors and different notes: one line could not show both.
    """
    if not isinstance(variants, Mapping):
        variants = {variant.__name__.replace("_", " "): variant for variant in variants}
    of_ranks = run_ranks(_on_this_rank, world_size, problem, dict(variants))
    judged = verdicts([{n: h.tensors for n, h in held.items()} for held in of_ranks], truth)
    notes = [_notes_of(verdict, [held[verdict.variant] for held in of_ranks]) for verdict in judged]
    return Tried(judged, notes)


def _on_this_rank(
    rank: int, world_size: int, problem: Problem, variants: Mapping[str, Variant]
) -> dict[str, Held]:
    found = {}
    for name, variant in variants.items():
        module = problem.replica()
        held = variant(module, problem.rows(rank, world_size))
        if held is None:
            held = gradients(module)
        found[name] = held if isinstance(held, Held) else Held(held)
    return found


def _notes_of(verdict: Verdict, held: Sequence[Held]) -> tuple[Cell, ...]:
    if verdict.ranks != "all":
        return tuple(held[int(verdict.ranks.removeprefix("rank "))].notes)
    notes = {tuple(one.notes) for one in held}
    if len(notes) > 1:
        raise ValueError(f"{verdict.variant}: equal tensors on all ranks, but notes {notes}")
    return notes.pop()
