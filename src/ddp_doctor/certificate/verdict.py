"""What the measured gradients say: a table of properties, and the first verdict that fits."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from ddp_doctor.certificate import files
from ddp_doctor.certificate.evidence import (
    ELSEWHERE,
    OTHERS,
    WORLD,
    Evidence,
    apart,
    shapes_differ,
)
from ddp_doctor.certificate.fixed import OFF
from ddp_doctor.certificate.measure import Comparison, called, compare, shares
from ddp_doctor.certificate.plan import (
    COMBINES,
    COPIES,
    DEAL,
    LATER,
    OWN,
    TWICE,
    USUAL,
    WORLD_IN_SCRIPT,
    Part,
)
from ddp_doctor.certificate.plan import WORLD as WORLD_FILE
from ddp_doctor.certificate.premises import MARK, Doubt, other_numbers
from ddp_doctor.certificate.record import Step, Steps, read
from ddp_doctor.certificate.samples import Recorded, same
from ddp_doctor.facts.certificate import TITLES, Certificate, Property

FLAT = (
    "Each rank holds parameters of other shapes than one process: the model is cut by hand or by "
    "FSDP1. Models that fully_shard or parallelize_module has cut can be certified."
)
RESHAPED = "Since the first step, the script has replaced parameters by ones of other shapes."
COMBINED_LATER = (
    "The optimizer gets another gradient on each rank, but the ranks' weights stay equal. They are "
    "combined in its step or after it, which is not measured."
)
SEVERAL = "One process has no mesh and no group of several ranks, so only P2 can judge this script."
NO_REFERENCE = (
    "In one process, the same samples in another order give another gradient. So one process may "
    "have the same defect as the ranks, or depend on which samples are side by side, or on the "
    "number of the step, and it is no reference."
)
TOO_FEW = "The optimizer of the first step took too few steps."
NO_SECOND = (
    "The optimizer of the first step takes no second one. Others step later, and there the ranks "
    "are compared with one another only."
)
PARTLY = "Not every optimizer of the first step takes a step of this kind."
DEAF = (
    "Other samples give the same gradient, so it is not computed from what was taken for samples."
)
UNCOMBINED = "The ranks' gradients are not equal, so there is none to compare."
ALONE = "One process and one micro-batch: nothing is combined. Start it with --ranks 2."
STARTS = (
    "The ranks start from different weights. If each holds a part of the model, this is right and "
    "cannot be judged; else broadcast the weights of rank 0."
)
NO_GRADIENT = (
    "The optimizers' parameters get no gradient in the first step: an optimizer may have been made "
    "before the model that is trained, fully_shard has not synchronized the gradients, or the "
    "script keeps its gradients elsewhere than in .grad, where they cannot be judged."
)
ZERO = (
    "The gradient of the first step is zero, so there is nothing to compare. Begin with samples "
    "that count in the loss."
)
BROKEN = "gradient of {} holds NaN or infinity, so there is nothing to compare."
COUPLED = (
    "Copies of one batch are right, but the gradient depends on which samples share a batch, for "
    "example by counts, by a loss over pairs of samples, or by a gather without a gradient."
)
IF_AVERAGED = (
    " Right only if the parameters are averaged from time to time (local SGD). In the {} steps "
    "that were watched, they were not."
)
A_MEAN = (
    "the loss is a mean and no sum that a constant divides, which is not known: one process took "
    "no step with every sample twice"
)
EACH_PASS = "each pass weighs its samples as is meant, which is not shown: {}"
K_NOT_MEASURED = (
    "If the backward passes of a step are micro-batches: whether the loss has to be divided by "
    "their number is not measured, because one process has as many."
)
NEVER_CLEARED = (
    "The script never called zero_grad(). Whether a step adds to the gradients of earlier ones is "
    "not measured."
)
STEP = "optimizer step {} (counted from 0)"  # as the rules count
WEIGHTS_DIFFER = "the ranks' weights differ: rank {}'s are not rank 0's."
UNTRAINED = (
    "Before {}, a parameter without requires_grad differs: rank {}'s {} is not "
    "rank 0's. What a forward changes has to be combined over the ranks."
)
FILLED = "Weights that start at zero have small values here: else nothing behind them is compared."
SAME_SAMPLES = (
    "All ranks have the same samples in the first step. That is right only if they split layers; "
    "else give each rank samples of its own, for example with a DistributedSampler."
)
SAME_MICRO_BATCHES = (
    "One process with all samples computes the same gradient, but in as many backward passes, so "
    "it does not show that the samples of each weigh the same."
)
Decision = tuple[Property, str]


def not_judged(name: str, why: str) -> Decision:
    return Property(name, "not judged", why), why


def judge(ranks: Part, one: Part, failed_ranks: str, failed_one: str) -> Certificate:
    """The certificate of two parts.

    `failed_ranks`, `failed_one`: the last line of the error that ended a part, or empty.
    """
    steps = read(ranks)
    first = [step for (rank, _, kind), step in steps.items() if rank == 0 and kind == OWN]
    world = first[0].world if first else 0
    if not first or (failed_ranks and not ranks.path(WORLD_FILE).exists()):
        error = failed_ranks or "it took no optimizer step"
        why = f"The script did not finish an optimizer step: {error}."
        return Certificate("not judged", why, world=world, error=failed_ranks)
    records = list(ranks.path("").glob(files.samples_of("*")))
    if len(records) < world and failed_ranks:
        why = f"Not every rank took an optimizer step: {failed_ranks}."
        return Certificate("not judged", why, world=world, error=failed_ranks)
    sums = [each for step in first for each in step.sums.values()]
    if not any(bool(each.any()) for each in sums):
        micros = max(1, first[0].backwards)
        why = ZERO if sums else NO_GRADIENT
        return Certificate("not judged", why, world=world, micro_batches=micros)
    of_one = read(one)
    for part, who in ((steps, "rank {0}"), (of_one, "one process")):
        if broken := [step for step in part.values() if step.kind == OWN and step.broken]:
            why = f"{who.format(broken[0].rank)}'s {BROKEN.format(broken[0].broken)}"
            return Certificate("not judged", f"In the first step, {why}", world=world)
    evidence = Evidence(steps, of_one, one.spread, one.path(WORLD_IN_SCRIPT).exists())
    judgment = Judgment(evidence, failed_ranks, failed_one, ranks.path(COMBINES).exists())
    # Ranks that make the same samples may each take a part of them.
    of = [Recorded(**files.read(path)) for path in records]
    alike = len(of) > 1 and bool(of[0].samples) and all(same(of[0], other) for other in of)
    if alike and not evidence.ranks_differ(OWN):
        judgment.certificate.notes.append(SAME_SAMPLES)
    return judgment.certificate


def makes_all_passes(one: Part) -> bool:
    """Whether one process made as many backward passes as all ranks together, as a script does that
    divides their number by the number of ranks.
    """
    sides = [read(part).get((0, 0, OWN)) for part in (_ranks_of(one), one)]
    if sides[0] is None or sides[1] is None:
        return False
    return sides[1].backwards == sides[0].world * sides[0].backwards > 0


def has_nothing_of(one: Part, failed: str) -> bool:
    """Whether one process lacks samples of the ranks, or has them with other targets or inputs, or
    as weights.
    """
    if not any(one.path("").glob("step.0.*.pt")):
        return bool(failed)
    steps, first = read(one), read(_ranks_of(one))
    if (0, 0, OWN) not in first or (0, 0, OWN) not in steps:
        return False
    evidence = Evidence(first, steps, one.spread, False)
    if evidence.other_shapes((first, OWN), (steps, OWN)):
        return True
    doubts = [evidence.doubt(OWN, False, gradients=False)]
    if one.spread:  # a batch that is made before the loop belongs to no pass
        doubts.append(evidence.parted((first, OWN), (steps, OWN)))
    return any(doubt and doubt.of_samples and not doubt.of_numbers for doubt in doubts)


def _ranks_of(one: Part) -> Part:
    return Part(one.folder, "ranks", turns=one.turns)


class Judgment:
    """The properties, and the first of `VERDICTS` that says something about them."""

    def __init__(
        self, evidence: Evidence, failed_ranks: str, failed_one: str, combines: bool
    ) -> None:
        self.evidence = evidence
        self.failed_ranks, self.failed_one = failed_ranks, failed_one
        self.combines = combines  # whether an optimizer's step calls a collective
        self.later = self._of_other_parameters()
        self.deaf = evidence.is_deaf()
        self.loss_is_a = evidence.loss_is_a()
        self.mean = self._of_all_ranks() if self.loss_is_a == "sum" else None
        self.of_a_pass: Doubt | None = None  # why P2 is not judged, if the passes are not alike
        self.shares: tuple[float, float] | None = None
        replicas = self._replicas()
        if replicas is None or not replicas.judged or replicas.verdict == "equal":
            replicas = self._untrained() or replicas
        p1, p3 = self._against_one("P1", OWN), self._against_one("P3", COPIES)
        rows = [p1, self._deal(), p3, self._usual(), replicas]
        self.table = {row.name: row for row in rows if row is not None}
        decided = (verdict(self) for verdict in VERDICTS)
        chosen, why = next(decision for decision in decided if decision is not None)
        first = chosen.judged and (chosen.name == "P1" or evidence.world == 1)
        self.certificate = Certificate(
            chosen.verdict,
            why,
            chosen.ratio if first else None,
            chosen.cosine if first else None,
            chosen.factor if first else None,
            chosen.worst if chosen.judged else None,
            evidence.noise,
            evidence.world,
            evidence.micros,
            [row for name, row in self.table.items() if name in TITLES],
            self._notes(),
            failed_ranks,
            chosen.condition,
            self.loss_is_a,
            self.shares,
        )

    def _of_other_parameters(self) -> Step | None:
        """The first step in which parameters have a gradient that have none in the plan's steps."""
        compared: set[str] = set()
        steps = self.evidence.ranks.values()
        for step in steps:
            compared |= set() if step.kind.startswith(LATER) else step.sums.keys()
        others = (
            step
            for step in steps
            if step.rank == 0 and step.kind.startswith(LATER) and step.sums.keys() - compared
        )
        return next(others, None)

    # The properties. None: it has nothing to say about this script.

    def _against_one(self, name: str, kind: str) -> Property | None:
        evidence = self.evidence
        if evidence.world == 1:
            return None
        if problem := self._not_comparable(kind, (evidence.one, kind)):
            return Property(name, "not judged", problem)
        if evidence.world_in_script and evidence.scaled_by_world(kind):
            return Property(name, "not judged", WORLD)
        found = evidence.compared((evidence.ranks, kind), (evidence.one, kind))
        factor = found.kind == "scaled" and called(found.ratio, evidence.world)
        doubt = evidence.doubt_of_deal(kind) if kind == COPIES else None
        row = self._row(name, found, doubt or evidence.doubt(kind, bool(factor)))
        if self.loss_is_a == "sum" and row.verdict in ("equal", "scaled"):
            if self.mean is None or name == "usual":
                return Property(name, "not judged", self._of_a_sum(), found.ratio, found.cosine)
            if name == "P1":
                return replace(row, verdict="equal", ratio=1.0, factor=None)
        return row

    def _not_comparable(self, kind: str, other: tuple[Steps, str]) -> str:
        """Why a step of the ranks cannot be laid beside another one; or empty."""
        evidence = self.evidence
        ranks = evidence.ranks
        if evidence.uncombined:
            return UNCOMBINED
        if (0, 0, kind) not in ranks or (0, 0, other[1]) not in other[0]:
            return self._missing(kind)
        if evidence.other_shapes((ranks, OWN), (other[0], OWN)):
            return FLAT
        if evidence.other_shapes((ranks, kind), other):
            return RESHAPED
        if evidence.left_out(kind, ranks) or evidence.left_out(other[1], other[0]):
            return PARTLY
        return DEAF if self.deaf else ""

    def _missing(self, kind: str) -> str:
        """Why a step is not there."""
        if self.failed_ranks and (0, 0, kind) not in self.evidence.ranks:
            return f"The ranks failed before this step: {self.failed_ranks}."
        if not self.failed_one:
            return TOO_FEW
        text = f"One process with the samples of all ranks failed: {self.failed_one}."
        if re.search(r"world.?size|process group|\bmesh\b", self.failed_one, re.I):
            return f"{text} {SEVERAL}"
        text += " If it expects one rank's number of samples there, take it from the batch."
        marked = any(step.marked for step in self.evidence.ranks.values())
        return text if marked else f"{text} Else: {MARK}"

    def _deal(self) -> Property | None:
        evidence = self.evidence
        ranks = evidence.ranks
        if evidence.world * evidence.micros == 1:
            return None
        if problem := self._not_comparable(DEAL, (ranks, OWN)):
            return Property("P2", "not judged", problem)
        found = evidence.compared((ranks, DEAL), (ranks, OWN))
        doubt = evidence.doubt_of_deal(DEAL)
        if found.kind != "equal" and doubt is not None and doubt == evidence.of_a_pass:
            self.of_a_pass = doubt
        return self._row("P2", found, doubt)

    def _usual(self) -> Property | None:
        evidence = self.evidence
        step = evidence.ranks.get((0, 0, USUAL), evidence.first)
        if not (step.clips or step.batch_norm) or evidence.world == 1:
            return None
        both = (0, 0, USUAL) in evidence.ranks and (0, 0, USUAL) in evidence.one
        unlike = any(s.unlike for s in evidence.ranks.values() if s.kind == USUAL)
        found = self._against_one("usual", USUAL) if both and not unlike else None
        norms = self._clipped_norms()
        if norms and (found is None or found.verdict != "different"):
            return Property("usual", "different", norms)
        return found

    def _clipped_norms(self) -> str:
        """If ranks clip gradients of different norms: which. Clipping need not act for that."""
        first = self.evidence.first
        for (rank, optimizer, kind), step in self.evidence.ranks.items():
            if (optimizer, kind) != (0, OWN) or first.sharded:
                continue
            for ours, theirs in zip(first.norms, step.norms, strict=False):
                if abs(ours - theirs) > 10 * self.evidence.tolerance * abs(ours):
                    return (
                        f"Rank 0 clips a gradient of norm {ours:.4g}, rank {rank} one of "
                        f"{theirs:.4g}: it is clipped before the ranks' gradients are combined."
                    )
        return ""

    def _replicas(self) -> Property | None:
        """The ranks' gradients against rank 0's: of the first step if it differs, of later ones.

        Of a sharded model, its first step, if what is not sharded starts alike.
        """
        sharded = self.evidence.first.sharded
        for step in self.evidence.ranks.values():
            ours = self.evidence.of_first(step)
            if step.rank == 0 or ours is None:
                continue
            shapes = shapes_differ(step.sums, ours.sums)
            alike = not apart(step.weights, ours.weights)
            if sharded and (step.kind != OWN or shapes or not alike):
                continue
            if found := self._not_rank_0(step, ours, shapes, alike):
                return found
        if sharded or self.evidence.world == 1:
            return None
        return Property("later", "equal", TITLES["later"])

    def _not_rank_0(self, step: Step, ours: Step, shapes: bool, alike: bool) -> Property | None:
        first = step.kind == OWN
        if shapes:
            return Property("start", "not judged", OTHERS)
        if first and not alike:
            return Property("start", "not judged", STARTS)
        at = STEP.format(step.turn)
        for each in (ours, step):
            if each.broken:
                why = f"At {at}, rank {each.rank}'s {BROKEN.format(each.broken)}"
                return Property("later", "not judged", why)
        if step.rates != ours.rates:
            # Which rank has which depends on the samples, and these were not dealt as in training.
            rates = f"{step.rates[0]:g} and {ours.rates[0]:g}"
            why = f"At {at}, the ranks' learning rates differ: {rates}."
            return Property("later", "different", why)
        if not alike:
            why = f"At {at}, {WEIGHTS_DIFFER.format(step.rank)}"
            return Property("later", "different", why)
        found = compare(step.sums, ours.sums, self.evidence.names, self.evidence.tolerance)
        if found.kind == "equal":
            return None
        since = "T" if first else f"From {at} on, t"
        why = f"{since}he ranks apply different gradients: rank {step.rank}'s is not rank 0's."
        name = "start" if first else "later"
        return Property(name, "different", why, found.ratio, found.cosine, None, found.worst)

    def _untrained(self) -> Property | None:
        """Whether parameters that no optimizer has start alike on the ranks, and differ later."""
        ranks, ours = self.evidence.ranks, self.evidence.first
        for (rank, optimizer, kind), step in ranks.items():
            start, first = ranks.get((rank, optimizer, OWN)), ranks.get((0, optimizer, kind))
            if start is None or first is None:
                continue
            for name, value in step.untrained.items():
                others = start.untrained
                alike = name in others and not apart({name: others[name]}, ours.untrained)
                if alike and apart({name: value}, first.untrained):
                    why = UNTRAINED.format(STEP.format(step.turn), rank, name)
                    return Property("later", "different", why)
        return None

    def _row(self, name: str, found: Comparison, doubt: Doubt | None) -> Property:
        """A measured property. If its samples are others, or may be and it does not agree, it is
        not judged; if they may be and it agrees, that is its condition.
        """
        if broken := [row.name for row in found.rows if not math.isfinite(row.gap)]:
            return Property(name, "not judged", f"Here, a {BROKEN.format(broken[0])}")
        if doubt is not None and (doubt.violated or found.kind != "equal"):
            return Property(name, "not judged", self.evidence.advised(doubt))
        factor = called(found.ratio, self.evidence.world) if found.kind == "scaled" else None
        numbers = (found.ratio, found.cosine, factor, found.worst)
        condition = ""
        if doubt is not None and not doubt.excuses:  # without advice
            condition = f"{doubt.why.partition('. ')[0].rstrip('.')}."
        return Property(name, found.kind, TITLES[name], *numbers, condition)

    def _of_a_sum(self) -> str:
        """What the factor depends on if one process's gradient doubles with its samples."""
        evidence = self.evidence
        found = evidence.compared((evidence.ranks, OWN), (evidence.one, OWN))
        ratio, world = found.ratio, evidence.world
        same, others = evidence.divisors()
        divisors = [*same.values()]
        step = " and step" if evidence.micros > 1 else ""
        text = "With every sample twice, one process's gradient doubles, so the loss is a sum"
        if same:
            places = " and ".join(f"{divisor:g} at {line}" for line, divisor in same.items())
            text = f"{text}, divided by {places}: a constant, whose meaning decides. The factor is "
            text += f"{_fraction(ratio * world)} if it is the number of samples per rank{step}, "
            text += f"{_fraction(ratio)} if it is that of all ranks"
        elif listed := [other for other in others if other[2] != 1]:
            line, of_rank, of_one = listed[0]
            divisors = [each[2] for each in listed]
            text += f", divided at {line} by {of_rank:g} on a rank and by {of_one:g} in one process"
            text += f". The factor is {_fraction(ratio)} if {of_one:g} is right for one process "
            text += "with all samples"
        else:
            text += ", and nothing divides it. The factor is "
            text += f"{_fraction(ratio)} if the sum over all ranks' samples is meant, "
            text += f"{_fraction(ratio * world)} if the mean of the ranks' sums is"
        return f"{text}.{self._rows(ratio / math.prod(divisors) if len(divisors) < 2 else None)}"

    def _of_all_ranks(self) -> str | None:
        """That the one constant that divides a sum makes it the mean over what all ranks have.

        None if it does not, or if the constant is a number of one rank and one of all ranks, too:
        then its meaning decides.
        """
        evidence, world = self.evidence, self.evidence.world
        same, others = evidence.divisors()
        if evidence.passes > 1 or len(same) != 1 or any(of_one != 1 for *_, of_one in others):
            return None
        ((line, constant),) = same.items()
        counts = evidence.counts()
        of_all = [name for name, count in counts.items() if count == constant]
        of_rank = [name for name, count in counts.items() if count == constant * world]
        ratio = evidence.compared((evidence.ranks, OWN), (evidence.one, OWN)).ratio
        ratio *= world if of_rank else 1
        if bool(of_all) == bool(of_rank) or abs(ratio - 1) > 5e-3:
            return None
        name, who = (*of_rank, *of_all)[0], "each rank" if of_rank else "all ranks"
        return (
            "With every sample twice, one process's gradient doubles, so the loss is a sum. "
            f"Divided by {constant:g} at {line}, which is the number of {name} on {who}, and "
            f"combined over the ranks, it is the mean over all {counts[name]} of this step"
        )

    def _rows(self, ratio: float | None) -> str:
        """How many rows the losses have, or else the model gets; empty if neither is seen.

        `ratio`: of the ranks' gradient to that of one process's undivided sum, if it is known.
        """
        every, own = self.evidence.counts(), self.evidence.counts(0)
        name = next(iter(every), "")
        if own.keys() != every.keys() or not name:
            return ""
        text = f" In this step, rank 0 has {own[name]} {name}, all ranks have {every[name]}"
        if ratio is not None:
            text += f": if their mean is meant, the factor is {_fraction(ratio * every[name])}"
        return f"{text}."

    # The verdicts, in the order of `VERDICTS`. None: another one decides.

    def not_combined_at_start(self) -> Decision | None:
        """Ranks that start apart, or get other gradients in the first step."""
        start = self.table.get("start")
        if start is None:
            return None
        if start.judged and self._stays_equal():
            for name in self.table.keys() & {"P1", "P2", "P3"}:
                self.table[name] = Property(name, "not judged", "The gradient is combined later.")
            return not_judged("start", COMBINED_LATER)
        if start.judged and self.failed_ranks:
            why = f"{start.why} Whether they are combined later is not known: {self.failed_ranks}."
            return not_judged("start", why)
        watched = max(step.turn for step in self.evidence.ranks.values()) + 1
        averaged = self._averaged() or IF_AVERAGED.format(watched)
        return start, start.why + (averaged if start.judged else "")

    def without_ranks(self) -> Decision | None:
        """One process: only P2 can say something."""
        if "P1" in self.table:
            return None
        p2 = self.table.get("P2")
        if p2 is None:
            return not_judged("P1", ALONE)
        if not p2.judged:
            return p2, p2.why
        depends = "does not depend" if p2.verdict == "equal" else "depends"
        return p2, f"The gradient {depends} on which micro-batch gets which sample."

    def without_p1(self) -> Decision | None:
        """Another property that is not equal decides, or none."""
        p1 = self.table["P1"]
        if p1.judged:
            return None
        for row in map(self.table.get, ("P3", "P2", "later")):
            if row is not None and row.verdict in ("scaled", "different"):
                return row, f"{_sentence(row)} {p1.why}"
        return p1, p1.why

    def scaled(self) -> Decision | None:
        p1 = self.table["P1"]
        if p1.verdict != "scaled":
            return None
        text = f"The gradient is {_times(p1)} times that of one process with the same samples"
        return p1, f"{text}{_if(self._unknown_mean())}."

    def different(self) -> Decision | None:
        p1, p3, evidence = self.table["P1"], self.table.get("P3"), self.evidence
        if p1.verdict != "different":
            return None
        if p3 is not None and p3.verdict == "scaled":
            return p1, (
                "One process with the same samples computes another gradient. Copies of one batch "
                f"give {_times(p3)} times the gradient of that batch: a factor, or a loss that "
                "grows with the number of samples."
            )
        if p3 is None or p3.verdict != "equal":
            return p1, "One process with the same samples computes another gradient."
        if evidence.world == 2:
            sides = ((evidence.one, OWN), (evidence.ranks, OWN), (evidence.one, COPIES))
            self.shares = shares(*(evidence.gradients(*side) for side in sides))
        if self.shares is None:
            return p1, COUPLED
        return p1, (
            f"One process weighs the samples of rank 0 and rank 1 {self.shares[0]:.3f} : "
            f"{self.shares[1]:.3f}, the ranks weigh them 0.5 : 0.5. This fits ranks that divide by "
            "their own counts."
        )

    def depends_on_deal(self) -> Decision | None:
        p2 = self.table.get("P2")
        if p2 is None or p2.verdict not in ("scaled", "different"):
            return None
        return p2, "The gradient depends on which rank or micro-batch gets which sample."

    def diverges_later(self) -> Decision | None:
        later = self.table.get("later")
        if later is None or later.verdict == "equal":
            return None
        first = "The first step's gradient is that of one process."
        return later, f"{first} {later.why}{self._averaged()}"

    def without_reference(self) -> Decision | None:
        """One process does not agree with itself, or shows less than all."""
        p2, evidence = self.table.get("P2"), self.evidence
        if evidence.in_order and not (p2 is not None and p2.verdict == "equal"):
            return not_judged("P1", NO_REFERENCE)
        dealt = p2 is not None and not p2.judged and (0, 0, DEAL) in evidence.ranks
        passes = evidence.micros > 1 and self.of_a_pass is None
        if passes and p2 is not None and dealt and p2.why != ELSEWHERE:
            return not_judged("P1", f"{SAME_MICRO_BATCHES} {p2.why}")
        if self.later and (0, 0, COPIES) not in evidence.ranks:
            return not_judged("P1", NO_SECOND)
        return None

    def differs_as_it_is(self) -> Decision | None:
        """With the script's own clipping and batch statistics."""
        p1, usual = self.table["P1"], self.table.get("usual")
        if usual is None or usual.verdict not in ("scaled", "different"):
            return None
        if usual.ratio is None:
            return usual, usual.why
        measured = f"(ratio {usual.ratio:.4f}, cosine {usual.cosine:.4f})"
        if self.evidence.first.batch_norm:
            return p1, (
                "One process with all samples computes the same gradient, but for BatchNorm's "
                f"statistics, which each rank takes of its own samples {measured}: by design."
            )
        return usual, f"The gradients agree until they are clipped, and then differ {measured}."

    def equal(self) -> Decision:
        p1, evidence = self.table["P1"], self.evidence
        many = f", in {evidence.micros} backward passes too," if evidence.micros > 1 else ""
        if evidence.passes > 1:
            many = f", in all their {evidence.passes * evidence.micros} backward passes,"
        text = f"One process with all samples of the first step{many} computes the same gradient"
        conditions = self._unknown_mean()
        if self.mean is not None:
            text = self.mean
            conditions.append("that mean is meant")
        if p1.condition:
            conditions.append(f"it had the same samples, which is not shown: {p1.condition}")
        if self.of_a_pass:
            conditions.append(EACH_PASS.format(self.of_a_pass.why))
        return replace(p1, condition=" ".join(conditions)), f"{text}{_if(conditions)}."

    def _unknown_mean(self) -> list[str]:
        """The condition that the loss is a mean, unless that was measured."""
        return [] if self.evidence.of_rank_0(self.evidence.one, TWICE) else [A_MEAN]

    # What verdicts and notes say.

    def _stays_equal(self) -> bool:
        """Whether each optimizer that gets another gradient on each rank has the same weights on
        all at every later step, which was seen or is what a step that calls collectives is for.
        """
        equal: dict[int, list[bool]] = {}
        for step in self.evidence.ranks.values():
            ours = self.evidence.of_first(step)
            if step.rank and ours and step.kind.startswith(LATER):
                same_weights = not apart(step.weights, ours.weights)
                equal.setdefault(step.optimizer, []).append(same_weights)
            elif step.rank and ours and step.kind == OWN:
                both = step.sums, ours.sums
                if compare(*both, self.evidence.names, self.evidence.tolerance).kind != "equal":
                    equal.setdefault(step.optimizer, [])
        return all(all(each) and (self.combines or len(each) > 1) for each in equal.values())

    def _averaged(self) -> str:
        """Whether ranks that had different parameters get equal ones at a later step."""
        alike: dict[str, bool] = {}
        for step in self.evidence.ranks.values():
            ours = self.evidence.of_first(step)
            if step.optimizer == 0:
                equal = ours is None or not apart(step.weights, ours.weights)
                alike[step.kind] = alike.get(step.kind, True) and equal
        each = list(alike.values())
        again = [n for n in range(1, len(each)) if each[n] and not each[n - 1]]
        if not again:
            return ""
        every = f"every {again[1] - again[0]} steps" if len(again) > 1 else "later"
        return f" The parameters are averaged {every}: local SGD, different by design."

    def _notes(self) -> list[str]:
        evidence, first = self.evidence, self.evidence.first
        p1, p3 = self.table.get("P1"), self.table.get("P3")
        notes = [OFF]
        if first.filled:
            notes.append(FILLED)
        if silent := self._silent():
            shown = f"{', '.join(silent[:3])}{', …' * (len(silent) > 3)}"
            notes.append(
                f"{len(silent)} of {len(evidence.names)} parameters had no gradient in the "
                f"measured step, so nothing is said of them: {shown}."
            )
        of_one = evidence.one.get((0, 0, OWN))
        numbers = other_numbers(first.seen, of_one.seen if of_one else [])
        if numbers and p1 and p1.verdict in ("scaled", "different"):
            notes.append(numbers)
        if p1 and p3 and p1.verdict == "equal" and p3.verdict == "scaled":
            notes.append(f"P3 is {_times(p3)}: the loss grows with the number of samples.")
        if self.failed_ranks:
            notes.append(f"The ranks failed: {self.failed_ranks}. What followed is not compared.")
        if evidence.micros > 1 and evidence.passes == 1 and self.mean is None:
            notes.append(K_NOT_MEASURED)
        if not any(step.cleared for step in evidence.ranks.values()):
            notes.append(NEVER_CLEARED)
        if first.replaced:
            notes.append(f"--cpu replaced: {', '.join(first.replaced)}.")
        if first.batch_norm:
            notes.append("In training, each rank's BatchNorm uses its own samples.")
        if self.later and "later" in self.table:
            notes.append(
                f"From {STEP.format(self.later.turn)} on, other parameters have gradients. "
                "There, the ranks were compared with one another only, not with one process."
            )
        return notes

    def _silent(self) -> list[str]:
        """The parameters whose gradient is zero, or missing, wherever it would be compared."""
        evidence = self.evidence
        steps = [
            s for part in (evidence.ranks, evidence.one) for s in evidence.of_rank_0(part, OWN)
        ]
        heard = {key for step in steps for key, sums in step.sums.items() if bool(sums.any())}
        return [name for key, name in evidence.names.items() if key not in heard]


VERDICTS: tuple[Callable[[Judgment], Decision | None], ...] = (
    Judgment.not_combined_at_start,
    Judgment.without_ranks,
    Judgment.without_p1,
    Judgment.scaled,
    Judgment.different,
    Judgment.depends_on_deal,
    Judgment.diverges_later,
    Judgment.without_reference,
    Judgment.differs_as_it_is,
    Judgment.equal,
)


def _if(conditions: list[str]) -> str:
    return "".join(f", if {one.rstrip('.')}" for one in conditions)


def _fraction(ratio: float) -> str:
    """A factor as a reader would write it."""
    near = Fraction(ratio).limit_denominator(256)
    return str(near) if near and abs(ratio / float(near) - 1) < 1e-3 else f"{ratio:.4g}"


def _times(row: Property) -> str:
    return f"{row.factor} = {row.ratio:.4g}" if row.factor else f"{row.ratio:.4g}"


def _sentence(row: Property) -> str:
    if row.ratio is None:
        return row.why
    numbers = f"ratio {row.ratio:.4f}, cosine {row.cosine:.4f}"
    if row.name == "P3":
        return f"Copies of one batch do not give that batch's gradient ({numbers})."
    if row.name == "P2":
        return f"Another deal of the same samples gives another gradient ({numbers})."
    return row.why
