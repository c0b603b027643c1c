"""What the measured gradients say: properties, and the verdict that follows from them."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddp_doctor.certificate import files
from ddp_doctor.certificate.fixed import OFF
from ddp_doctor.certificate.measure import (
    HALF,
    TOLERANCE,
    Comparison,
    Gradients,
    called,
    compare,
    shares,
)
from ddp_doctor.certificate.plan import AGAIN, COPIES, DEAL, LATER, OWN, USUAL
from ddp_doctor.certificate.premises import (
    MARK,
    Seen,
    Unmarked,
    other_counts,
    other_numbers,
    parted,
    same_totals,
)
from ddp_doctor.certificate.samples import Recorded, same
from ddp_doctor.facts.certificate import TITLES, Certificate, Property

FLAT = (
    "Each rank holds parameters of other shapes than one process: the model is cut by hand or by "
    "FSDP1. Models that fully_shard or parallelize_module has cut can be certified."
)
RESHAPED = "Since the first step, the script has replaced parameters by ones of other shapes."
ELSEWHERE = "This step did not get its samples at the places where the first step did."
COMBINED_LATER = (
    "The optimizer gets another gradient on each rank, but the ranks' weights stay equal. They are "
    "combined in its step or after it, which is not measured."
)
FOREIGN = (
    "The DataLoader's samples are of class {}, which is not handed to another process. Let the "
    "dataset return tensors, arrays, numbers, texts, lists, or dicts."
)
SEVERAL = "One process has no mesh and no group of several ranks, so only P2 can judge this script."
IN_ORDER = (
    "In one process, the same samples in another order give another gradient. So the gradient "
    "depends on which samples share a micro-batch, or on the number of the step."
)
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
UNSTEADY = (
    "In another step, the same samples give {} another gradient (relative error {:.2g}). The step "
    "draws, counts, or moves something that is not seen. Seed it, or turn it off."
)
DEAF = (
    "Other samples give the same gradient, so it is not computed from what was taken for samples."
)
ALONE = "One process and one micro-batch: nothing is combined. Start it with --ranks 2."
OTHERS = "The ranks hold different parameters, so one process cannot stand for them."
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
COUPLED = (
    "Copies of one batch are right, but the gradient depends on which samples share a batch, for "
    "example by counts, by a loss over pairs of samples, or by a gather without a gradient."
)
IF_AVERAGED = (
    " Right only if the parameters are averaged from time to time (local SGD). In the {} steps "
    "that were watched, they were not."
)
K_NOT_MEASURED = (
    "If the backward passes of a step are micro-batches: whether the loss has to be divided by "
    "their number is not measured, because one process has as many."
)
NEVER_CLEARED = (
    "The script never called zero_grad(). Whether a step adds to the gradients of earlier ones is "
    "not measured."
)
WORLD = "The script contains the number of ranks, so one process of it may calculate with it, too."
FROZEN = "Parameters without requires_grad have other values in one process. Seed them."
SENT = (
    "At {}, all ranks have the same tensor: one rank sends it, or all draw it alike. Whether its "
    "rows belong to the samples, and move with them, is not known."
)
STEP = "optimizer step {} (counted from 0)"  # as the rules count
WEIGHTS = "the ranks' weights differ: rank {}'s are not rank 0's."
UNTRAINED = (
    "Before {}, a parameter without requires_grad differs: rank {}'s {} is not "
    "rank 0's. What a forward changes has to be combined over the ranks."
)
FILLED = "Weights that start at zero have small values here: else nothing behind them is compared."
SAME_SAMPLES = (
    "All ranks have the same samples in the first step. That is right only if they split layers; "
    "else give each rank samples of its own, for example with a DistributedSampler."
)
ONE_BATCH = (
    "All ranks have the same samples here, and have others each in another deal. If they split one "
    "batch, such a deal says nothing."
)
SAME_MICRO_BATCHES = (
    "One process with all samples computes the same gradient, but in as many backward passes, so "
    "it does not show that the samples of each weigh the same."
)
ROUNDING = 8  # times the precision of a weight: what may lie between equal weights
Part = Mapping[tuple[int, int, str], Mapping[str, Any]]  # (rank, optimizer, kind) → facts


def read(folder: Path) -> Part:
    """What one part wrote, in the order of its steps."""
    found = [files.read(path) for path in folder.glob("step.*.pt")]
    found.sort(key=lambda facts: (facts["turn"], facts["rank"]))
    return {(facts["rank"], facts["optimizer"], facts["kind"]): facts for facts in found}


def judge(folder: Path, failed_ranks: str, failed_one: str) -> Certificate:
    """The certificate of a folder in which both parts have written.

    `failed_ranks`, `failed_one`: the last line of the error that ended a part, or empty.
    """
    ranks, one = read(folder / "ranks"), read(folder / "one")
    first = [facts for (rank, _, kind), facts in ranks.items() if rank == 0 and kind == OWN]
    if not first or (failed_ranks and not (folder / "ranks" / "world").exists()):
        said = failed_ranks or "it took no optimizer step"
        why = f"The script did not finish an optimizer step: {said}."
        world = first[0]["world"] if first else 0
        return Certificate("not judged", why, world=world, error=failed_ranks)
    if len(list((folder / "ranks").glob("samples.*.pt"))) < first[0]["world"] and failed_ranks:
        why = f"Not every rank took an optimizer step: {failed_ranks}."
        return Certificate("not judged", why, world=first[0]["world"], error=failed_ranks)
    gradients = [gradient for facts in first for gradient in facts["gradients"].values()]
    if not any(bool(gradient.any()) for gradient in gradients):
        why = ZERO if gradients else NO_GRADIENT
        counts = (first[0]["world"], max(1, int(first[0]["backwards"])))
        return Certificate("not judged", why, world=counts[0], micro_batches=counts[1])
    world_in_script = (folder / "one" / "world-in-script").exists()
    combines = (folder / "ranks" / "combines").exists()
    failed = (failed_ranks, failed_one)
    judged = Judge(ranks, one, failed, world_in_script, combines)
    # Ranks that make the same samples may each take a part of them.
    if _all_the_same(folder / "ranks") and not _said_of_ranks([*judged.seen(ranks, OWN).values()]):
        judged.certificate.notes.append(SAME_SAMPLES)
    return judged.certificate


def _all_the_same(folder: Path) -> bool:
    """Whether all ranks recorded the same samples."""
    of = [Recorded(**files.read(path)) for path in folder.glob("samples.*.pt")]
    return len(of) > 1 and bool(of[0].samples) and all(same(of[0], other) for other in of)


class Judge:
    """Compares steps of the two parts; `certificate` is the result."""

    def __init__(
        self,
        ranks: Part,
        one: Part,
        failed: tuple[str, str],
        world_in_script: bool,
        combines: bool = False,
    ) -> None:
        self.ranks, self.one = ranks, one
        self.failed_ranks, self.failed_one = failed
        self.world_in_script = world_in_script
        self.combines = combines  # whether an optimizer's step calls a collective
        self.own = ranks[0, 0, OWN]
        self.world, self.micros = int(self.own["world"]), max(1, int(self.own["backwards"]))
        self.names: dict[str, str] = {}
        for facts in ranks.values():
            self.names |= facts["names"] if facts["rank"] == 0 else {}
        self.later = self._of_other_parameters()
        half = any(facts["half"] for part in (ranks, one) for facts in part.values())
        self.base = HALF if half else TOLERANCE
        self.noise, self.in_order = self._noise()
        self.tolerance = max(self.base, 2 * (self.noise or 0.0))
        self.unsteady = self._unsteady()
        self.deaf = self._deaf()
        replicas = self._replicas()
        if not any(one.judged and one.verdict != "equal" for one in replicas):
            replicas += self._untrained()
        whole, copies = self._against_one("P1", OWN), self._against_one("P3", COPIES)
        every = [whole, self._deal(), copies, self._usual(), *replicas]
        properties = {one.name: one for one in every if one is not None}
        chosen, why = self._decided(properties)
        numbers = (chosen.ratio, chosen.cosine, chosen.factor, chosen.worst, self.noise)
        shown = [one for name, one in properties.items() if name in TITLES]
        counts = (self.world, self.micros, shown, self._notes(properties), self.failed_ranks)
        self.certificate = Certificate(chosen.verdict, why, *numbers, *counts)

    def _of_other_parameters(self) -> Mapping[str, Any] | None:
        """The first step in which parameters have a gradient that have none in the plan's steps."""
        compared: set[str] = set()
        for (_, _, kind), facts in self.ranks.items():
            compared |= set() if kind.startswith(LATER) else facts["gradients"].keys()
        others = (
            facts
            for (rank, _, kind), facts in self.ranks.items()
            if rank == 0 and kind.startswith(LATER) and facts["gradients"].keys() - compared
        )
        return next(others, None)

    def _noise(self) -> tuple[float | None, bool]:
        """What another order of one process's samples changes; whether that is more than rounding.

        None and False if the samples are not the same.
        """
        part, second = (self.one, DEAL) if self.world > 1 else (self.ranks, COPIES)
        a, b = part.get((0, 0, OWN)), part.get((0, 0, second))
        if a is None or b is None or a["backwards"] != b["backwards"] or b["unlike"]:
            return None, False
        if _shapes_differ(a["gradients"], b["gradients"]):
            return None, False
        noise = compare(a["gradients"], b["gradients"], self.names).error
        if noise <= self.base:
            return noise, False
        return None, not parted(a["seen"], b["seen"])

    def _unsteady(self) -> str:
        """That the same samples give another gradient in another step, in a sentence; or empty."""
        for part, who in ((self.ranks, "the ranks"), (self.one, "one process")):
            own, again = self._gradients(part, OWN), self._gradients(part, AGAIN)
            if not again or _shapes_differ(own, again):
                continue
            if isinstance(parted(self._all_seen(part, OWN), self._all_seen(part, AGAIN)), Unmarked):
                continue  # they are other samples
            error = self._compared((part, AGAIN), (part, OWN)).error
            if error > self.base:
                return UNSTEADY.format(who, error)
        return ""

    def _deaf(self) -> bool:
        """Whether other samples give the ranks exactly the same gradient."""
        own, copies = self._gradients(self.ranks, OWN), self._gradients(self.ranks, COPIES)
        same = own.keys() == copies.keys() and not _shapes_differ(own, copies)
        apart = parted(*(self._all_seen(self.ranks, kind) for kind in (OWN, COPIES)))
        others = isinstance(apart, Unmarked)
        return bool(same and others and all(torch.equal(own[key], copies[key]) for key in own))

    def _scaled_by_world(self, kind: str) -> bool:
        """Whether one process scales a loss or a gradient by a multiple of the number of ranks.

        It may divide by the number of its backward passes.
        """
        facts = self._last(self.one, kind)
        factors = [n for n in facts["scales"] if n and n != facts["backwards"]]
        large = [max(abs(n), 1 / abs(n)) / self.world for n in factors if math.isfinite(n)]
        return any(n > 0.99 and abs(n - round(n)) < 1e-6 for n in large)

    def _left_out(self, kind: str, *parts: Part) -> bool:
        """Whether an optimizer of the first step has no step of this kind."""
        first = {optimizer for rank, optimizer, its in self.ranks if (rank, its) == (0, OWN)}
        return any((0, optimizer, kind) not in part for part in parts for optimizer in first)

    # The properties. None: it has nothing to say about this script.

    def _against_one(self, name: str, kind: str) -> Property | None:
        if self.world == 1:
            return None
        if (0, 0, kind) not in self.one or (0, 0, kind) not in self.ranks:
            return Property(name, "not judged", self._missing(kind))
        if _shapes_differ(self._gradients(self.ranks, OWN), self._gradients(self.one, OWN)):
            return Property(name, "not judged", FLAT)
        if _shapes_differ(self._gradients(self.ranks, kind), self._gradients(self.one, kind)):
            return Property(name, "not judged", RESHAPED)
        if self._left_out(kind, self.ranks, self.one):
            return Property(name, "not judged", PARTLY)
        if self.deaf:
            return Property(name, "not judged", DEAF)
        if self.world_in_script and self._scaled_by_world(kind):
            return Property(name, "not judged", WORLD)
        found = self._compared((self.ranks, kind), (self.one, kind))
        blocked = self._elsewhere(kind) if kind == COPIES else ""
        factor = found.kind == "scaled" and called(found.ratio, self.world)
        return self._property(name, found, blocked or self._doubt(kind, bool(factor)))

    def _missing(self, kind: str) -> str:
        """Why a step is not there."""
        if self.failed_ranks and (0, 0, kind) not in self.ranks:
            return f"The ranks failed before this step: {self.failed_ranks}."
        if not self.failed_one:
            return TOO_FEW
        several = re.search(r"world.?size|process group|\bmesh\b", self.failed_one, re.I)
        size = (
            "If it expects one rank's number of samples there, take that number from the batch. "
            f"Else: {MARK}"
        )
        said = f"One process with the samples of all ranks failed: {self.failed_one}."
        return f"{said} {SEVERAL if several else size}"

    def _deal(self) -> Property | None:
        if self.world * self.micros == 1:
            return None
        if (0, 0, DEAL) not in self.ranks:
            return Property("P2", "not judged", self._missing(DEAL))
        if _shapes_differ(self._gradients(self.ranks, DEAL), self._gradients(self.ranks, OWN)):
            return Property("P2", "not judged", RESHAPED)
        if self._left_out(DEAL, self.ranks):
            return Property("P2", "not judged", PARTLY)
        if self.deaf:
            return Property("P2", "not judged", DEAF)
        return self._property(
            "P2", self._compared((self.ranks, DEAL), (self.ranks, OWN)), self._elsewhere(DEAL)
        )

    def _usual(self) -> Property | None:
        own = self.ranks.get((0, 0, USUAL), self.own)
        if not (own["clips"] or own["batch_norm"]) or self.world == 1:
            return None
        both = (0, 0, USUAL) in self.ranks and (0, 0, USUAL) in self.one
        found = self._against_one("usual", USUAL) if both and not self._unlike(USUAL) else None
        norms = self._clipped_norms()
        if norms and (found is None or found.verdict != "different"):
            return Property("usual", "different", norms)
        return found

    def _clipped_norms(self) -> str:
        """If ranks clip gradients of different norms: which. Clipping need not act for that."""
        first = self.own["norms"]
        for (rank, optimizer, kind), facts in self.ranks.items():
            if (optimizer, kind) != (0, OWN) or self.own["sharded"]:
                continue
            for ours, theirs in zip(first, facts["norms"], strict=False):
                if abs(ours - theirs) > 10 * self.tolerance * abs(ours):
                    return (
                        f"Rank 0 clips a gradient of norm {ours:.4g}, rank {rank} one of "
                        f"{theirs:.4g}: it is clipped before the ranks' gradients are combined."
                    )
        return ""

    def _replicas(self) -> list[Property]:
        """The ranks' gradients against rank 0's: of the first step if it differs, of later ones.

        Of a sharded model, its first step, if what is not sharded starts alike.
        """
        sharded = self.own["sharded"]
        for (rank, optimizer, kind), facts in self.ranks.items():
            ours = self.ranks.get((0, optimizer, kind))
            if rank == 0 or ours is None:
                continue
            shapes = _shapes_differ(facts["gradients"], ours["gradients"])
            alike = not _apart(facts["weights"], ours["weights"])
            if sharded and (kind != OWN or shapes or not alike):
                continue
            if shapes:
                return [Property("start", "not judged", OTHERS)]
            if kind == OWN and not alike:
                return [Property("start", "not judged", STARTS)]
            since = f"At {STEP.format(facts['turn'])}, "
            if facts["rates"] != ours["rates"]:
                rates = f"{facts['rates'][0]:g}, rank 0 one of {ours['rates'][0]:g}."
                why = f"{since}rank {rank} has a learning rate of {rates}"
                return [Property("later", "different", why)]
            if not alike:
                return [Property("later", "different", f"{since}{WEIGHTS.format(rank)}")]
            found = compare(facts["gradients"], ours["gradients"], self.names, self.tolerance)
            if found.kind != "equal":
                return [self._not_rank_0(facts, kind == OWN, found)]
        return [] if sharded or self.world == 1 else [Property("later", "equal", TITLES["later"])]

    def _untrained(self) -> list[Property]:
        """Whether parameters that no optimizer has start alike on the ranks, and differ later."""
        for (rank, optimizer, kind), facts in self.ranks.items():
            start = self.ranks.get((rank, optimizer, OWN))
            first = self.ranks.get((0, optimizer, kind))
            if start is None or first is None:
                continue
            for name, value in facts["untrained"].items():
                now, others = {name: value}, start["untrained"]
                alike = name in others and not _apart({name: others[name]}, self.own["untrained"])
                if alike and _apart(now, first["untrained"]):
                    why = UNTRAINED.format(STEP.format(facts["turn"]), rank, name)
                    return [Property("later", "different", why)]
        return []

    def _not_rank_0(self, facts: Mapping[str, Any], first: bool, found: Comparison) -> Property:
        since = "T" if first else f"From {STEP.format(facts['turn'])} on, t"
        why = f"{since}he ranks apply different gradients: rank {facts['rank']}'s is not rank 0's."
        name = "start" if first else "later"
        return Property(name, "different", why, found.ratio, found.cosine, None, found.worst)

    # How two steps are compared, and what speaks against it.

    def _gradients(self, part: Part, kind: str) -> dict[str, torch.Tensor]:
        """Of all optimizers whose step of this kind is there."""
        return {
            key: gradient
            for (rank, _, its), facts in part.items()
            if rank == 0 and its == kind
            for key, gradient in facts["gradients"].items()
        }

    def _compared(self, first: tuple[Part, str], second: tuple[Part, str]) -> Comparison:
        sides = [self._gradients(*first), self._gradients(*second)]
        optimizers = set.intersection(*({key.split(".")[0] for key in side} for side in sides))
        got, wanted = (
            {key: g for key, g in side.items() if key.split(".")[0] in optimizers} for side in sides
        )
        return compare(got, wanted, self.names, self.tolerance)

    def _property(self, name: str, found: Comparison, blocked: str) -> Property:
        """A measured property. With a reason to doubt it, it is judged only if it agrees."""
        if blocked and found.kind != "equal":
            return Property(name, "not judged", blocked)
        factor = called(found.ratio, self.world) if found.kind == "scaled" else None
        numbers = (found.ratio, found.cosine, factor, found.worst)
        return Property(name, found.kind, TITLES[name], *numbers)

    def _doubt(self, kind: str, factor: bool) -> str:
        """Why one process may not have had the ranks' samples. `factor`: they differ by W or so,
        and by nothing else. Then other numbers that a model is given had no part in it.
        """
        facts, ranks = self._last(self.one, kind), self._last(self.ranks, kind)
        if facts["foreign"]:
            return FOREIGN.format(facts["foreign"][0])
        if unjoined := facts["unjoined"] or ([] if factor else facts["numbers"]):
            return (
                f"What the ranks use at {unjoined[0]} cannot be joined. If it belongs to a batch: "
                f"{MARK} If its shape differs between the ranks, take it from a DataLoader with a "
                "collate_fn."
            )
        if facts["doubts"]:
            return str(facts["doubts"][0])
        if _far(facts["untrained"], ranks["untrained"]):
            return FROZEN
        if self.unsteady and not factor:
            return self.unsteady
        if said := self._parted((self.ranks, kind), (self.one, kind)):
            return said
        if facts["delivered"]:
            return SENT.format(facts["delivered"][0])
        seen = [self.seen(part, kind)[0] for part in (self.ranks, self.one)]
        shared = not _said_of_ranks([*self.seen(self.ranks, OWN).values()])
        if kind == OWN and (said := other_counts(*seen, self.world, shared)):
            shown = "So it is not shown that both have the same samples."
            return Unmarked(f"{said} {shown} {MARK}")
        if (made := facts["backwards"]) != ranks["backwards"]:
            return f"One process made {made} backward passes, a rank {ranks['backwards']}."
        return WORLD if self.world_in_script else ""

    def _last(self, part: Part, kind: str) -> Mapping[str, Any]:
        """What was known when rank 0's last optimizer took this step."""
        return [facts for (rank, _, its), facts in part.items() if (rank, its) == (0, kind)][-1]

    def _parted(self, first: tuple[Part, str], second: tuple[Part, str]) -> str:
        """Where the samples of two steps are not the same. Ranks that all see the same are one."""
        ranks, others = ([*self.seen(*step).values()] for step in (first, second))
        every, theirs = (self._all_seen(*step) for step in (first, second))
        apart = _said_of_ranks(ranks)
        if first[1] == COPIES and apart:
            return apart
        if first[1] == DEAL and apart and not _said_of_ranks(others):
            return ONE_BATCH
        return parted(every if apart else ranks[0], theirs) and parted(every, theirs)

    def seen(self, part: Part, kind: str) -> dict[int, list[Seen]]:
        """What each rank saw in a step, until each optimizer's turn."""
        found: dict[int, list[Seen]] = {}
        for (rank, _, its), facts in part.items():
            if its == kind:
                found.setdefault(rank, []).extend(facts["seen"])
        return found

    def _all_seen(self, part: Part, kind: str) -> list[Seen]:
        """What all ranks saw in a step."""
        return [one for rank in self.seen(part, kind).values() for one in rank]

    def _elsewhere(self, kind: str) -> str:
        facts, own = self._last(self.ranks, kind), self._last(self.ranks, OWN)
        if self._unlike(kind) or facts["backwards"] != own["backwards"]:
            return ELSEWHERE
        if kind != DEAL:
            return ""
        if self.unsteady:
            return self.unsteady
        every = [f["weights"] for (_, at, its), f in self.ranks.items() if (at, its) == (0, OWN)]
        if any(_apart(weights, self.own["weights"]) for weights in every):
            return OTHERS
        one = self._last(self.one, OWN) if (0, 0, OWN) in self.one else facts
        if any(f["unjoined"] or f["numbers"] for f in (facts, one)):  # perhaps it was not dealt
            return ELSEWHERE
        if one["doubts"]:
            return str(one["doubts"][0])
        if facts["delivered"]:
            return SENT.format(facts["delivered"][0])
        if self.in_order:
            return IN_ORDER
        if not same_totals(*(self.seen(self.ranks, its)[0] for its in (DEAL, OWN))):
            return ELSEWHERE
        return self._parted((self.ranks, DEAL), (self.ranks, OWN))

    def _unlike(self, kind: str) -> bool:
        """Whether an optimizer's step used other places than its first one, on any rank."""
        return any(facts["unlike"] for (_, _, its), facts in self.ranks.items() if its == kind)

    # The verdict.

    def _decided(self, of: dict[str, Property]) -> tuple[Property, str]:
        """The property that decides, and why."""
        p1, p2, p3 = (of.get(name) for name in ("P1", "P2", "P3"))
        start, later, usual = (of.get(name) for name in ("start", "later", "usual"))
        if start is not None:
            return self._apart_at_start(of, start)
        if p1 is None:
            return self._without_ranks(p2)
        if not p1.judged:
            return self._without_one(p1, [p3, p2, later])
        if p1.verdict == "scaled":
            return (
                p1,
                f"The gradient is {_times(p1)} times that of one process with the same samples.",
            )
        if p1.verdict == "different":
            return self._different(p1, p3)
        if p2 is not None and p2.judged and p2.verdict != "equal":
            return p2, "The gradient depends on which rank or micro-batch gets which sample."
        if later is not None and later.verdict != "equal":
            first = "The first step's gradient is that of one process."
            return later, f"{first} {later.why}{self._averaged()}"
        if self.in_order and not (p2 is not None and p2.verdict == "equal"):
            return Property("P1", "not judged", NO_REFERENCE), NO_REFERENCE
        dealt = p2 is not None and (0, 0, DEAL) in self.ranks
        if self.micros > 1 and dealt and not of["P2"].judged and of["P2"].why != ELSEWHERE:
            why = f"{SAME_MICRO_BATCHES} {of['P2'].why}"
            return Property("P1", "not judged", why), why
        if self.later and (0, 0, COPIES) not in self.ranks:
            return Property("P1", "not judged", NO_SECOND), NO_SECOND
        if usual is not None and usual.verdict in ("scaled", "different"):
            return self._as_it_is(p1, usual)
        many = f", in {self.micros} backward passes too," if self.micros > 1 else ""
        said = f"One process with all samples of the first step{many} computes the same gradient."
        return p1, said

    def _apart_at_start(self, of: dict[str, Property], start: Property) -> tuple[Property, str]:
        """The verdict on ranks that start apart, or get other gradients in the first step."""
        if start.judged and self._stays_equal():
            for name in of.keys() & {"P1", "P2", "P3"}:
                of[name] = Property(name, "not judged", "The gradient is combined later.")
            return Property("start", "not judged", COMBINED_LATER), COMBINED_LATER
        if start.judged and self.failed_ranks:
            why = f"{start.why} Whether they are combined later is not known: {self.failed_ranks}."
            return Property("start", "not judged", why), why
        watched = max(facts["turn"] for facts in self.ranks.values()) + 1
        said = self._averaged() or IF_AVERAGED.format(watched)
        return start, start.why + (said if start.judged else "")

    def _stays_equal(self) -> bool:
        """Whether each optimizer that gets another gradient on each rank has the same weights on
        all at every later step, which was seen or is what a step that calls collectives is for.
        """
        equal: dict[int, list[bool]] = {}
        for (rank, optimizer, kind), facts in self.ranks.items():
            ours = self.ranks.get((0, optimizer, kind))
            if rank and ours and kind.startswith(LATER):
                same_weights = not _apart(facts["weights"], ours["weights"])
                equal.setdefault(optimizer, []).append(same_weights)
            elif rank and ours and kind == OWN:
                both = facts["gradients"], ours["gradients"]
                if compare(*both, self.names, self.tolerance).kind != "equal":
                    equal.setdefault(optimizer, [])
        return all(all(each) and (self.combines or len(each) > 1) for each in equal.values())

    def _averaged(self) -> str:
        """Whether ranks that had different parameters get equal ones at a later step."""
        same: dict[str, bool] = {}
        for (_, optimizer, kind), facts in self.ranks.items():
            if optimizer == 0:
                ours = self.ranks.get((0, 0, kind), facts)
                equal = not _apart(facts["weights"], ours["weights"])
                same[kind] = same.get(kind, True) and equal
        each = list(same.values())
        again = [n for n in range(1, len(each)) if each[n] and not each[n - 1]]
        if not again:
            return ""
        every = f"every {again[1] - again[0]} steps" if len(again) > 1 else "later"
        return f" The parameters are averaged {every}: local SGD, different by design."

    def _without_ranks(self, p2: Property | None) -> tuple[Property, str]:
        if p2 is None:
            return Property("P1", "not judged", ALONE), ALONE
        if not p2.judged:
            return p2, p2.why
        depends = "does not depend" if p2.verdict == "equal" else "depends"
        return p2, f"The gradient {depends} on which micro-batch gets which sample."

    def _without_one(self, p1: Property, others: list[Property | None]) -> tuple[Property, str]:
        for one in others:
            if one is not None and one.verdict in ("scaled", "different"):
                return one, f"{_sentence(one)} {p1.why}"
        return p1, p1.why

    def _different(self, p1: Property, p3: Property | None) -> tuple[Property, str]:
        if p3 is not None and p3.verdict == "scaled":
            return p1, (
                "One process with the same samples computes another gradient. Copies of one batch "
                f"give {_times(p3)} times the gradient of that batch: a factor, or a loss that "
                "grows with the number of samples."
            )
        if p3 is None or p3.verdict != "equal":
            return p1, "One process with the same samples computes another gradient."
        union, first = self._gradients(self.one, OWN), self._gradients(self.one, COPIES)
        found = shares(union, self._gradients(self.ranks, OWN), first) if self.world == 2 else None
        if found is None:
            return p1, COUPLED
        return p1, (
            f"One process weighs the samples of rank 0 and rank 1 {found[0]:.3f} : {found[1]:.3f}, "
            "the ranks weigh them 0.5 : 0.5. This fits ranks that divide by their own counts."
        )

    def _as_it_is(self, p1: Property, usual: Property) -> tuple[Property, str]:
        if usual.ratio is None:
            return usual, usual.why
        measured = f"(ratio {usual.ratio:.4f}, cosine {usual.cosine:.4f})"
        if self.own["batch_norm"]:
            return p1, (
                "One process with all samples computes the same gradient, but for BatchNorm's "
                f"statistics, which each rank takes of its own samples {measured}: by design."
            )
        return usual, f"The gradients agree until they are clipped, and then differ {measured}."

    def _notes(self, of: dict[str, Property]) -> list[str]:
        notes = [OFF]
        if self.own["filled"]:
            notes.append(FILLED)
        silent = self._silent()
        if silent:
            shown = f"{', '.join(silent[:3])}{', …' * (len(silent) > 3)}"
            notes.append(
                f"{len(silent)} of {len(self.names)} parameters had no gradient in the measured "
                f"step, so nothing is said of them: {shown}."
            )
        numbers = other_numbers(self.own["seen"], self.one.get((0, 0, OWN), {}).get("seen", []))
        if numbers and "P1" in of and of["P1"].verdict in ("scaled", "different"):
            notes.append(numbers)
        if "P3" in of and of["P1"].verdict == "equal" and of["P3"].verdict == "scaled":
            notes.append(f"P3 is {_times(of['P3'])}: the loss grows with the number of samples.")
        if self.failed_ranks:
            notes.append(f"The ranks failed: {self.failed_ranks}. What followed is not compared.")
        if self.micros > 1:
            notes.append(K_NOT_MEASURED)
        if not any(facts["cleared"] for facts in self.ranks.values()):
            notes.append(NEVER_CLEARED)
        if self.own["replaced"]:
            notes.append(f"--cpu replaced: {', '.join(self.own['replaced'])}.")
        if self.own["batch_norm"]:
            notes.append("In training, each rank's BatchNorm uses its own samples.")
        if self.later and "later" in of:
            notes.append(
                f"From {STEP.format(self.later['turn'])} on, other parameters have gradients. "
                "There, the ranks were compared with one another only, not with one process."
            )
        return notes

    def _silent(self) -> list[str]:
        """The parameters whose gradient is zero, or missing, wherever it would be compared."""
        sides = (self._gradients(part, OWN) for part in (self.ranks, self.one))
        heard = {key for side in sides for key, gradient in side.items() if bool(gradient.any())}
        return [name for key, name in self.names.items() if key not in heard]


def _said_of_ranks(ranks: list[list[Seen]]) -> str:
    """Where the samples of a rank and of rank 0 are not the same, in a sentence; or empty."""
    return next((said for rank in ranks[1:] if (said := parted(rank, ranks[0]))), "")


def _shapes_differ(ours: Gradients, others: Gradients) -> bool:
    return any(ours[key].shape != others[key].shape for key in ours.keys() & others.keys())


def _apart(ours: Gradients, theirs: Gradients) -> bool:
    """Whether a weight differs by more than rounding."""
    return any(
        ours[key].shape != theirs[key].shape
        or float((ours[key] - theirs[key]).norm())
        > ROUNDING * torch.finfo(ours[key].dtype).eps * float(ours[key].norm())
        for key in ours.keys() & theirs.keys()
    )


def _far(ours: Gradients, theirs: Gradients) -> bool:
    """Whether values differ by more than what updates with rounded gradients make of them."""
    return any(
        ours[key].shape == theirs[key].shape
        and float((ours[key] - theirs[key]).norm()) > 0.01 * float(ours[key].norm())
        for key in ours.keys() & theirs.keys()
    )


def _times(one: Property) -> str:
    return f"{one.factor} = {one.ratio:.4g}" if one.factor else f"{one.ratio:.4g}"


def _sentence(one: Property) -> str:
    if one.ratio is None:
        return one.why
    numbers = f"ratio {one.ratio:.4f}, cosine {one.cosine:.4f}"
    if one.name == "P3":
        return f"Copies of one batch do not give that batch's gradient ({numbers})."
    if one.name == "P2":
        return f"Another deal of the same samples gives another gradient ({numbers})."
    return one.why
