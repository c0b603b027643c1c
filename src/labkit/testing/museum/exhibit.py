"""The label of an exhibit."""

import sys
from dataclasses import dataclass
from typing import Literal

from labkit.testing.trial import Wrap

Bug = Literal["scale", "direction", "drift", "deadlock", "phantom update", "no overlap"]


@dataclass(frozen=True)
class Exhibit:
    """A broken implementation and its label.

    `wrap` is used as `labkit.testing.trial` describes. `bug` names the kind:

    - scale: every gradient is wrong by one factor (cosine 1), so a learning rate or Adam hides it;
    - direction: gradients have another direction (cosine < 1), and no factor repairs them;
    - drift: replicas that should be bitwise equal are not;
    - deadlock: ranks launch different collectives, which hang or mix up two gradients;
    - phantom update: parameters change that a single process would not change;
    - no overlap: every gradient is right, but late.

    `caught_by` names the function of `labkit.testing.invariants` that rejects it, on at least
    `ranks_needed` ranks.
    """

    wrap: Wrap
    bug: Bug
    caught_by: str
    ranks_needed: int = 2

    @property
    def name(self) -> str:
        """The name of the exhibit's file."""
        return self.wrap.__module__.rpartition(".")[2]

    @property
    def title(self) -> str:
        """What it does wrong, in one line: the first line of the file's docstring."""
        return (sys.modules[self.wrap.__module__].__doc__ or "").partition("\n")[0]
