"""The report of a run: Markdown for the page on GPUs, and a figure of the steps that it timed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from labkit.profiling.recording import Recording


class Proof(NamedTuple):
    """One row. `outcome` is "proved", "rehearsed", "not proved", or "FAILED"."""

    part: str
    what: str
    on: str
    outcome: str
    detail: str


class Run(NamedTuple):
    """A run: its command, its day (ISO), its seconds, and the machine's versions and GPUs."""

    rehearsal: bool
    command: str
    date: str
    seconds: float
    versions: Mapping[str, str]

    @property
    def card(self) -> str:
        """The GPUs, each kind named once."""
        return ", ".join(dict.fromkeys(self.versions["GPUs"].split(", ")))


def markdown(run: Run, proofs: Sequence[Proof]) -> str:
    """The card, the versions, and a table with a row for each claim. A rehearsal says so."""
    counts = Counter(proof.outcome for proof in proofs)
    found = ", ".join(f"{counts[one]} {one}" for one in ("proved", "not proved", "FAILED"))
    versions = ", ".join(f"{name} {one}" for name, one in run.versions.items() if name != "GPUs")
    rows = [proof._replace(part=f"`{proof.part}`") for proof in proofs]
    head, *lines = [
        "| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in row) + " |"
        for row in [("part", "claim", "on", "", "found"), *rows]
    ]
    on = f"Run on {run.card}"
    if run.rehearsal:
        on = "A rehearsal on a CPU: nothing here was proved on a GPU"
    first = (
        f"**{on}** on {run.date}, in {run.seconds:.0f} s: {found}. Versions: {versions}. "
        f"The command: `{run.command}`."
    )
    return "\n".join([first, "", head, "|---|---|---|---|---|", *lines, ""])


def of_timelines(run: Run, timelines: Mapping[str, Recording], figure: Path) -> str:
    """Draw the steps of rank 0 into `figure`, an SVG; the Markdown that shows it."""
    from labkit.profiling.timeline import draw_together  # matplotlib takes a second to load

    title = f"One step of rank 0 on {run.card}"
    draw_together(timelines, title=title).savefig(figure, metadata={"Date": None})
    exposed = ", ".join(
        f"{name} {1e3 * step.ranks[0].exposed_seconds():.1f} ms exposed"
        for name, step in timelines.items()
    )
    names = " and ".join(timelines)
    alt = f"One step of {names} on {run.card}: computation above, all-reduces below; {exposed}."
    timed = f"On **{run.card}**, events of the GPU timed a step of two ranks ({run.date}):"
    return f"\n{timed}\n\n![{alt}](/_static/{figure.name})\n"
