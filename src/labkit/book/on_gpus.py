"""What the pages say about GPUs: the report of a run on real ones, if one is stored beside them.

    python -m labkit.book.on_gpus FILE    # store it, from `python -m tests.gpu --report FILE`

A report is JSON: what a run of `tests.gpu` proved, on which card, and the steps that its profiler
saw. Stored are the report, which `{{ gpu_report }}` shows, and a figure of its timelines, which
`{{ gpu_timelines }}` shows. Without a report both say so. A rehearsal is never stored or shown.

This module is a Sphinx extension; `_config.yml` names it.
"""

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.profiling.recording import Collective, Gradient, RankRecording, Recording

if TYPE_CHECKING:  # a machine with a GPU may have no Sphinx
    from sphinx.application import Sphinx
    from sphinx.config import Config

REPORT, FIGURE = Path("reference/on_gpus.json"), Path("_static/on_gpus.svg")  # below the pages
NO_REPORT = """\
**Nothing in this book has been run on a GPU yet.** Its numbers come from processes on a CPU that \
communicate over gloo. The code for GPUs was compared with PyTorch's source line by line, and \
rehearsed on a CPU."""
NO_TIMELINES = """\
No step on a GPU has been recorded yet ([](../reference/on_gpus.md))."""


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


def substitutions(book: Path) -> dict[str, str]:
    """What `{{ name }}` stands for on the pages of `book`, as Markdown."""
    if not (book / REPORT).is_file():
        return {"gpu_report": NO_REPORT, "gpu_timelines": NO_TIMELINES}
    report = read_real(book / REPORT)
    shown = text_of_timelines(report) if (book / FIGURE).is_file() else NO_TIMELINES
    return {"gpu_report": text_of(report), "gpu_timelines": shown}


def read_real(path: Path) -> GpuReport:
    """Read a report. Raises ValueError if it is one of a rehearsal."""
    report = read(path)
    if report.rehearsal:
        raise ValueError(
            f"{path} is a rehearsal on a CPU and proves nothing about GPUs: run `python -m "
            "tests.gpu --report FILE` on a machine that has one"
        )
    return report


def text_of(report: GpuReport) -> str:
    """The report as Markdown: the card, the versions, and a table with a row for each claim."""
    counts = Counter(proof.outcome for proof in report.proofs)
    found = ", ".join(f"{counts[one]} {one}" for one in ("proved", "not proved", "FAILED"))
    versions = ", ".join(
        f"{name} {value}" for name, value in report.versions.items() if name != "GPUs"
    )
    rows = [proof._replace(part=f"`{proof.part}`") for proof in report.proofs]
    lines = [
        "| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in row) + " |"
        for row in [("part", "claim", "on", "", "found"), *rows]
    ]
    return "\n".join(
        [
            f"**Run on {report.card}** on {report.date}, in {report.seconds:.0f} s: {found}. "
            f"Versions: {versions}. The command: `{report.command}`.",
            "",
            *(lines[0], "|---|---|---|---|---|", *lines[1:]),
        ]
    )


def text_of_timelines(report: GpuReport) -> str:
    """The figure of the report's timelines, with its card, as Markdown."""
    names = " and ".join(report.timelines)
    exposed = ", ".join(
        f"{name} {1e3 * step.ranks[0].exposed_seconds():.1f} ms exposed"
        for name, step in report.timelines.items()
    )
    alt = f"One step of {names} on {report.card}: kernels above, all-reduces below; {exposed}."
    return (
        f"On **{report.card}**, torch's profiler saw these steps of two ranks ({report.date}):\n\n"
        f"![{alt}](/{FIGURE.as_posix()})"
    )


def store(file: Path, book: Path) -> None:
    """Store a report for the pages of `book`, and draw its timelines."""
    from labkit.profiling.timeline import draw_together

    report = read_real(file)
    if report.timelines:
        (book / FIGURE).parent.mkdir(exist_ok=True)
        title = f"One step of rank 0 on {report.card}"
        draw_together(report.timelines, title=title).savefig(book / FIGURE, metadata={"Date": None})
    shutil.copyfile(file, book / REPORT)


def name_the_substitutions(app: "Sphinx", config: "Config") -> None:
    """Add them to the other substitutions of the pages."""
    config.myst_substitutions = {**config.myst_substitutions, **substitutions(Path(app.srcdir))}


def setup(app: "Sphinx") -> dict[str, Any]:
    """Register the step with Sphinx."""
    # After `labkit.book.repository`, which sets the others.
    app.connect("config-inited", name_the_substitutions, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    from labkit.launch.scripts import project_root

    try:
        store(Path(sys.argv[1]), project_root() / "book")
    except (IndexError, OSError, ValueError) as problem:
        sys.exit(f"usage: python -m labkit.book.on_gpus REPORT ({problem})")
    print("Stored. Other pages speak of GPUs, too: grep -rn on_gpus.md book --include=*.md")
