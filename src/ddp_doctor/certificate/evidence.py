"""What both parts of a certificate wrote: steps side by side, and what speaks against comparing."""

import math
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ddp_doctor.certificate.measure import HALF, TOLERANCE, Comparison, Gradients, compare
from ddp_doctor.certificate.plan import AGAIN, COPIES, DEAL, OWN, TWICE
from ddp_doctor.certificate.premises import (
    LOSS,
    MARK,
    MODEL,
    Doubt,
    other_counts,
    other_outputs,
    parted,
    same_totals,
)
from ddp_doctor.certificate.record import Seen, Step, Steps

ELSEWHERE = "This step did not get its samples at the places where the first step did."
FOREIGN = "The DataLoader's samples are of class {}, which is not handed to another process."
IN_ORDER = (
    "In one process, the same samples in another order give another gradient. So the gradient "
    "depends on which samples share a micro-batch, or on the number of the step."
)
UNSTEADY = (
    "In another step, the same samples give {} another gradient (relative error {:.2g}). The step "
    "draws, counts, or moves something that is not seen. Seed it, or turn it off."
)
UNJOINED = (
    "What the ranks use at {} cannot be joined. If it belongs to a batch and its shape differs "
    "between the ranks, take it from a DataLoader with a collate_fn."
)
ONE_BATCH = (
    "All ranks have the same samples here, and have others each in another deal. If they split one "
    "batch, such a deal says nothing."
)
OTHERS = "The ranks hold different parameters, so one process cannot stand for them."
WORLD = "The script contains the number of ranks, so one process of it may calculate with it, too."
FROZEN = "Parameters without requires_grad have other values in one process. Seed them."
SENT = (
    "At {}, all ranks have the same tensor: one rank sends it, or all draw it alike. Whether its "
    "rows belong to the samples, and move with them, is not known."
)
OF_A_PASS = (
    "At {}, the same samples have other outputs in another backward pass. So the model depends on "
    "the pass, or on which samples share it, and another deal over the passes says nothing."
)
ROUNDING = 8  # times the precision of a weight: what may lie between equal weights


class Evidence:
    """The steps of the ranks and of one process. `base` is the tolerance without noise."""

    def __init__(self, ranks: Steps, one: Steps, spread: bool, world_in_script: bool) -> None:
        self.ranks, self.one = ranks, one
        self.world_in_script = world_in_script
        self.first = ranks[0, 0, OWN]
        self.world, self.micros = self.first.world, max(1, self.first.backwards)
        self.passes = self.world if spread else 1  # of one process for each of a rank's
        self.names: dict[str, str] = {}
        for step in ranks.values():
            self.names |= step.names if step.rank == 0 else {}
        half = any(step.half for part in (ranks, one) for step in part.values())
        self.base = HALF if half else TOLERANCE

    @property
    def noise(self) -> float | None:
        """What another order of one process's samples changes; None if it is more than that."""
        return self._noise[0]

    @property
    def in_order(self) -> bool:
        """Whether another order of one process's samples changes more than rounding does."""
        return self._noise[1]

    @property
    def tolerance(self) -> float:
        """The relative error of gradients that are equal."""
        return max(self.base, 2 * (self.noise or 0.0))

    # Steps side by side.

    def gradients(self, part: Steps, kind: str) -> dict[str, Tensor]:
        """Of all optimizers whose step of this kind is there."""
        return {
            key: gradient
            for step in self.of_rank_0(part, kind)
            for key, gradient in step.gradients.items()
        }

    def of_rank_0(self, part: Steps, kind: str) -> list[Step]:
        """Each optimizer's step of this kind."""
        return [
            step for (rank, _, step_kind), step in part.items() if (rank, step_kind) == (0, kind)
        ]

    def last(self, part: Steps, kind: str) -> Step:
        """What was known when rank 0's last optimizer took this step."""
        return self.of_rank_0(part, kind)[-1]

    def compared(self, first: tuple[Steps, str], second: tuple[Steps, str]) -> Comparison:
        """Of the optimizers that have both steps."""
        sides = [self.gradients(*first), self.gradients(*second)]
        both = set.intersection(*({key.split(".")[0] for key in side} for side in sides))
        got, wanted = (
            {key: g for key, g in side.items() if key.split(".")[0] in both} for side in sides
        )
        return compare(got, wanted, self.names, self.tolerance)

    def other_shapes(self, first: tuple[Steps, str], second: tuple[Steps, str]) -> bool:
        """Whether a parameter's gradients are of different shapes."""
        return shapes_differ(self.gradients(*first), self.gradients(*second))

    def left_out(self, kind: str, part: Steps) -> bool:
        """Whether an optimizer of the first step has no step of this kind."""
        first = {
            optimizer for rank, optimizer, step_kind in self.ranks if (rank, step_kind) == (0, OWN)
        }
        return any((0, optimizer, kind) not in part for optimizer in first)

    def of_first(self, step: Step) -> Step | None:
        """Rank 0's step that is the same as another rank's."""
        return self.ranks.get((0, step.optimizer, step.kind))

    # What one process shows by itself.

    @cached_property
    def _noise(self) -> tuple[float | None, bool]:
        """What another order of one process's samples changes; whether that is more than rounding.

        None and False if the samples are not the same.
        """
        part, second = (self.one, DEAL) if self.world > 1 else (self.ranks, COPIES)
        a, b = part.get((0, 0, OWN)), part.get((0, 0, second))
        if a is None or b is None or a.backwards != b.backwards or b.unlike:
            return None, False
        if self.other_shapes((part, OWN), (part, second)):
            return None, False
        noise = compare(a.gradients, b.gradients, self.names).error
        if noise <= self.base or not math.isfinite(noise):
            return noise if noise <= self.base else None, False
        return None, not parted(a.seen, b.seen)

    @cached_property
    def unsteady(self) -> str:
        """That the same samples give another gradient in another step, in a sentence; or empty."""
        for part, who in ((self.ranks, "the ranks"), (self.one, "one process")):
            if not self.of_rank_0(part, AGAIN) or self.other_shapes((part, OWN), (part, AGAIN)):
                continue
            doubt = parted(self.all_seen(part, OWN), self.all_seen(part, AGAIN))
            if doubt is not None and doubt.of_samples:
                continue  # they are other samples
            error = self.compared((part, AGAIN), (part, OWN)).error
            if error > self.base:
                return UNSTEADY.format(who, error)
        return ""

    @cached_property
    def uncombined(self) -> bool:
        """Whether a rank's gradient of the first step is another than rank 0's."""
        others = (step for step in self.ranks.values() if step.rank and step.kind == OWN)
        both = ((step.sums, ours.sums) for step in others if (ours := self.of_first(step)))
        return any(
            not shapes_differ(*sums) and compare(*sums, self.names, self.tolerance).kind != "equal"
            for sums in both
        )

    def is_deaf(self) -> bool:
        """Whether other samples give the ranks exactly the same gradient."""
        if self.uncombined or self.other_shapes((self.ranks, OWN), (self.ranks, COPIES)):
            return False
        apart = parted(*(self.all_seen(self.ranks, kind) for kind in (OWN, COPIES)))
        if apart is None or not apart.of_samples:
            return False
        ours, copies = self.gradients(self.ranks, OWN), self.gradients(self.ranks, COPIES)
        return ours.keys() == copies.keys() and all(torch.equal(ours[k], copies[k]) for k in ours)

    def loss_is_a(self) -> Literal["sum", "mean"] | None:
        """What every sample twice says: an optimizer whose gradient doubles has a sum."""
        steps = self.of_rank_0(self.one, TWICE)
        if not steps or self.left_out(TWICE, self.one) or steps[-1].unlike:
            return None
        if self.other_shapes((self.one, OWN), (self.one, TWICE)) or self.unsteady:
            return None
        found = self.compared((self.one, TWICE), (self.one, OWN))
        each = found.by_optimizer(self.tolerance)
        if any(one.kind == "scaled" and abs(one.ratio - 2) < 0.01 for one in each):
            return "sum"
        return "mean" if found.kind == "equal" else None

    def divisors(self) -> tuple[dict[str, float], list[tuple[str, float, float]]]:
        """By what numbers losses and gradients are divided: by the same ones on a rank and in one
        process, by line; and by others: line, the rank's, one process's.
        """
        sides = [self.last(part, OWN).scales for part in (self.ranks, self.one)]
        same: dict[str, float] = {}
        for (line, at), divisor in sides[0].items():
            if sides[1].get((line, at)) == divisor != 1:
                same[line] = same.get(line, 1.0) * divisor
        both = sides[0].keys() & sides[1].keys()
        others = [(key[0], sides[0][key], sides[1][key]) for key in both]
        return same, [other for other in others if other[1] != other[2]]

    def counts(self, rank: int | None = None) -> dict[str, int]:
        """How many samples all ranks, or one, may be said to have in the first step, by what is
        counted.
        """
        found: Counter[str] = Counter()
        every = self.seen(self.ranks, OWN)
        seen = self.all_seen(self.ranks, OWN) if rank is None else every[rank]
        for note in (note for note in seen if note["what"] == LOSS):
            found["rows of the losses"] += len(note["out"])
            found["targets"] += note["targets"]
            found["targets that are not ignored"] += int(note["kept"].sum())
        inputs = [note for note in seen if note["what"] == MODEL]
        for note in (note for note in inputs if note["key"] == inputs[0]["key"]):
            found["rows that the model gets"] += len(note["rows"])
        return found

    def scaled_by_world(self, kind: str) -> bool:
        """Whether one process scales a loss or a gradient by a multiple of the number of ranks.

        It may divide by the number of its backward passes.
        """
        step = self.last(self.one, kind)
        factors = [n for n in step.scales.values() if n != step.backwards and math.isfinite(n)]
        large = [max(abs(n), 1 / abs(n)) / self.world for n in factors]
        return any(n > 0.99 and abs(n - round(n)) < 1e-6 for n in large)

    # What speaks against a comparison.

    def doubt(self, kind: str, factor: bool, gradients: bool = True) -> Doubt | None:
        """Why one process may not have had the ranks' samples. `factor`: they differ by W or so,
        and by nothing else. Then other numbers that a model is given had no part in it.
        `gradients`: whether to look at what they say about it, too.
        """
        one, ranks = self.last(self.one, kind), self.last(self.ranks, kind)
        if one.foreign:
            return Doubt(FOREIGN.format(one.foreign[0]))
        if unjoined := one.unjoined or ([] if factor else one.numbers):
            why = UNJOINED.format(unjoined[0])
            return Doubt(why, of_samples=True, of_numbers=not one.unjoined)
        if one.doubts:
            return Doubt(one.doubts[0])
        if apart(one.untrained, ranks.untrained, part=0.01):  # not by updates that round otherwise
            return Doubt(FROZEN, violated=True)
        if gradients and not factor and self.unsteady:
            return Doubt(self.unsteady)
        if found := self.parted((self.ranks, kind), (self.one, kind)):
            return found
        if one.delivered:
            return Doubt(SENT.format(one.delivered[0]))
        if kind == OWN and (text := self._other_counts()):
            why = f"{text} So it is not shown that both have the same samples."
            return Doubt(why, of_samples=True)
        if one.backwards != self.passes * ranks.backwards:
            return Doubt(
                f"One process made {one.backwards} backward passes, a rank {ranks.backwards}."
            )
        return Doubt(WORLD, excuses=True) if self.world_in_script else None

    def _other_counts(self) -> str:
        if self.passes > 1:
            return ""
        seen = [self.seen(part, OWN)[0] for part in (self.ranks, self.one)]
        return other_counts(seen[0], seen[1], self.world, not self.ranks_differ(OWN))

    def doubt_of_deal(self, kind: str) -> Doubt | None:
        """Why another step of the ranks may not have had the first one's samples in another deal,
        or, of copies, may not have had them at all.
        """
        step, first = self.last(self.ranks, kind), self.last(self.ranks, OWN)
        unlike = any(s.unlike for (_, _, step_kind), s in self.ranks.items() if step_kind == kind)
        if unlike or step.backwards != first.backwards:
            return Doubt(ELSEWHERE)
        if kind != DEAL:
            return None
        if self.unsteady:
            return Doubt(self.unsteady)
        every = [
            s.weights for (_, at, step_kind), s in self.ranks.items() if (at, step_kind) == (0, OWN)
        ]
        if any(apart(weights, self.first.weights) for weights in every):
            return Doubt(OTHERS)
        one = self.last(self.one, OWN) if (0, 0, OWN) in self.one else step
        if any(s.unjoined or s.numbers for s in (step, one)):  # perhaps it was not dealt
            return Doubt(ELSEWHERE)
        if one.doubts:
            return Doubt(one.doubts[0])
        if step.delivered:
            return Doubt(SENT.format(step.delivered[0]))
        if self.in_order:
            return Doubt(IN_ORDER)
        if not same_totals(*(self.seen(self.ranks, step_kind)[0] for step_kind in (DEAL, OWN))):
            return Doubt(ELSEWHERE)
        return self.parted((self.ranks, DEAL), (self.ranks, OWN)) or self.of_a_pass

    @cached_property
    def of_a_pass(self) -> Doubt | None:
        """Where outputs for the same samples depend on the pass that they are in."""
        dealt = [self.all_seen(self.ranks, kind) for kind in (DEAL, OWN)]
        where = other_outputs(*dealt) if self.micros > 1 else ""
        return Doubt(OF_A_PASS.format(where), excuses=True) if where else None

    def parted(self, first: tuple[Steps, str], second: tuple[Steps, str]) -> Doubt | None:
        """Where the samples of two steps are not the same. Ranks that all see the same are one."""
        ranks = [*self.seen(*first).values()]
        every, theirs = (self.all_seen(*step) for step in (first, second))
        differ = _ranks_differ(ranks)
        if first[1] == COPIES and differ:
            return differ
        if first[1] == DEAL and differ and not _ranks_differ([*self.seen(*second).values()]):
            return Doubt(ONE_BATCH)
        return parted(every if differ else ranks[0], theirs) and parted(every, theirs)

    def ranks_differ(self, kind: str) -> Doubt | None:
        """Where the samples of a rank and of rank 0 are not the same."""
        return _ranks_differ([*self.seen(self.ranks, kind).values()])

    def seen(self, part: Steps, kind: str) -> dict[int, list[Seen]]:
        """What each rank saw in a step, until each optimizer's turn."""
        found: dict[int, list[Seen]] = {}
        for (rank, _, step_kind), step in part.items():
            if step_kind == kind:
                found.setdefault(rank, []).extend(step.seen)
        return found

    def all_seen(self, part: Steps, kind: str) -> list[Seen]:
        """What all ranks saw in a step."""
        return [note for rank in self.seen(part, kind).values() for note in rank]

    def advised(self, doubt: Doubt) -> str:
        """The doubt, with advice where it can help: samples of no loader, without a mark."""
        steps = [*self.ranks.values(), *self.one.values()]
        can_mark = doubt.of_samples and not any(step.marked for step in steps)
        return f"{doubt.why} {MARK}" if can_mark else doubt.why


def _ranks_differ(ranks: list[list[Seen]]) -> Doubt | None:
    return next((found for rank in ranks[1:] if (found := parted(rank, ranks[0]))), None)


def shapes_differ(ours: Gradients, others: Gradients) -> bool:
    return any(ours[key].shape != others[key].shape for key in ours.keys() & others.keys())


def apart(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], part: float | None = None
) -> bool:
    """Whether weights differ by more than rounding. With `part`: by more than this part of them,
    and those of another shape do not count.
    """
    for key in ours.keys() & theirs.keys():
        mine, other = ours[key], theirs[key]
        if mine.shape != other.shape:
            if part is None:
                return True
            continue
        kind = mine.dtype
        rounding = ROUNDING * torch.finfo(kind).eps if kind.is_floating_point else 0.0
        distance, length = (mine.double() - other.double()).norm(), mine.double().norm()
        if bool(distance > (rounding if part is None else part) * length):
            return True
    return False
