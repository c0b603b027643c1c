"""What can be set on the command line, and how the doctor says a line of its own."""

import sys
from dataclasses import dataclass

FOUND, UNCHECKED = 3, 4  # exit codes of --fail-on
MOST_RANKS = 256  # that a certificate starts on this host
LEVELS = {"error": ("error",), "warning": ("error", "warning")}  # what --fail-on fails for


@dataclass(frozen=True)
class Options:
    """What can be set on the command line. `first` and `every` count optimizer steps."""

    folder: str = "ddp-doctor"
    json: str | None = None
    fail_on: str | None = None
    first: int = 6
    every: int = 50
    hang_after: float = 60.0
    quiet: bool = False
    cpu: bool = False
    leave_after: int = 0  # steps, after which a certificate's own run ends its process; 0: never

    def __post_init__(self) -> None:
        for name in ("first", "every"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: it counts optimizer steps; pass 1 or more."
                )
        if self.fail_on not in (None, *LEVELS):
            raise ValueError(f"fail_on is {self.fail_on!r}: pass one of {', '.join(LEVELS)}.")
        if not self.hang_after >= 0:
            raise ValueError(
                f"hang_after is {self.hang_after}: pass seconds, or 0 for no early reports."
            )


def say(text: str) -> None:
    """One line of the doctor's own, on standard error."""
    tell(f"ddp-doctor: {text}")


def tell(text: str) -> None:
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # standard error is closed: nobody can be told
