"""The journals of all ranks, side by side: what the rules read.

Plain data, no torch. `Run.of` takes the journals of all processes; a process that never joined a
group and never stepped an optimizer is not a rank.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from ddp_doctor.facts.journal import ProcessJournal, Status
from ddp_doctor.facts.types import (
    CollectiveFact,
    EndFact,
    ErrorFact,
    Facts,
    Groups,
    LoaderFact,
    ProcessFact,
    SnapshotFact,
    StartFact,
    TotalsFact,
    WindowFact,
    WrapperFact,
)

IN_NO_MODULE = "parameter "  # how the names of such parameters begin


@dataclass
class Rank:
    """One rank: its facts by kind, in order."""

    rank: int
    world: int
    facts: Facts
    status: Status | None
    process: ProcessFact
    alive: bool = False

    @property
    def windows(self) -> list[WindowFact]:
        return self.facts["window"]

    @property
    def end(self) -> EndFact | None:
        return next(reversed(self.facts["end"]), None)

    @property
    def totals(self) -> TotalsFact | None:
        return next(reversed(self.facts["totals"]), None)

    @cached_property
    def start(self) -> StartFact | None:
        """What the optimizers' parameters were before their first step."""
        starts = self.facts["start"]
        if not starts:
            return None
        merged = StartFact(parameters={}, values={}, shards={}, constant=[])
        for start in reversed(starts):
            merged["parameters"] |= start["parameters"]
            merged["values"] |= start["values"]
            merged["shards"] |= start["shards"]
            merged["constant"] += start["constant"]
        return merged

    @property
    def error(self) -> ErrorFact | None:
        return self.end.get("error") if self.end else None

    @property
    def steps(self) -> int:
        if self.totals:
            return sum(self.totals["steps"].values())
        return self.status.steps if self.status else 0


@dataclass
class Window:
    """One optimizer step on all ranks. `ranks` holds each rank's record of it, by rank.

    `copies` has the groups of ranks that hold copies of a parameter, by name.
    """

    n: int
    optimizer: int
    ranks: dict[int, WindowFact]
    world: int
    copies: dict[str, Groups] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every rank's record is there."""
        return len(self.ranks) == self.world

    @property
    def first(self) -> WindowFact:
        """The record of the first rank that has one."""
        return self.ranks[min(self.ranks)]

    def __iter__(self) -> Iterator[tuple[int, WindowFact]]:
        return iter(sorted(self.ranks.items()))

    @property
    def facts(self) -> list[WindowFact]:
        """The ranks' records, in order."""
        return [fact for _, fact in self]

    def snapshots(self) -> dict[int, SnapshotFact]:
        return {rank: fact["snapshot"] for rank, fact in self}

    @cached_property
    def backwards(self) -> int:
        return max((len(fact["backwards"]) for fact in self.ranks.values()), default=0)

    @property
    def backward_place(self) -> str:
        """Where the first backward of the step was called."""
        return next((b["place"] for _, fact in self for b in fact["backwards"]), "")

    @cached_property
    def sharded(self) -> bool:
        return any(fact["sharded"] for fact in self.ranks.values())

    @cached_property
    def skipped(self) -> bool:
        return any(fact["skipped"] for fact in self.ranks.values())

    @property
    def cut(self) -> bool:
        """Whether some rank ran more backwards before this step than a record may hold."""
        return any(fact["cut"] for fact in self.ranks.values())

    @cached_property
    def trains(self) -> bool:
        """Whether some parameter of the optimizer has a gradient."""
        return any(snapshot["hashes"] for snapshot in self.snapshots().values())

    def groups(self, name: str) -> Groups:
        """The groups of ranks that hold copies of a parameter: one of all, unless they differ."""
        return self.copies.get(name) or [list(self.ranks)]

    @cached_property
    def differing_gradients(self) -> list[str]:
        """Names of parameters whose gradients are not bitwise equal on all ranks with a copy."""
        return self._differing({rank: s["hashes"] for rank, s in self.snapshots().items()})

    @cached_property
    def differing_parameters(self) -> list[str]:
        """Names of parameters whose copies are not bitwise equal after the step."""
        return self._differing({rank: fact["after"]["parameters"] for rank, fact in self})

    @cached_property
    def differing_buffers(self) -> list[str]:
        return self._differing({rank: fact["after"]["buffers"] for rank, fact in self})

    def _differing(self, of_ranks: dict[int, dict[str, int]]) -> list[str]:
        names = dict.fromkeys(name for fact in of_ranks.values() for name in fact)
        return [
            name
            for name in names
            if any(
                len({of_ranks[rank].get(name) for rank in group if rank in of_ranks}) > 1
                for group in self.groups(name)
            )
        ]


def _age(rank: Rank) -> tuple[int, float]:
    return rank.world, float(rank.process["started"])


@dataclass
class Run:
    """All ranks of a run that wrote a journal, and the facts that are about all of them."""

    ranks: list[Rank]
    world: int
    hung: bool = False
    notes: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)  # rules that failed

    @classmethod
    def of(
        cls, journals: list[ProcessJournal], alive: set[str] | None = None, hung: bool = False
    ) -> Self:
        """Merge. The last process group that a process joined says which rank it is."""
        ranks: dict[int, Rank] = {}
        for journal in journals:
            facts = journal.facts
            groups, processes = facts["group"], facts["process"]
            if not processes or not (groups or facts["window"] or facts["wrapper"]):
                continue
            environment = processes[0]["environment"]
            if groups:
                number, world = groups[-1]["rank"], groups[-1]["world"]
            else:
                number, world = int(environment.get("RANK", 0) or 0), 1
            living = alive is not None and journal.name in alive
            rank = Rank(number, world, facts, journal.status, processes[0], living)
            # If a rank was restarted, the later process counts. A process that a rank started
            # inherits its RANK but joins no group, so its world is smaller.
            known = ranks.get(number)
            if known is None or _age(rank) > _age(known):
                ranks[number] = rank
        ordered = [ranks[key] for key in sorted(ranks)]
        world = max((rank.world for rank in ordered), default=1)
        return cls(ordered, world, hung)

    @cached_property
    def windows(self) -> list[Window]:
        """Observed optimizer steps, by number; the optimizer is part of what has to agree.

        Steps that a process took alone, before it joined the others, are left out.
        """
        found: dict[tuple[int, int], Window] = {}
        for rank in self.ranks:
            for fact in rank.windows:
                if fact["world"] != self.world:
                    continue
                key = (fact["n"], fact["optimizer"])
                window = found.setdefault(key, Window(*key, {}, self.world, self.copies))
                window.ranks[rank.rank] = fact
        return [found[key] for key in sorted(found)]

    @cached_property
    def complete(self) -> list[Window]:
        return [
            window
            for window in self.windows
            if window.complete and not window.skipped and not window.cut
        ]

    @cached_property
    def wrappers(self) -> list[WrapperFact]:
        return self.ranks[0].facts["wrapper"] if self.ranks else []

    @cached_property
    def differing_scales(self) -> tuple[int, dict[int, float]] | None:
        """The first step after which the ranks' gradient scalers have other scales, and these."""
        by_step: dict[int, dict[int, float]] = {}
        for rank in self.ranks:
            for fact in rank.facts["scale"]:
                by_step.setdefault(fact["n"], {})[rank.rank] = fact["scale"]
        for step, scales in sorted(by_step.items()):
            if len(scales) == self.world and len(set(scales.values())) > 1:
                return step, scales
        return None

    @cached_property
    def in_groups(self) -> bool:
        """Whether a wrapper combines fewer ranks than the run has: the others hold other parts."""
        wrappers = [wrapper for rank in self.ranks for wrapper in rank.facts["wrapper"]]
        return any(wrapper["world"] < wrapper["of"] for wrapper in wrappers)

    @cached_property
    def copies(self) -> dict[str, Groups]:
        """The groups of ranks that hold copies of each parameter. Empty if it was not seen.

        Ranks hold the same shard at the same place of a mesh. Of other parameters, all ranks have
        copies or none has one: they start with the same bits, or step with the same gradient, or a
        wrapper is around them. Bits of a constant (zeros, ones) tell nothing: such parameters are
        copies if no other one tells the ranks apart. What only some ranks' optimizers have is no
        copy there: each may step a part of the model.
        """
        starts = [rank.start for rank in self.ranks if rank.start]
        if len(starts) < self.world:
            return {}
        everyone, alone = [list(range(self.world))], [[rank] for rank in range(self.world)]
        around = [wrapper for wrapper in self.wrappers if wrapper["world"] == self.world]
        ignored = {name for wrapper in around for name in wrapper["ignored"]}
        found: dict[str, Groups] = {}
        constant = []
        for name in dict.fromkeys(name for start in starts for name in start["parameters"]):
            places = [tuple(start["shards"].get(name, ())) for start in starts]
            if any(places):
                of_each = sorted(set(places))
                found[name] = [[r for r, at in enumerate(places) if at == one] for one in of_each]
            elif not all(name in start["parameters"] for start in starts):
                found[name] = alone
            elif around and name.split(":")[-1] not in ignored and name[:10] != IN_NO_MODULE:
                found[name] = everyone
            elif all(name in start["constant"] for start in starts):
                constant.append(name)
            else:
                found[name] = everyone if self._alike(name, starts) else alone
        own = any(len(groups) > 1 for groups in found.values())
        return found | dict.fromkeys(constant, alone if own else everyone)

    def _alike(self, name: str, starts: list[StartFact]) -> bool:
        """Whether all ranks start with the same bits, or once step with the same gradient."""
        held = {start["parameters"].get(name) for start in starts}
        if len(held) == 1 and held != {0}:
            return True
        windows: dict[tuple[int, int], list[tuple[int | None, bool]]] = {}
        for rank in self.ranks:
            for fact in rank.windows:
                of = fact["snapshot"]
                bits = of["hashes"].get(name), any(of["grads"].get(name) or ())
                windows.setdefault((fact["n"], fact["optimizer"]), []).append(bits)
        return any(
            len(found) == self.world and len(set(found)) == 1 and found[0][1]
            for found in windows.values()
        )

    @cached_property
    def split(self) -> bool:
        """Whether ranks hold different parts of a model, or models of their own.

        The shards of fully_shard do not count: each rank computes the gradients of all of them.
        """
        facts = [fact for rank in self.ranks for fact in rank.windows]
        pieces = {name for fact in facts for name in fact["snapshot"]["pieces"]}
        return any(len(groups) > 1 and name not in pieces for name, groups in self.copies.items())

    @cached_property
    def exchanges(self) -> bool:
        """Whether activations go through a collective: ranks may split a sequence, or a graph."""
        calls = [c for rank in self.ranks for fact in rank.windows for c in fact["collectives"]]
        return any(call["through_autograd"] or call.get("what") == "activation" for call in calls)

    @cached_property
    def data(self) -> list[list[str]]:
        """What each rank computes from, by observed step and rank. Empty if that was not seen."""
        windows = [window for window in self.complete if window.trains]
        seen = [[data_of(fact) for _, fact in window] for window in windows]
        return [list(map(str, of)) for of in seen] if all(all(of) for of in seen) else []

    @cached_property
    def same_data(self) -> Groups:
        """The groups of ranks that compute from equal data in every observed step, if it is known.

        A rank with data of its own is a group.
        """
        by_rank = list(zip(*self.data, strict=True))
        first = [by_rank.index(mine) for mine in by_rank]
        return [[rank for rank, of in enumerate(first) if of == one] for one in sorted(set(first))]

    @property
    def weighed(self) -> bool:
        """Whether each rank has the loss of its own samples, and not a part of a common one."""
        parts = self.exchanges and len(self.same_data) not in (0, self.world)
        return not self.split and not parts

    @cached_property
    def steps(self) -> int:
        return max((rank.steps for rank in self.ranks), default=0)

    @property
    def not_checked(self) -> list[str]:
        """What keeps silence from meaning that all is well."""
        found = list(self.unchecked)
        if self.missing:
            found.append(f"rank {', '.join(map(str, self.missing))} has no journal in this folder")
        for rank in self.ranks:
            if rank.error is not None:
                text = (rank.error["text"].splitlines() or ["no message"])[0].rstrip(". ")
                at = f" at {rank.error['place']}" if rank.error["place"] else ""
                found.append(f"rank {rank.rank} ended with {rank.error['type']}: {text}{at}")
            elif rank.facts["failed"]:
                found.append(f"the doctor stopped on rank {rank.rank}")
            elif rank.end and rank.end.get("cut"):
                found.append(f"the journal of rank {rank.rank} was full")
        inside = [fact for each in self.complete for _, fact in each if "combined_in_step" in fact]
        if not self.complete:
            found.append("no optimizer step was observed on all ranks")
        elif inside and not any(window.trains for window in self.complete):
            found.append(
                f"how the optimizer's step at {inside[0]['step_place']} combines the ranks"
            )
        return found

    @property
    def missing(self) -> list[int]:
        """Ranks without a journal here."""
        there = {rank.rank for rank in self.ranks}
        return [rank for rank in range(self.world) if rank not in there]

    @cached_property
    def averages_parameters(self) -> bool:
        """Whether replicas that differed are equal at the start of a later step (local SGD)."""
        starts = [rank.totals["starts"] if rank.totals else {} for rank in self.ranks] or [{}]
        common = [step for step in starts[0] if all(step in start for start in starts)]
        # A start is a checksum of a few parameters: a difference of a few others says nothing.
        most = [
            window.n + 1
            for window in self.complete
            if window.optimizer == 0  # as the starts are
            for fact in [window.first]
            if 2 * len(window.differing_parameters) >= len(fact["after"]["parameters"]) > 0
        ]
        differed = min(most, default=None)
        for step in sorted(map(int, common)):
            if len({start[str(step)] for start in starts}) > 1:
                differed = step if differed is None else min(differed, step)
            elif differed is not None and step >= differed:
                return True
        return False

    @property
    def loader(self) -> LoaderFact | None:
        """The first data loader that was read."""
        return next((loader for rank in self.ranks for loader in rank.facts["loader"]), None)


def so_far(fact: CollectiveFact, window: Window) -> int:
    """How many of a window's backwards had run when a collective was called."""
    return fact["backwards"].get(str(window.optimizer), 0)


def data_of(fact: WindowFact) -> list[object]:
    """Hashes of what the forward was given and of the losses' targets; empty if unknown.

    The value of a loss without a target takes the target's place, if it is a number. A tensor that
    has elements and the hash 0 could not be read.
    """
    given = [[hash_, size] for group in fact["inputs"] for hash_, size, _ in group]
    seen: list[object] = [*given]
    for backward in fact["backwards"]:
        terms = backward.get("terms", ())
        # Inputs without a tensor (strings, ids) are not in `given`; they do change the loss.
        if not all("target" in term for term in terms) or not terms:
            values = backward.get("values") or []
            if any(not math.isfinite(value) for value in values):
                return []  # NaN on every rank is no equal data
            seen.append(values)
        for term in terms:
            if "target" in term:
                seen.append([term["target"], 0 if given else term["input"]])
                if not term["target"] or not (given or term["input"]):
                    return []
    return [] if any(size and not hash_ for hash_, size in given) else seen
