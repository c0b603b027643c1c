"""What a run of `tests.gpu` proved, on which card, and the steps that it timed: one file.

The file is JSON. A report of a rehearsal says so, and cannot be stored for the book.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from labkit.profiling.recording import Collective, Gradient, RankRecording, Recording


class Proof(NamedTuple):
    """One row. `outcome` is "proved", "rehearsed", "not proved", or "FAILED"."""

    part: str
    what: str
    on: str
    outcome: str
    detail: str


@dataclass(frozen=True)
class GpuReport:
    """One run: its command, its day (ISO), its seconds, the machine, and what was found."""

    rehearsal: bool
    command: str
    date: str
    seconds: float
    versions: Mapping[str, str]
    proofs: tuple[Proof, ...]
    timelines: Mapping[str, Recording]

    @property
    def card(self) -> str:
        """The GPUs, each kind named once."""
        return ", ".join(dict.fromkeys(self.versions["GPUs"].split(", ")))

    def write(self, path: Path) -> None:
        """Write it completely or not at all, so that a killed run leaves the last one."""
        unfinished = path.with_name(path.name + ".unfinished")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(unfinished, path)


def read(path: Path) -> GpuReport:
    """Read what `GpuReport.write` wrote."""
    plain = json.loads(path.read_text())
    proofs = tuple(Proof(*proof) for proof in plain.pop("proofs"))
    steps = {
        name: Recording(tuple(_rank(**rank) for rank in step["ranks"]))
        for name, step in plain.pop("timelines").items()
    }
    return GpuReport(**plain, proofs=proofs, timelines=steps)


def _rank(forwards: Any, gradients: Any, collectives: Any, **times: Any) -> RankRecording:
    return RankRecording(
        forwards=tuple(map(tuple, forwards)),
        gradients=tuple(Gradient(*one) for one in gradients),
        collectives=tuple(Collective(*one) for one in collectives),
        **times,
    )
