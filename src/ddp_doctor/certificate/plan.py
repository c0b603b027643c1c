"""What the runs of a certificate do: which samples each of its first optimizer steps gets.

The script is usually started twice, and once more if the rules are asked; at most seven times. The
*ranks* are the script as the user runs it; *one* is the same script as a single process. Either is
started again if it needs another environment. The last start is only *observed*: it takes six
ordinary steps, or 16, and the rules say why the two differ, and what their steps do not show. No
update is kept in the steps of the plan, so all start from the same weights, and two steps differ
only in their samples. Where several optimizers take turns, a step is one round of them: the ranks
are started once more after two equal rounds, and know then how long a round is:

    step    the ranks get                        one process gets
    own     their own samples                    all of these samples (their union)
    copies  rank 0's samples, on every rank      rank 0's samples
    deal    the samples of `own`, dealt again    the union in another order: what rounding does
    usual   their own; clipping and BatchNorm    the union; clipping and BatchNorm act as the
            act as the script has them           script has them; only if it has any
    again   their own                            the union: what nobody has planned, such as a
                                                 random number of Python's, shows here
    later   ordinary steps, updates included: whether all ranks go on with the same gradient
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

PART = "DDP_DOCTOR_CERTIFY"  # what a process of such a run is, as JSON
OWN, COPIES, DEAL, AGAIN, USUAL, LATER = "own", "copies", "deal", "again", "usual", "later"
PLAN = (OWN, COPIES, DEAL, AGAIN)
PLAN_USUAL = (OWN, COPIES, DEAL, USUAL, AGAIN)
# A loader that fetches one batch ahead has fetched the second step's before the first step ends.
PLAN_AHEAD = (OWN, LATER, COPIES, DEAL, AGAIN)
TURNS = "turns"  # a file: how many steps of optimizers are one round of them
WATCHED = 16  # steps of the ranks per optimizer
AT_MOST = 100  # steps per optimizer that the rules are shown


@dataclass(frozen=True)
class Part:
    """One start of the script: as ranks, as one process, or as ranks that are only observed."""

    folder: str
    kind: Literal["ranks", "one", "observed"]
    cpu: bool = False
    late: bool = False  # samples are only replaced where they meet weights, not where they are made
    observed: int = 6  # steps that the rules look at
    turns: int = 1  # steps of optimizers that are one step of the plan

    @property
    def one(self) -> bool:
        return self.kind == "one"

    @classmethod
    def of_this_process(cls) -> Self | None:
        """What the environment says; None in a process that belongs to no certificate."""
        text = os.environ.get(PART)
        return cls(**json.loads(text)) if text else None

    def environment(self) -> dict[str, str]:
        """The variable that hands this to a process and to all that it starts."""
        return {PART: json.dumps(asdict(self))}

    def path(self, name: str) -> Path:
        """A file of this part of the certificate."""
        return Path(self.folder) / self.kind / name

    @property
    def journals(self) -> Path:
        """Where observed ranks write."""
        return self.path("journals")

    def of_ranks(self, name: str) -> Path:
        """A file that the ranks wrote, for both parts to read."""
        return Path(self.folder) / "ranks" / name
