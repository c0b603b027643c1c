"""Samples for losses that do not split into terms of single samples: how they are dealt.

The promise is the loss of the union batch. So a trainer is compared with itself, in one process
with all samples: `alone`, which is no column.
"""

from typing import NamedTuple

SAMPLES = 12


class Deal(NamedTuple):
    """Which samples each rank gets, in each of so many steps. The first one is judged."""

    ranks: tuple[tuple[int, ...], ...]
    base: str = "alone"
    windows: int = 1

    @property
    def world(self) -> int:
        return len(self.ranks)

    judged = 0

    def factors(self) -> dict[str, float]:
        """What a ratio may be called besides powers of W."""
        return {}


ALL = tuple(range(SAMPLES))
HALF = SAMPLES // 2
UNION_CASES = {
    "alone": Deal((ALL,), ""),
    "W=2": Deal((ALL[:HALF], ALL[HALF:])),
    "mixed": Deal((ALL[::2], ALL[1::2])),
    "W=3": Deal((ALL[::3], ALL[1::3], ALL[2::3])),
}
