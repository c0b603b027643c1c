"""What the ranks and one process wrote, side by side, and what speaks against comparing it."""

import math
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ddp_doctor.certificate.measure import (
    HALF,
    TOLERANCE,
    Comparison,
    Gradients,
    compare,
    other_shapes,
)
from ddp_doctor.certificate.plan import AGAIN, COPIES, DEAL, OWN, TWICE, Part
from ddp_doctor.certificate.premises import (
    LOSS,
    MARK,
    MODEL,
    Doubt,
    doubt_between,
    line_of_other_outputs,
    other_counts,
    same_totals,
)
from ddp_doctor.certificate.record import Round, Run

ELSEWHERE = "It is not shown that this step had the samples of the first one."
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
OTHERS = "The ranks' optimizers have other parameters each: one process cannot stand for them."
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

    def __init__(self, ranks: Run, process: Run, all_passes: bool, world_in_script: bool) -> None:
        self.ranks, self.process = ranks, process
        self.world_in_script = world_in_script
        first = ranks[OWN].main
        assert first is not None
        self.first = first
        self.world, self.micros = first.world, max(1, first.backwards)
        self.passes = self.world if all_passes else 1  # of one process for each of a rank's
        self.names: dict[str, str] = {}
        for step in ranks.steps:
            self.names |= step.names if step.rank == 0 else {}
        uses_half = any(step.uses_half for run in (ranks, process) for step in run.steps)
        self.base = HALF if uses_half else TOLERANCE

    @property
    def noise(self) -> float | None:
        """What another order of one process's samples changes; None if it is more than that."""
        return self._effect_of_order[0]

    @property
    def order_matters(self) -> bool:
        """Whether another order of one process's samples changes more than rounding does."""
        return self._effect_of_order[1]

    @property
    def tolerance(self) -> float:
        """The relative error of gradients that are equal."""
        return max(self.base, 2 * (self.noise or 0.0))

    def comparison(self, round_: Round, reference: Round) -> Comparison:
        """Of the optimizers that have both steps."""
        sides = round_.gradients, reference.gradients
        optimizers = [{key.split(".")[0] for key in side} for side in sides]
        both = optimizers[0] & optimizers[1]
        left, right = ({k: g for k, g in side.items() if k.split(".")[0] in both} for side in sides)
        return compare(left, right, self.names, self.tolerance)

    def lacks_optimizer(self, round_: Round) -> bool:
        """Whether an optimizer of the first step has no step in this round."""
        return not self.ranks[OWN].optimizers <= round_.optimizers

    # What one process shows by itself.

    @cached_property
    def _effect_of_order(self) -> tuple[float | None, bool]:
        """What another order of one process's samples changes; whether that is more than rounding.

        None and False if the samples are not the same.
        """
        run, kind = (self.process, DEAL) if self.world > 1 else (self.ranks, COPIES)
        step, dealt = run[OWN].main, run[kind].main
        if step is None or dealt is None or step.backwards != dealt.backwards:
            return None, False
        if dealt.is_elsewhere or shapes_differ(run[OWN], run[kind]):
            return None, False
        noise = compare(step.gradients, dealt.gradients, self.names).error
        if noise <= self.base or not math.isfinite(noise):
            return noise if noise <= self.base else None, False
        return None, not doubt_between(step.premises, dealt.premises)

    @cached_property
    def instability(self) -> str:
        """That the same samples give another gradient in another step, in a sentence; or empty."""
        for run, name in ((self.ranks, "the ranks"), (self.process, "one process")):
            step, again = run[OWN], run[AGAIN]
            if not again.rank_0 or shapes_differ(step, again):
                continue
            doubt = doubt_between(step.premises, again.premises)
            if doubt is not None and doubt.about_samples:
                continue  # they are other samples
            error = self.comparison(again, step).error
            if error > self.base:
                return UNSTEADY.format(name, error)
        return ""

    @cached_property
    def gradients_differ(self) -> bool:
        """Whether a rank's gradient of the first step is another than rank 0's."""
        pairs = [(step.sums, reference.sums) for step, reference in self.ranks.pairs(OWN)]
        return any(not other_shapes(*pair) and self.sums_differ(*pair) for pair in pairs)

    def sums_differ(self, sums: Gradients, reference: Gradients) -> bool:
        """Whether the sums of two gradients differ, of the same shapes."""
        return compare(sums, reference, self.names, self.tolerance).kind != "equal"

    @cached_property
    def ignores_samples(self) -> bool:
        """Whether other samples give the ranks exactly the same gradient."""
        step, copies = self.ranks[OWN], self.ranks[COPIES]
        if self.gradients_differ or shapes_differ(step, copies):
            return False
        doubt = doubt_between(step.premises, copies.premises)
        if doubt is None or not doubt.about_samples:
            return False
        left, right = step.gradients, copies.gradients
        return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)

    # A loss that is a sum: what divides it.

    @cached_property
    def loss_is_a(self) -> Literal["sum", "mean"] | None:
        """What every sample twice says: an optimizer whose gradient doubles has a sum."""
        step, twice = self.process[OWN], self.process[TWICE]
        if self.lacks_optimizer(twice) or twice.last.is_elsewhere:
            return None
        if shapes_differ(step, twice) or self.instability:
            return None
        comparison = self.comparison(twice, step)
        parts = comparison.by_optimizer(self.tolerance)
        if any(part.kind == "scaled" and abs(part.ratio - 2) < 0.01 for part in parts):
            return "sum"
        return "mean" if comparison.kind == "equal" else None

    def divisors(self) -> tuple[dict[str, float], list[tuple[str, float, float]]]:
        """By what numbers losses and gradients are divided: by the same ones on a rank and in one
        process, by line; and by others: line, the rank's, one process's.
        """
        divisors = self.process[OWN].last.scales
        constants: dict[str, float] = {}
        pairs: list[tuple[str, float, float]] = []
        for place, divisor in self.ranks[OWN].last.scales.items():
            if place in divisors and divisors[place] != divisor:
                pairs.append((place[0], divisor, divisors[place]))
            elif place in divisors and divisor != 1:
                constants[place[0]] = constants.get(place[0], 1.0) * divisor
        return constants, pairs

    def counts(self) -> dict[str, int]:
        """How many samples all ranks may be said to have in the first step, by what is counted."""
        counts: Counter[str] = Counter()
        premises = self.ranks[OWN].premises
        for loss in (premise for premise in premises if premise["kind"] == LOSS):
            counts["rows of the losses"] += len(loss["out"])
            counts["targets"] += loss["targets"]
            counts["targets that are not ignored"] += int(loss["counts"].sum())
        inputs = [premise for premise in premises if premise["kind"] == MODEL]
        for rows in (premise for premise in inputs if premise["key"] == inputs[0]["key"]):
            counts["rows that the model gets"] += len(rows["rows"])
        return counts

    def scaled_by_world(self, kind: str) -> bool:
        """Whether one process scales a loss or a gradient by a multiple of the number of ranks.

        It may divide by the number of its backward passes.
        """
        step = self.process[kind].last
        factors = [n for n in step.scales.values() if n != step.backwards and math.isfinite(n)]
        multiples = [max(abs(n), 1 / abs(n)) / self.world for n in factors]
        return any(n > 0.99 and abs(n - round(n)) < 1e-6 for n in multiples)

    # What speaks against a comparison.

    def doubt(self, kind: str, factor: bool, gradients: bool = True) -> Doubt | None:
        """Why one process may not have had the ranks' samples. `factor`: they differ by W or so,
        and by nothing else. Then other numbers that a model is given had no part in it.
        `gradients`: whether to look at what they say about it, too.
        """
        process, ranks = self.process[kind].last, self.ranks[kind].last
        if process.foreign_classes:
            return Doubt(FOREIGN.format(process.foreign_classes[0]))
        if places := process.join_failures or ([] if factor else process.numbers):
            why = UNJOINED.format(places[0])
            return Doubt(why, about_samples=True, about_numbers=not process.join_failures)
        if process.doubts:
            return Doubt(process.doubts[0])
        untrained = process.untrained_weights, ranks.untrained_weights
        if weights_differ(*untrained, share=0.01):  # not by updates that round otherwise
            return Doubt(FROZEN, is_violated=True)
        if gradients and not factor and self.instability:
            return Doubt(self.instability)
        if doubt := self.doubt_of_samples(self.ranks[kind], self.process[kind]):
            return doubt
        if process.deliveries:
            return Doubt(SENT.format(process.deliveries[0]))
        if kind == OWN and (text := self._other_counts()):
            why = f"{text} So it is not shown that both have the same samples."
            return Doubt(why, about_samples=True)
        if process.backwards != self.passes * ranks.backwards:
            return Doubt(
                f"One process made {process.backwards} backward passes, a rank {ranks.backwards}."
            )
        return Doubt(WORLD, excuses=True) if self.world_in_script else None

    def _other_counts(self) -> str:
        if self.passes > 1:
            return ""
        rank, process = (run[OWN].premises_by_rank[0] for run in (self.ranks, self.process))
        return other_counts(rank, process, self.world, not ranks_differ(self.ranks[OWN]))

    def doubt_of_deal(self, kind: str) -> Doubt | None:
        """Why another step of the ranks may not have had the first one's samples in another deal,
        or, of copies, may not have had them at all.
        """
        dealt, first = self.ranks[kind], self.ranks[OWN]
        if dealt.is_elsewhere or dealt.last.backwards != first.last.backwards:
            return Doubt(ELSEWHERE)
        if kind != DEAL:
            return None
        if self.instability:
            return Doubt(self.instability)
        starts = [step.weights for step in first.steps if step.optimizer == 0]
        if any(weights_differ(weights, self.first.weights) for weights in starts):
            return Doubt(OTHERS)
        process = self.process[OWN].last if self.process[OWN].main else dealt.last
        if any(step.join_failures or step.numbers for step in (dealt.last, process)):
            return Doubt(ELSEWHERE)  # perhaps it was not dealt
        if process.doubts:
            return Doubt(process.doubts[0])
        if dealt.last.deliveries:
            return Doubt(SENT.format(dealt.last.deliveries[0]))
        if self.order_matters:
            return Doubt(IN_ORDER)
        if not same_totals(dealt.premises_by_rank[0], first.premises_by_rank[0]):
            return Doubt(ELSEWHERE)
        return self.doubt_of_samples(dealt, first) or self.doubt_of_passes

    @cached_property
    def doubt_of_passes(self) -> Doubt | None:
        """Where outputs for the same samples depend on the pass that they are in."""
        if self.micros == 1:
            return None
        line = line_of_other_outputs(self.ranks[DEAL].premises, self.ranks[OWN].premises)
        return Doubt(OF_A_PASS.format(line), excuses=True) if line else None

    def doubt_of_samples(self, left: Round, right: Round) -> Doubt | None:
        """Where the samples of two rounds are not the same. Ranks that all see the same are one."""
        doubt = ranks_differ(left)
        if left.kind == COPIES and doubt:
            return doubt
        if left.kind == DEAL and doubt and not ranks_differ(right):
            return Doubt(ONE_BATCH)
        rank = left.premises if doubt else left.premises_by_rank[0]
        return doubt_between(rank, right.premises) and doubt_between(left.premises, right.premises)

    def advice(self, doubt: Doubt) -> str:
        """The doubt, with advice where it can help: samples of no loader, without a mark."""
        steps = [*self.ranks.steps, *self.process.steps]
        can_mark = doubt.about_samples and not any(step.has_marks for step in steps)
        return f"{doubt.why} {MARK}" if can_mark else doubt.why


def makes_all_passes(process: Part) -> bool:
    """Whether one process made as many backward passes as all ranks together, as a script does that
    divides their number by the number of ranks.
    """
    of_ranks, of_one = Run(_ranks_of(process))[OWN].main, Run(process)[OWN].main
    if of_ranks is None or of_one is None:
        return False
    return of_one.backwards == of_ranks.world * of_ranks.backwards > 0


def lacks_samples(process: Part, failure: str) -> bool:
    """Whether one process lacks samples of the ranks, or has them with other targets or inputs, or
    as weights.
    """
    if not any(process.path("").glob("step.0.*.pt")):
        return bool(failure)
    run, ranks = Run(process), Run(_ranks_of(process))
    if ranks[OWN].main is None or run[OWN].main is None:
        return False
    evidence = Evidence(ranks, run, process.all_passes, False)
    if shapes_differ(ranks[OWN], run[OWN]):
        return True
    doubts = [evidence.doubt(OWN, False, gradients=False)]
    if process.all_passes:  # a batch that is made before the loop belongs to no pass
        doubts.append(evidence.doubt_of_samples(ranks[OWN], run[OWN]))
    return any(doubt and doubt.about_samples and not doubt.about_numbers for doubt in doubts)


def _ranks_of(process: Part) -> Part:
    return Part(process.folder, "ranks", turns=process.turns)


def ranks_differ(round_: Round) -> Doubt | None:
    """Where the samples of a rank and of rank 0 are not the same."""
    ranks = round_.premises_by_rank
    return next((doubt for rank in ranks[1:] if (doubt := doubt_between(rank, ranks[0]))), None)


def shapes_differ(left: Round, right: Round) -> bool:
    return other_shapes(left.gradients, right.gradients)


def weights_differ(
    left: Mapping[str, Tensor], right: Mapping[str, Tensor], share: float | None = None
) -> bool:
    """Whether weights differ by more than rounding. With `share`: by more than this part of them,
    and those of another shape do not count.
    """
    for key in left.keys() & right.keys():
        weight, other = left[key], right[key]
        if weight.shape != other.shape:
            if share is None:
                return True
            continue
        dtype = weight.dtype
        rounding = ROUNDING * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        distance, length = (weight.double() - other.double()).norm(), weight.double().norm()
        if bool(distance > (rounding if share is None else share) * length):
            return True
    return False
