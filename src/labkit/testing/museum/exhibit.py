"""The label of an exhibit: the kind of bug, and the invariant that catches it."""

import sys
from dataclasses import dataclass
from typing import Literal

from labkit.testing.trial import Wrap

Bug = Literal["scale", "direction", "drift", "deadlock", "phantom update", "no overlap"]


@dataclass(frozen=True)
class Exhibit:
    """A broken implementation and its label.

    `wrap` is used as `labkit.testing.trial` describes. `bug` is its kind:

    - scale: every gradient is wrong by one factor (cosine 1), so a learning rate or Adam hides it;
    - direction: gradients point in another direction (cosine < 1); no positive factor repairs that;
    - drift: replicas that should be bitwise equal are not;
    - deadlock: ranks launch different collectives, which hang or mix up two gradients;
    - phantom update: parameters move that a single process would leave alone;
    - no overlap: every gradient is right, but communication delays it.

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
        """What it does wrong: the first line of the file's docstring."""
        return (sys.modules[self.wrap.__module__].__doc__ or "").partition("\n")[0]
