"""What the measured gradients say: three properties, and the verdict that follows from them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddp_doctor.certificate.fixed import OFF
from ddp_doctor.certificate.measure import TOLERANCE, Comparison, called, compare, shares
from ddp_doctor.certificate.plan import COPIES, DEAL, OWN, USUAL
from ddp_doctor.certified import TITLES, Certificate, Property

FLAT = "Each rank holds a flat piece of the model, as in FSDP1. Use fully_shard to certify it."
MARK = "If the batch comes from no DataLoader, mark it: x, y = ddp_doctor.batch((x, y))."
ELSEWHERE = f"This step did not get its samples at the places where the first step did. {MARK}"
MOST_NOISE = 0.01  # a larger change by another order of the samples is no rounding


def read(folder: Path) -> dict[tuple[int, int, str], Mapping[str, Any]]:
    """(rank, optimizer, kind) → what was written."""
    found = {}
    for path in sorted(folder.glob("*.*.*.pt")):
        rank, optimizer, _ = path.name.removesuffix(".pt").split(".")
        if not rank.isdigit():
            continue
        facts = torch.load(path, weights_only=False)
        found.setdefault((int(rank), int(optimizer), facts["kind"]), facts)
    return found


def judge(folder: Path, failed_ranks: str, failed_one: str) -> Certificate:
    """The certificate of a folder in which both parts have written.

    `failed_ranks`, `failed_one`: the last line of the error that ended a part, or empty.
    """
    ranks, one = read(folder / "ranks"), read(folder / "one")
    start = ranks.get((0, 0, OWN))
    if start is None:
        said = failed_ranks or "it took no optimizer step"
        return Certificate("not judged", f"The script did not get to an optimizer step: {said}.")
    if not any(bool(gradient.any()) for gradient in start["gradients"].values()):
        return Certificate(
            "not judged",
            "The optimizer's parameters get no gradient in the first step: it may have been made "
            "before the model that is trained.",
        )
    found = Judge(ranks, one, failed_one, (folder / "one" / "world-in-script").exists())
    return found.certificate()


class Judge:
    """Compares steps of the two parts."""

    def __init__(self, ranks: Any, one: Any, failed_one: str, world_in_script: bool) -> None:
        self.ranks, self.one = ranks, one
        self.failed_one = failed_one
        self.world_in_script = world_in_script
        own = ranks[0, 0, OWN]
        self.world = int(own["world"])
        self.micros = max(1, int(own["backwards"]))
        self.names = {
            k: n for (r, _, _), facts in ranks.items() if r == 0 for k, n in facts["names"].items()
        }
        self.noise = self._noise()
        self.tolerance = max(TOLERANCE, 5 * (self.noise or 0.0))

    def _noise(self) -> float | None:
        pairs = [(self.one, OWN, DEAL)] if self.world > 1 else [(self.ranks, OWN, COPIES)]
        for part, first, second in pairs:
            if (0, 0, first) in part and (0, 0, second) in part:
                a, b = part[0, 0, first], part[0, 0, second]
                noise = compare(a["gradients"], b["gradients"], self.names).error
                if noise < MOST_NOISE and a["backwards"] == b["backwards"]:
                    return noise
        return None

    def _gradients(self, part: Any, kind: str) -> dict[str, torch.Tensor]:
        """Of all optimizers whose step of this kind is there."""
        return {
            key: gradient
            for (rank, _, its), facts in part.items()
            if rank == 0 and its == kind
            for key, gradient in facts["gradients"].items()
        }

    def _compared(self, first: tuple[Any, str], second: tuple[Any, str]) -> Comparison:
        got, wanted = self._gradients(*first), self._gradients(*second)
        optimizers = {k.split(".")[0] for k in got} & {k.split(".")[0] for k in wanted}
        got = {k: g for k, g in got.items() if k.split(".")[0] in optimizers}
        wanted = {k: g for k, g in wanted.items() if k.split(".")[0] in optimizers}
        return compare(got, wanted, self.names, self.tolerance)

    def certificate(self) -> Certificate:
        properties = [self.number_of_ranks(), self.deal(), self.copies(), self.usual()]
        properties = [one for one in properties if one is not None]
        differing = self._ranks_differ()
        chosen, why = differing or self._decided({one.name: one for one in properties})
        return Certificate(
            chosen.verdict,
            why,
            chosen.ratio,
            chosen.cosine,
            chosen.factor,
            chosen.worst,
            self.noise,
            self.world,
            self.micros,
            properties,
            self._notes(),
        )

    def _property(self, name: str, found: Comparison, blocked: str = "") -> Property:
        """A measured property. With a reason to doubt it, it is judged only if it agrees."""
        factor = called(found.ratio, self.world, self.micros) if found.kind == "scaled" else None
        numbers = (found.ratio, found.cosine, factor, found.worst)
        if blocked and found.kind != "equal":
            return Property(name, "not judged", blocked, *numbers)
        return Property(name, found.kind, TITLES[name], *numbers)

    def number_of_ranks(self) -> Property | None:
        if self.world == 1:
            return None
        if (0, 0, OWN) not in self.one:
            return Property("P1", "not judged", self._no_one())
        if self._flat():
            return Property("P1", "not judged", FLAT)
        return self._property(
            "P1", self._compared((self.ranks, OWN), (self.one, OWN)), self._doubt(OWN)
        )

    def _no_one(self) -> str:
        said = self.failed_one or "it took no optimizer step"
        return f"One process with all samples failed: {said}. {MARK}"

    def _doubt(self, kind: str) -> str:
        facts = self.one[0, 0, kind]
        if facts["unjoined"]:
            return (
                f"What the ranks use at {facts['unjoined'][0]} cannot be joined. {MARK} If its "
                "shape differs between the ranks, take it from a DataLoader with a collate_fn."
            )
        if int(facts["backwards"]) != self.micros:
            return f"One process made {facts['backwards']} backward passes, a rank {self.micros}."
        if self.world_in_script:
            return "The script contains the number of ranks, so one process of it divides by it."
        return ""

    def _unlike(self, kind: str) -> bool:
        """Whether this step used other places than the first, on any rank."""
        return any(f["unlike"] for (_, at, its), f in self.ranks.items() if (at, its) == (0, kind))

    def _flat(self) -> bool:
        """Whether a rank holds pieces of parameters that nobody can put together."""
        ours, other = self._gradients(self.ranks, OWN), self._gradients(self.one, OWN)
        return any(ours[key].shape != other[key].shape for key in ours.keys() & other.keys())

    def deal(self) -> Property | None:
        if self.world * self.micros == 1:
            return None
        facts = self.ranks.get((0, 0, DEAL))
        if facts is None:
            return Property("P2", "not judged", "The script took too few optimizer steps.")
        blocked = ""
        if self._unlike(DEAL) or facts["unjoined"] or facts["backwards"] != self.micros:
            blocked = ELSEWHERE
        return self._property("P2", self._compared((self.ranks, DEAL), (self.ranks, OWN)), blocked)

    def copies(self) -> Property | None:
        if self.world == 1:
            return None
        if (0, 0, COPIES) not in self.one or (0, 0, COPIES) not in self.ranks:
            return Property("P3", "not judged", "The script took too few optimizer steps.")
        if self._flat():
            return Property("P3", "not judged", FLAT)
        facts = self.ranks[0, 0, COPIES]
        blocked = self._doubt(COPIES)
        if self._unlike(COPIES) or facts["backwards"] != self.micros:
            blocked = ELSEWHERE
        found = self._compared((self.ranks, COPIES), (self.one, COPIES))
        return self._property("P3", found, blocked)

    def usual(self) -> Property | None:
        own = self.ranks.get((0, 0, USUAL))
        if own is None or not (own["clips"] or own["batch_norm"]) or self.world == 1:
            return None
        if (0, 0, USUAL) not in self.one or self._unlike(USUAL):
            return None
        found = self._compared((self.ranks, USUAL), (self.one, USUAL))
        return self._property("usual", found, self._doubt(USUAL))

    def _ranks_differ(self) -> tuple[Property, str] | None:
        """If ranks apply different gradients: how far rank 1's is from rank 0's."""
        if self.ranks[0, 0, OWN]["sharded"]:
            return None
        first = self._gradients(self.ranks, OWN)
        for rank in sorted({rank for rank, _, _ in self.ranks if rank}):
            facts = self.ranks.get((rank, 0, OWN))
            if facts is None:
                continue
            other = facts["gradients"]
            mine = {
                k: g
                for k, g in first.items()
                if k.split(".")[0] in {k.split(".")[0] for k in other}
            }
            if any(mine[k].shape != other[k].shape for k in mine.keys() & other.keys()):
                why = "The ranks hold different parameters, so one process cannot stand for them."
                return Property("P1", "not judged", why), why
            if facts["start"] != self.ranks[0, 0, OWN]["start"]:
                why = (
                    "The ranks start from different weights. If each holds a part of the model, "
                    "this is right and cannot be judged; else broadcast the weights of rank 0."
                )
                return Property("P1", "not judged", why), why
            found = compare(other, mine, self.names, self.tolerance)
            if found.kind != "equal":
                why = f"The ranks apply different gradients: rank {rank}'s is not rank 0's."
                numbers = (found.ratio, found.cosine, None, found.worst)
                return Property("P1", "different", why, *numbers), why
        return None

    def _decided(self, of: dict[str, Property]) -> tuple[Property, str]:
        """The property that decides, and why."""
        p1, p2, p3, usual = (of.get(name) for name in ("P1", "P2", "P3", "usual"))
        if p1 is None:
            return self._without_ranks(p2)
        if not p1.judged:
            return self._without_one(p1, p2, p3)
        if p1.verdict == "scaled":
            times = f"{p1.factor} = {p1.ratio:.4g}" if p1.factor else f"{p1.ratio:.4g}"
            return p1, f"The gradient is {times} times that of one process with the same samples."
        if p1.verdict == "different":
            return self._different(p1, p3)
        if p2 is not None and p2.judged and p2.verdict != "equal":
            return p2, "The gradient depends on which rank or micro-batch gets which sample."
        if usual is not None and usual.verdict in ("scaled", "different"):
            return self._as_it_is(p1, usual)
        return p1, "One process with all samples of a step computes the same gradient."

    def _without_ranks(self, p2: Property | None) -> tuple[Property, str]:
        if p2 is None:
            why = "One process and one micro-batch: nothing is combined. Start it with --ranks 2."
            return Property("P1", "not judged", why), why
        if p2.verdict == "equal":
            return p2, "The gradient does not depend on which micro-batch gets which sample."
        if not p2.judged:
            return p2, p2.why
        return p2, "The gradient depends on which micro-batch gets which sample."

    def _without_one(
        self, p1: Property, p2: Property | None, p3: Property | None
    ) -> tuple[Property, str]:
        for one in (p3, p2):
            if one is not None and one.verdict in ("scaled", "different"):
                return one, f"{_sentence(one)} {p1.why}"
        if p2 and p3 and p2.verdict == p3.verdict == "equal":
            return p3, "Copies of one batch, and another deal of the samples, change nothing."
        return p1, p1.why

    def _different(self, p1: Property, p3: Property | None) -> tuple[Property, str]:
        if p3 is not None and p3.verdict == "scaled":
            named = f"{p3.factor} = {p3.ratio:.4g}" if p3.factor else f"{p3.ratio:.4g}"
            return p3, (
                f"Copies of one batch give {named} times the gradient of one process. Besides, the "
                "gradient depends on which samples share a batch."
            )
        if self.world == 2 and p3 is not None and p3.verdict == "equal":
            union, first = self._gradients(self.one, OWN), self._gradients(self.one, COPIES)
            found = shares(union, self._gradients(self.ranks, OWN), first)
            if found is not None:
                return p1, (
                    f"One process weighs the samples of rank 0 and rank 1 {found[0]:.3f} : "
                    f"{found[1]:.3f}, the ranks weigh them 0.5 : 0.5. Each rank divides by its own "
                    "count of items."
                )
        if p3 is not None and p3.verdict == "equal":
            return p1, (
                "Copies of one batch are right, but the gradient depends on which samples share a "
                "batch: counts that differ, a loss over pairs of samples, or a gather that carries "
                "no gradient."
            )
        return p1, "One process with the same samples computes another gradient."

    def _as_it_is(self, p1: Property, usual: Property) -> tuple[Property, str]:
        facts = self.ranks[0, 0, USUAL]
        measured = f"(ratio {usual.ratio:.4f}, cosine {usual.cosine:.4f})"
        if facts["batch_norm"]:
            return p1, (
                "One process with all samples computes the same gradient, but for BatchNorm's "
                f"statistics, which each rank takes of its own samples {measured}: by design."
            )
        return usual, f"The gradients agree until they are clipped, and then differ {measured}."

    def _notes(self) -> list[str]:
        own = self.ranks[0, 0, OWN]
        notes = [OFF]
        if self.micros > 1:
            notes.append(
                "Whether the loss has to be divided by the number of micro-batches is not "
                "measured: one process has as many."
            )
        if own["replaced"]:
            notes.append(f"--cpu replaced: {', '.join(own['replaced'])}.")
        if own["batch_norm"]:
            notes.append("In training, each rank's BatchNorm uses its own samples.")
        return notes


def _sentence(one: Property) -> str:
    numbers = f"ratio {one.ratio:.4f}, cosine {one.cosine:.4f}"
    if one.name == "P3":
        return f"Copies of one batch do not give that batch's gradient ({numbers})."
    return f"Another deal of the same samples gives another gradient ({numbers})."
