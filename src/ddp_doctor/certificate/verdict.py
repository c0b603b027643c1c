"""The verdict: of an ordered list of questions about the table of properties, the first answer."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from ddp_doctor.certificate import files
from ddp_doctor.certificate.evidence import (
    ELSEWHERE,
    Evidence,
    ranks_differ,
    weights_differ,
)
from ddp_doctor.certificate.fixed import OFF
from ddp_doctor.certificate.measure import shares
from ddp_doctor.certificate.plan import (
    COMBINES,
    COPIES,
    DEAL,
    LATER,
    OWN,
    TWICE,
    WORLD,
    WORLD_IN_SCRIPT,
    Part,
)
from ddp_doctor.certificate.premises import line_of_other_numbers
from ddp_doctor.certificate.properties import NOT_FINITE, STEP, Properties
from ddp_doctor.certificate.record import Run, Step
from ddp_doctor.certificate.samples import Record, same_samples
from ddp_doctor.facts.certificate import TITLES, Certificate, Property

COMBINED_LATER = (
    "The optimizer gets another gradient on each rank, but the ranks' weights stay equal. They are "
    "combined in its step or after it, which is not measured."
)
NO_REFERENCE = (
    "In one process, the same samples in another order give another gradient. So one process may "
    "have the same defect as the ranks, or depend on which samples are side by side, or on the "
    "number of the step, and it is no reference."
)
NO_SECOND = (
    "The optimizer of the first step takes no second one. Others step later, and there the ranks "
    "are compared with one another only."
)
NOTHING_COMBINED = "One process and one micro-batch: nothing is combined."
NO_RANKS = (
    "The script ran as one process: how ranks combine their gradients is not measured. Start two, "
    "for example with --ranks 2."
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
COUPLED = (
    "Copies of one batch are right, but the gradient depends on which samples share a batch, for "
    "example by counts or statistics, a loss over pairs of samples, or a gather without a gradient."
)
DIFFERENT = "One process with the same samples computes another gradient."
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
FILLED = "Weights that start at zero have small values here: else nothing behind them is compared."
SAME_SAMPLES = (
    "All ranks have the same samples in the first step. That is right only if they split layers; "
    "else give each rank samples of its own, for example with a DistributedSampler."
)
SAME_MICRO_BATCHES = (
    "One process with all samples computes the same gradient, but in as many backward passes, so "
    "it does not show that the samples of each weigh the same."
)
GROWS = "the loss grows with the number of samples."
BATCH_NORM = "In training, each rank's BatchNorm uses its own samples."
OTHER_PARAMETERS = (
    "other parameters have gradients. There, the ranks were compared with one another only, not "
    "with one process."
)
Decision = tuple[Property, str]  # whose verdict it is, and why


def judge(ranks: Part, process: Part, failure_of_ranks: str, failure_of_one: str) -> Certificate:
    """The certificate of two parts.

    `failure_of_ranks`, `failure_of_one`: the last line of the error that ended one, or empty.
    """
    run = Run(ranks)
    first = run[OWN].rank_0
    world = first[0].world if first else 0
    if not first or (failure_of_ranks and not ranks.path(WORLD).exists()):
        error = failure_of_ranks or "it took no optimizer step"
        why = f"The script did not finish an optimizer step: {error}."
        return Certificate("not judged", why, world=world, error=failure_of_ranks)
    paths = list(ranks.path("").glob(files.samples_of("*")))
    if len(paths) < world and failure_of_ranks:
        why = f"Not every rank took an optimizer step: {failure_of_ranks}."
        return Certificate("not judged", why, world=world, error=failure_of_ranks)
    process_run = Run(process)
    if problem := _unusable(run, process_run):
        micros = max(1, first[0].backwards)
        return Certificate("not judged", problem, world=world, micro_batches=micros)
    world_in_script = process.path(WORLD_IN_SCRIPT).exists()
    evidence = Evidence(run, process_run, process.all_passes, world_in_script)
    properties = Properties(evidence, failure_of_ranks, failure_of_one)
    certificate = Judgment(evidence, properties, ranks.path(COMBINES).exists()).certificate()
    # Ranks that make the same samples may each take a part of them.
    records = [Record(**files.read(path)) for path in paths]
    alike = len(records) > 1 and all(same_samples(records[0], other) for other in records)
    if alike and records[0].samples and not ranks_differ(run[OWN]):
        certificate.notes.append(SAME_SAMPLES)
    return certificate


def _unusable(ranks: Run, process: Run) -> str:
    """Why the first step's gradients cannot be compared with any; or empty."""
    sums = [tensor for step in ranks[OWN].rank_0 for tensor in step.sums.values()]
    if not any(bool(tensor.any()) for tensor in sums):
        return ZERO if sums else NO_GRADIENT
    for run, name in ((ranks, "rank {0}"), (process, "one process")):
        for step in run[OWN].steps:
            if step.broken:
                why = NOT_FINITE.format(step.broken)
                return f"In the first step, {name.format(step.rank)}'s {why}"
    return ""


def not_judged(name: str, why: str) -> Decision:
    return Property(name, "not judged", why), why


class Judgment:
    """The first of `VERDICTS` that says something about the table of properties.

    `combines`: whether an optimizer's step calls a collective.
    """

    def __init__(self, evidence: Evidence, properties: Properties, combines: bool) -> None:
        self.evidence = evidence
        self.properties = properties
        self.combines = combines
        self.table = properties.table()

    def certificate(self) -> Certificate:
        decisions = (verdict(self) for verdict in VERDICTS)
        row, why = next(decision for decision in decisions if decision is not None)
        is_p1 = row.judged and (row.name == "P1" or self.evidence.world == 1)
        return Certificate(
            row.verdict,
            why,
            row.ratio if is_p1 else None,
            row.cosine if is_p1 else None,
            row.factor if is_p1 else None,
            row.worst if row.judged else None,
            self.evidence.noise,
            self.evidence.world,
            self.evidence.micros,
            [row for name, row in self.table.items() if name in TITLES],
            self._notes(),
            self.properties.failure_of_ranks,
            row.condition,
            self.evidence.loss_is_a,
            self.shares if row.verdict == "different" and row.name == "P1" else None,
        )

    # The verdicts, in the order of `VERDICTS`. None: another one decides.

    def not_combined_at_start(self) -> Decision | None:
        """Ranks that start apart, or get other gradients in the first step."""
        start = self.table.get("start")
        failure = self.properties.failure_of_ranks
        if start is None:
            return None
        if start.judged and self._weights_stay_equal():
            for name in self.table.keys() & {"P1", "P2", "P3"}:
                self.table[name] = Property(name, "not judged", "The gradient is combined later.")
            return not_judged("start", COMBINED_LATER)
        if start.judged and failure:
            why = f"{start.why} Whether they are combined later is not known: {failure}."
            return not_judged("start", why)
        steps = max(step.turn for step in self.evidence.ranks.steps) + 1
        averages = self._local_sgd() or IF_AVERAGED.format(steps)
        return start, start.why + (averages if start.judged else "")

    def without_ranks(self) -> Decision | None:
        """One process: only P2 can say something."""
        if "P1" in self.table:
            return None
        p2 = self.table.get("P2")
        if p2 is None:
            return not_judged("P1", NOTHING_COMBINED)
        if not p2.judged:
            return p2, p2.why
        depends = "does not depend" if p2.verdict == "equal" else "depends"
        return p2, f"The gradient {depends} on which micro-batch gets which sample."

    def without_p1(self) -> Decision | None:
        """P1 is not judged, as for ranks that one process cannot stand for."""
        p1 = self.table["P1"]
        if p1.judged:
            return None
        for name in ("later", "P2", "P3"):
            row = self.table.get(name)
            if row is not None and row.verdict in ("scaled", "different"):
                return row, f"{_sentence(row)} {p1.why}"
        return p1, p1.why

    def scaled(self) -> Decision | None:
        p1 = self.table["P1"]
        if p1.verdict != "scaled":
            return None
        text = f"The gradient is {_factor(p1)} times that of one process with the same samples"
        return p1, f"{text}{_conditions(self._if_mean())}."

    def different(self) -> Decision | None:
        p1, p3 = self.table["P1"], self.table.get("P3")
        if p1.verdict != "different":
            return None
        if p3 is not None and p3.verdict == "scaled":
            return p1, (
                f"{DIFFERENT} Copies of one batch give {_factor(p3)} times the gradient of that "
                "batch: a factor, or a loss that grows with the number of samples."
            )
        if p3 is None or p3.verdict != "equal":
            return p1, DIFFERENT
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
        return later, f"{first} {later.why}{self._local_sgd()}"

    def without_reference(self) -> Decision | None:
        """One process does not agree with itself, or shows less than all."""
        p2, evidence = self.table.get("P2"), self.evidence
        if evidence.order_matters and not (p2 is not None and p2.verdict == "equal"):
            return not_judged("P1", NO_REFERENCE)
        dealt = p2 is not None and not p2.judged and evidence.ranks[DEAL].main
        passes = evidence.micros > 1 and self.properties.depends_on_pass is None
        if passes and p2 is not None and dealt and p2.why != ELSEWHERE:
            return not_judged("P1", f"{SAME_MICRO_BATCHES} {p2.why}")
        if self._step_of_others and evidence.ranks[COPIES].main is None:
            return not_judged("P1", NO_SECOND)
        return None

    def differs_as_it_is(self) -> Decision | None:
        """With the script's own clipping and batch statistics."""
        p1, usual = self.table["P1"], self.table.get("usual")
        if usual is None or usual.verdict not in ("scaled", "different"):
            return None
        if usual.ratio is None:
            return usual, usual.why
        numbers = f"(ratio {usual.ratio:.4f}, cosine {usual.cosine:.4f})"
        if self.evidence.first.batch_norm:
            return p1, (
                "One process with all samples computes the same gradient, but for BatchNorm's "
                f"statistics, which each rank takes of its own samples {numbers}: by design."
            )
        return usual, f"The gradients agree until they are clipped, and then differ {numbers}."

    def equal(self) -> Decision:
        p1, evidence = self.table["P1"], self.evidence
        passes = f", in {evidence.micros} backward passes too," if evidence.micros > 1 else ""
        if evidence.passes > 1:
            passes = f", in all their {evidence.passes * evidence.micros} backward passes,"
        text = f"One process with all samples of the first step{passes} computes the same gradient"
        conditions = self._if_mean()
        if self.properties.mean_of_sum is not None:
            text = self.properties.mean_of_sum
            conditions.append("that mean is meant")
        if p1.condition:
            conditions.append(f"it had the same samples, which is not shown: {p1.condition}")
        if doubt := self.properties.depends_on_pass:
            conditions.append(EACH_PASS.format(doubt.why))
        return replace(p1, condition=" ".join(conditions)), f"{text}{_conditions(conditions)}."

    def _if_mean(self) -> list[str]:
        """The condition that the loss is a mean, unless that was measured."""
        return [] if self.evidence.process[TWICE].rank_0 else [A_MEAN]

    # What verdicts and notes say.

    @cached_property
    def shares(self) -> tuple[float, float] | None:
        """How one process weighs the samples of two ranks, if copies of one batch are right."""
        evidence, p3 = self.evidence, self.table.get("P3")
        if evidence.world != 2 or p3 is None or p3.verdict != "equal":
            return None
        rounds = evidence.process[OWN], evidence.ranks[OWN], evidence.process[COPIES]
        return shares(*(round_.gradients for round_ in rounds))

    def _weights_stay_equal(self) -> bool:
        """Whether each optimizer that gets another gradient on each rank has the same weights on
        all at every later step, which was seen or is what a step that calls collectives is for.
        """
        equal: dict[int, list[bool]] = {}
        for step, reference in self.evidence.ranks.pairs():
            if step.kind.startswith(LATER):
                same = not weights_differ(step.weights, reference.weights)
                equal.setdefault(step.optimizer, []).append(same)
            elif step.kind == OWN and self.evidence.sums_differ(step.sums, reference.sums):
                equal.setdefault(step.optimizer, [])
        return all(all(steps) and (self.combines or len(steps) > 1) for steps in equal.values())

    def _local_sgd(self) -> str:
        """Whether ranks that had different parameters get equal ones at a later step."""
        equal: dict[str, bool] = {}
        for step, reference in self.evidence.ranks.pairs():
            if step.optimizer == 0:
                same = not weights_differ(step.weights, reference.weights)
                equal[step.kind] = equal.get(step.kind, True) and same
        steps = list(equal.values())
        averages = [n for n in range(1, len(steps)) if steps[n] and not steps[n - 1]]
        if not averages:
            return ""
        interval = f"every {averages[1] - averages[0]} steps" if len(averages) > 1 else "later"
        return f" The parameters are averaged {interval}: local SGD, different by design."

    @cached_property
    def _step_of_others(self) -> Step | None:
        """The first step in which parameters have a gradient that have none in the plan's steps."""
        compared: set[str] = set()
        for step in self.evidence.ranks.steps:
            later = step.kind.startswith(LATER)
            if later and step.rank == 0 and step.sums.keys() - compared:
                return step
            compared |= set() if later else step.sums.keys()
        return None

    def _notes(self) -> list[str]:
        evidence, first = self.evidence, self.evidence.first
        p1, p3 = self.table.get("P1"), self.table.get("P3")
        main = evidence.process[OWN].main
        numbers = line_of_other_numbers(first.premises, main.premises if main else [])
        failure = self.properties.failure_of_ranks
        other, mean = self._step_of_others, self.properties.mean_of_sum
        row = p3 if p1 and p1.verdict == "equal" and p3 and p3.verdict == "scaled" else None
        at = STEP.format(other.turn) if other else ""
        notes = {
            NO_RANKS: evidence.world == 1,
            OFF: True,
            FILLED: first.fills_zeros,
            self._parameters_without_gradient(): True,
            numbers: p1 and p1.verdict in ("scaled", "different"),
            f"P3 is {_factor(row)}: {GROWS}" if row else "": True,
            f"The ranks failed: {failure}. What followed is not compared.": failure,
            K_NOT_MEASURED: evidence.micros > 1 and evidence.passes == 1 and mean is None,
            NEVER_CLEARED: not any(step.clears_gradients for step in evidence.ranks.steps),
            f"--cpu replaced: {', '.join(first.replacements)}.": first.replacements,
            BATCH_NORM: first.batch_norm,
            f"From {at} on, {OTHER_PARAMETERS}": other and "later" in self.table,
        }
        return [note for note, applies in notes.items() if note and applies]

    def _parameters_without_gradient(self) -> str:
        """Those whose gradient is zero, or missing, wherever it would be compared; or empty."""
        names = self.evidence.names
        steps = [*self.evidence.ranks[OWN].rank_0, *self.evidence.process[OWN].rank_0]
        keys = {key for step in steps for key, sums in step.sums.items() if bool(sums.any())}
        missing = [name for key, name in names.items() if key not in keys]
        shown = f"{', '.join(missing[:3])}{', …' * (len(missing) > 3)}"
        text = f"{len(missing)} of {len(names)} parameters had no gradient in the measured step"
        return f"{text}, so nothing is said of them: {shown}." if missing else ""


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


def _conditions(conditions: list[str]) -> str:
    return "".join(f", if {condition.rstrip('.')}" for condition in conditions)


def _factor(row: Property) -> str:
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
