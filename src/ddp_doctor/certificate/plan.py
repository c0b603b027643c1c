"""What the runs of a certificate do: which samples each of its first optimizer steps gets.

The *ranks* are the script as the user runs it; *one* is the same script as a single process. Either
is started again if it needs another environment. A last start is only *observed*: it takes 16
ordinary steps, and the rules say why the two differ, and what their steps do not show. No
update is kept in the steps of the plan, so all start from the same weights, and two steps differ
only in their samples. Where several optimizers take turns, a step is one round of them: the ranks
are started once more after two equal rounds, and know then how long a round is:

    step    the ranks get                        one process gets
    own     their own samples                    all of these samples (their union)
    copies  rank 0's samples, on every rank      rank 0's samples
    deal    the samples of `own`, dealt again    the union in another order: what rounding does
    usual   their own; clipping and BatchNorm    the union; clipping and BatchNorm act as the
            act as the script has them           script has them; only if it has any
    twice   (none)                               the union, every sample twice: the gradient of a
                                                 sum doubles, that of a mean stays
    again   their own                            the union: what nobody has planned, such as a
                                                 random number of Python's, shows here
    later   ordinary steps, updates included: whether all ranks go on with the same gradient

A script may divide the number of its passes by the number of ranks. Then one process makes as many
as all ranks together (`all_passes`), and each gets the samples of one rank's pass, as they are.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

PART = "DDP_DOCTOR_CERTIFY"  # what a process of such a run is, as JSON
OWN, COPIES, DEAL, AGAIN, USUAL, LATER = "own", "copies", "deal", "again", "usual", "later"
TWICE = "twice"
PLAN = (OWN, COPIES, DEAL, AGAIN)
PLAN_USUAL = (OWN, COPIES, DEAL, USUAL, AGAIN)
# A loader that fetches one batch ahead has fetched the second step's before the first step ends.
PLAN_AHEAD = (OWN, LATER, COPIES, DEAL, AGAIN)
WATCHED = 16  # steps of the ranks per optimizer
AT_MOST = 100  # steps per optimizer that the rules are shown

# Files of a part, besides those that `files` names. Each is written by one process.
WORLD = "world"  # how many ranks there are
TURNS = "turns"  # how many steps of optimizers are one round of them
WEIGHTS = "weights.pt"  # rank 0's, with which one process starts
NEEDS_RANKS = "needs-ranks"  # the script expects a launcher
STARTS_RANKS = "starts-ranks"  # the script starts ranks, though a launcher has started it
WORLD_IN_SCRIPT = "world-in-script"  # one process calculates with the number of ranks
COMBINES = "combines"  # an optimizer's step calls a collective


@dataclass(frozen=True)
class Part:
    """One start of the script: as ranks, as one process, or as ranks that are only observed."""

    folder: str
    kind: Literal["ranks", "one", "observed"]
    cpu: bool = False
    at_model: bool = False  # samples are replaced where they meet weights, not where they are made
    all_passes: bool = False  # one process makes as many passes as all ranks together
    turns: int = 1  # steps of optimizers that are one step of the plan
    world: int = 1  # ranks that have to leave before nothing else is wanted; `observed` only

    @property
    def is_one(self) -> bool:
        return self.kind == "one"

    @classmethod
    def from_environment(cls) -> Self | None:
        """What the environment says; None in a process that belongs to no certificate."""
        text = os.environ.get(PART)
        return cls(**json.loads(text)) if text else None

    def environment(self) -> dict[str, str]:
        """The variable that hands this to a process and to all that it starts."""
        return {PART: json.dumps(asdict(self))}

    def path(self, name: str) -> Path:
        """A file of this part of the certificate."""
        return self.ranks_path(name) if self.kind == "ranks" else Path(self.folder, self.kind, name)

    def ranks_path(self, name: str) -> Path:
        """A file that the ranks wrote, for both parts to read.

        Ranks that start again have a folder of their own: a late one may still write to the other.
        """
        return Path(self.folder, "ranks" if self.turns == 1 else "rounds", name)

    def can_be_asked(self, process: int) -> Path:
        """A file that is there once a process can be asked where it is: a signal else ends it."""
        return self.path(f"can-be-asked.{process}")

    @property
    def journals(self) -> Path:
        """Where observed ranks write."""
        return self.path("journals")

    def leave(self, rank: int) -> None:
        """Note that a rank has done all that is wanted of it."""
        self.path(f"left.{rank}").touch()

    def is_done(self) -> bool:
        """Whether all ranks have left, so that nothing else of this start is wanted."""
        if self.kind == "observed":
            from ddp_doctor.facts.journal import read_statuses

            statuses = [journal.status for journal in read_statuses(self.journals)]
            return sum(bool(s and s.ended and s.steps) for s in statuses) >= self.world
        path = self.path(WORLD)
        world = int(path.read_text() or 0) if self.kind == "ranks" and path.exists() else 1
        return self.departures() >= max(1, world)

    def departures(self) -> int:
        """How many ranks have left."""
        return len(list(self.path("").glob("left.*")))
