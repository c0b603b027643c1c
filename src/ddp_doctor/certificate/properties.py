"""The table of a certificate: each property of a script, measured, or why it is not judged."""

import math
from dataclasses import replace
from fractions import Fraction
from functools import cached_property

from ddp_doctor.certificate.evidence import (
    OTHERS,
    WORLD,
    Evidence,
    shapes_differ,
    weights_differ,
)
from ddp_doctor.certificate.measure import Comparison, compare, factor_name, other_shapes
from ddp_doctor.certificate.plan import COPIES, DEAL, OWN, USUAL
from ddp_doctor.certificate.premises import Doubt
from ddp_doctor.certificate.record import Round, Step
from ddp_doctor.facts.certificate import TITLES, Property

FLAT = (
    "Each rank's optimizer has other parameters, or of other shapes, than that of one process: the "
    "ranks share them out, or the model is cut by hand or by FSDP1. Models that fully_shard or "
    "parallelize_module has cut can be certified."
)
RESHAPED = "Since the first step, the script has replaced parameters by ones of other shapes."
TOO_FEW = "An optimizer of the first step took too few steps."
FAILURE = (
    "One process with the samples of all ranks failed: {}. If it expects one rank's number of "
    "samples there, take it from the batch."
)
NO_EFFECT = (
    "Other samples give the same gradient, so it is not computed from what was taken for samples."
)
UNCOMBINED = "The ranks' gradients are not equal, so there is none to compare."
STARTS = (
    "The ranks start from different weights. If each holds a part of the model, this is right and "
    "cannot be judged; else broadcast the weights of rank 0."
)
NOT_FINITE = "gradient of {} holds NaN or infinity, so there is nothing to compare."
STEP = "optimizer step {} (counted from 0)"  # as the rules count
WEIGHTS_DIFFER = "the ranks' weights differ: rank {}'s are not rank 0's."
UNTRAINED = (
    "At {}, a parameter without requires_grad differs: rank {}'s {} is not "
    "rank 0's. What a forward changes has to be combined over the ranks."
)
CLIPPED = "Rank 0 clips a gradient of norm {:.4g}, rank {} one of {:.4g}: {}."
BEFORE = "it is clipped before the ranks' gradients are combined"
PARTS = "each clips parameters of its own by a norm of its own"
SUM = "With every sample twice, one process's gradient doubles, so the loss is a sum"


class Properties:
    """P1, P2, P3, `usual`, and the replicas of one script; each is None if it says nothing here.

    `failure_of_ranks`, `failure_of_one`: the last line of the error that ended a part, or empty.
    """

    def __init__(self, evidence: Evidence, failure_of_ranks: str, failure_of_one: str) -> None:
        self.evidence = evidence
        self.failure_of_ranks, self.failure_of_one = failure_of_ranks, failure_of_one
        self.depends_on_pass: Doubt | None = None  # why P2 is not judged

    def table(self) -> dict[str, Property]:
        """All that say something, by name."""
        p1, p3 = self._against_one("P1", OWN), self._against_one("P3", COPIES)
        rows = [p1, self._deal(), p3, self._usual(), self._replicas()]
        return {row.name: row for row in rows if row is not None}

    # P1, P2, P3, and P1 as the script is.

    def _against_one(self, name: str, kind: str) -> Property | None:
        """The ranks against one process."""
        evidence = self.evidence
        ranks, process = evidence.ranks[kind], evidence.process[kind]
        if evidence.world == 1:
            return None
        if problem := self._problem(ranks, process):
            return Property(name, "not judged", problem)
        if evidence.world_in_script and evidence.scaled_by_world(kind):
            return Property(name, "not judged", WORLD)
        comparison = evidence.comparison(ranks, process)
        named = self._factor(comparison) is not None
        doubt = evidence.doubt_of_deal(kind) if kind == COPIES else None
        row = self._row(name, comparison, doubt or evidence.doubt(kind, named))
        if evidence.loss_is_a == "sum" and row.verdict in ("equal", "scaled"):
            if self.mean_of_sum is None or name == "usual":
                why = self._factors_of_sum()
                return Property(name, "not judged", why, comparison.ratio, comparison.cosine)
            if name == "P1":
                return replace(row, verdict="equal", ratio=1.0, factor=None)
        return row

    def _deal(self) -> Property | None:
        """The ranks with their samples dealt again, against the ranks."""
        evidence = self.evidence
        dealt, step = evidence.ranks[DEAL], evidence.ranks[OWN]
        if evidence.world * evidence.micros == 1:
            return None
        if problem := self._problem(dealt, step):
            return Property("P2", "not judged", problem)
        comparison = evidence.comparison(dealt, step)
        doubt = evidence.doubt_of_deal(DEAL)
        if comparison.kind != "equal" and doubt is not None and doubt == evidence.doubt_of_passes:
            self.depends_on_pass = doubt
        return self._row("P2", comparison, doubt)

    def _usual(self) -> Property | None:
        """As P1, with the script's clipping and batch statistics."""
        evidence = self.evidence
        usual = evidence.ranks[USUAL]
        step = usual.main or evidence.first
        if not (step.clips or step.batch_norm) or evidence.world == 1:
            return None
        measured = usual.main and evidence.process[USUAL].main and not usual.is_elsewhere
        row = self._against_one("usual", USUAL) if measured else None
        norms = self._other_norms()
        if norms and (row is None or row.verdict != "different"):
            return Property("usual", "different", norms)
        return row

    def _other_norms(self) -> str:
        """If ranks clip gradients of different norms: which. Clipping need not act for that."""
        for step, reference in self.evidence.ranks.pairs(OWN):
            if step.optimizer or reference.has_shards:
                continue
            for norm, other in zip(reference.norms, step.norms, strict=False):
                if abs(norm - other) > 10 * self.evidence.tolerance * abs(norm):
                    why = PARTS if other_shapes(step.sums, reference.sums) else BEFORE
                    return CLIPPED.format(norm, step.rank, other, why)
        return ""

    def _problem(self, round_: Round, reference: Round) -> str:
        """Why a step of the ranks cannot be laid beside another one; or empty."""
        evidence = self.evidence
        if evidence.gradients_differ:
            return UNCOMBINED
        if round_.main is None or reference.main is None:
            failure = self.failure_of_ranks if round_.main is None else ""
            if failure:
                return f"The ranks failed before this step: {failure}."
            return FAILURE.format(self.failure_of_one) if self.failure_of_one else TOO_FEW
        if shapes_differ(round_, reference):
            return FLAT if shapes_differ(evidence.ranks[OWN], evidence.process[OWN]) else RESHAPED
        if evidence.lacks_optimizer(round_) or evidence.lacks_optimizer(reference):
            return TOO_FEW
        return NO_EFFECT if evidence.ignores_samples else ""

    def _factor(self, comparison: Comparison) -> str | None:
        """The name of the factor, if there is nothing but a factor between two gradients."""
        world, tolerance = self.evidence.world, self.evidence.base
        scaled = comparison.kind == "scaled"
        return factor_name(comparison.ratio, world, tolerance) if scaled else None

    def _row(self, name: str, comparison: Comparison, doubt: Doubt | None) -> Property:
        """A measured property. If its samples are others, or may be and it does not agree, it is
        not judged; if they may be and it agrees, that is its condition.
        """
        if names := [row.name for row in comparison.rows if not math.isfinite(row.gap)]:
            return Property(name, "not judged", f"Here, a {NOT_FINITE.format(names[0])}")
        if doubt is not None and (doubt.is_violated or comparison.kind != "equal"):
            return Property(name, "not judged", self.evidence.advice(doubt))
        factor = self._factor(comparison)
        numbers = (comparison.ratio, comparison.cosine, factor, comparison.worst)
        condition = ""
        if doubt is not None and not doubt.excuses:  # without advice
            condition = f"{doubt.why.partition('. ')[0].rstrip('.')}."
        return Property(name, comparison.kind, TITLES[name], *numbers, condition)

    # The ranks' gradients against rank 0's: "start" if those of the first step differ, or "later".

    def _replicas(self) -> Property | None:
        """Of a sharded model, its first step only, if what is not sharded starts alike."""
        replicas = self._not_rank_0()
        if replicas is None and not self.evidence.first.has_shards and self.evidence.world > 1:
            replicas = Property("later", "equal", TITLES["later"])
        if replicas is None or replicas.verdict in ("equal", "not judged"):
            replicas = self._untrained_weights() or replicas
        return replicas

    def _not_rank_0(self) -> Property | None:
        """The first step in which a rank has another gradient, weight, or rate than rank 0."""
        for step, reference in self.evidence.ranks.pairs():
            shapes = other_shapes(step.sums, reference.sums)
            same = not weights_differ(step.weights, reference.weights)
            if self.evidence.first.has_shards and (step.kind != OWN or shapes or not same):
                continue
            if shapes or (step.kind == OWN and not same):
                return Property("start", "not judged", OTHERS if shapes else STARTS)
            if row := self._difference(step, reference, same):
                return row
        return None

    def _difference(self, step: Step, reference: Step, same: bool) -> Property | None:
        at = f"At {STEP.format(step.turn)}"
        for each in (reference, step):
            if each.broken:
                why = f"{at}, rank {each.rank}'s {NOT_FINITE.format(each.broken)}"
                return Property("later", "not judged", why)
        if step.rates != reference.rates:
            # Which rank has which depends on the samples, and these were not dealt as in training.
            rates = f"{step.rates[0]:g} and {reference.rates[0]:g}"
            return Property(
                "later", "different", f"{at}, the ranks' learning rates differ: {rates}."
            )
        if not same:
            return Property("later", "different", f"{at}, {WEIGHTS_DIFFER.format(step.rank)}")
        sums = step.sums, reference.sums
        comparison = compare(*sums, self.evidence.names, self.evidence.tolerance)
        if comparison.kind == "equal":
            return None
        first = step.kind == OWN
        since = "T" if first else f"From {STEP.format(step.turn)} on, t"
        why = f"{since}he ranks apply different gradients: rank {step.rank}'s is not rank 0's."
        numbers = (comparison.ratio, comparison.cosine, None, comparison.worst)
        return Property("start" if first else "later", "different", why, *numbers)

    def _untrained_weights(self) -> Property | None:
        """Whether parameters that no optimizer has start alike on the ranks, and differ later."""
        rank_0 = self.evidence.first.untrained_weights
        start = {(s.rank, s.optimizer): s.untrained_weights for s in self.evidence.ranks[OWN].steps}
        for step, reference in self.evidence.ranks.pairs():
            weights = start.get((step.rank, step.optimizer), {})
            for name in step.untrained_weights:
                of_start = {name: weights[name]} if name in weights else {}
                if not of_start or weights_differ(of_start, rank_0):
                    continue
                moved = (
                    {name: now[name]} if name in now else {}
                    for now in (step.untrained_weights, step.moved_weights)
                )
                others = reference.untrained_weights, reference.moved_weights
                if any(map(weights_differ, moved, others)):
                    why = UNTRAINED.format(STEP.format(step.turn), step.rank, name)
                    return Property("later", "different", why)
        return None

    # A loss that is a sum: P1 cannot judge what divides it.

    @cached_property
    def mean_of_sum(self) -> str | None:
        """That the one constant that divides a sum makes it the mean over what all ranks have.

        None if it does not, or if the constant is a number of one rank and one of all ranks, too:
        then its meaning decides.
        """
        evidence, world = self.evidence, self.evidence.world
        if evidence.loss_is_a != "sum":
            return None
        constants, pairs = evidence.divisors()
        if evidence.passes > 1 or len(constants) != 1 or any(pair[2] != 1 for pair in pairs):
            return None
        ((line, constant),) = constants.items()
        counts = evidence.counts()
        all_names = [name for name, count in counts.items() if count == constant]
        rank_names = [name for name, count in counts.items() if count == constant * world]
        ratio = evidence.comparison(evidence.ranks[OWN], evidence.process[OWN]).ratio
        ratio *= world if rank_names else 1
        if bool(all_names) == bool(rank_names) or abs(ratio - 1) > 5e-3:
            return None
        name, owner = (*rank_names, *all_names)[0], "each rank" if rank_names else "all ranks"
        return (
            f"{SUM}. Divided by {constant:g} at {line}, which is the number of {name} on {owner}, "
            f"and combined over the ranks, it is the mean over all {counts[name]} of this step"
        )

    def _factors_of_sum(self) -> str:
        """What the factor depends on."""
        evidence = self.evidence
        ratio = evidence.comparison(evidence.ranks[OWN], evidence.process[OWN]).ratio
        factor, of_mean = _fraction(ratio), _fraction(ratio * evidence.world)
        constants, pairs = evidence.divisors()
        counts = {line: n for line, n in constants.items() if n > 1 and n == round(n)}
        if counts:
            places = " and ".join(f"{divisor:g} at {line}" for line, divisor in counts.items())
            step = " and step" if evidence.micros > 1 else ""
            what = "a constant" if len(counts) == 1 else "constants"
            it = "it" if len(counts) == 1 else "what divides each term"
            return (
                f"{SUM}, divided by {places}: {what}, whose meaning decides. The factor is "
                f"{of_mean} if {it} is the number of samples per rank{step}, {factor} if it is "
                "that of all ranks."
            )
        for line, divisor, total in pairs:
            if total != 1:
                return (
                    f"{SUM}, divided at {line} by {divisor:g} on a rank and by {total:g} in one "
                    f"process. The factor is {factor} if {total:g} is right for one process with "
                    "all samples."
                )
        return (
            f"{SUM}, and nothing divides it. The factor is {factor} if the sum over all ranks' "
            f"samples is meant, {of_mean} if the mean of the ranks' sums is."
        )


def _fraction(ratio: float) -> str:
    """A factor as a reader would write it."""
    near = Fraction(ratio).limit_denominator(256)
    return str(near) if near and abs(ratio / float(near) - 1) < 1e-3 else f"{ratio:.4g}"
