"""The report: on the terminal, in a file, and as JSON."""

import json
import shutil
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_doctor.explain.answers import with_answers
from ddp_doctor.explain.findings import HANGS, ORDER, Finding, Prediction, to_read
from ddp_doctor.explain.observed import DIVISION, Observed, observed
from ddp_doctor.explain.rules import examine
from ddp_doctor.explain.steps import steps_of
from ddp_doctor.facts.certificate import Certificate
from ddp_doctor.facts.journal import alive, read, write_whole
from ddp_doctor.facts.merged import Run
from ddp_doctor.facts.places import shown
from ddp_doctor.options import Options, say, tell

VERSION = 2
NOTHING = (
    "ddp-doctor: no rank was observed: no process joined a group, wrapped a model, or took an "
    "optimizer step.\nIf the script trains in processes that another program starts, put this on "
    "their first line: import ddp_doctor; ddp_doctor.watch()"
)


@dataclass
class Report:
    """What the doctor says about a run, and what it has measured, if it has."""

    run: Run
    observed: Observed
    findings: list[Finding]
    certificate: Certificate | None = None

    @property
    def worst(self) -> str | None:
        return min((f.severity for f in self.findings), key=lambda s: ORDER[s], default=None)

    def verdict(self) -> dict[str, Any]:
        """What --fail-on needs."""
        return {
            "worst": self.worst,
            "unchecked": self.run.not_checked if self.run.ranks else ["no rank was observed"],
        }

    def as_json(self) -> dict[str, Any]:
        """A plain dict; see `VERSION`."""
        fields = ("code", "severity", "title", "evidence", "where", "fix", "page", "answer")
        certified = {"certificate": self.certificate.as_json()} if self.certificate else {}
        return certified | {
            "version": VERSION,
            "findings": [
                {name: getattr(finding, name) for name in fields}
                | ({"predicts": asdict(finding.predicts)} if finding.predicts else {})
                for finding in self.findings
            ],
            "measured": {
                line.name: {"text": line.text, **line.values} for line in self.observed.lines
            },
            "not_measured": self.not_measured,
            "ranks": [
                {"rank": r.rank, "steps": r.steps, "ended": r.end is not None, "error": r.error}
                for r in self.run.ranks
            ],
            "unchecked": self.run.not_checked,
            "steps": {"taken": self.run.steps, "observed": len(self.run.windows)},
            "notes": self.run.notes,
        }

    @property
    def not_measured(self) -> list[str]:
        """What the lines do not tell."""
        found = list(self.observed.unmeasured)
        if self.certificate is None and self.observed.lines:
            found.append(DIVISION + " (--certify measures it)" * (self.run.world > 1))
        return found

    @property
    def conclusion(self) -> list[str]:
        """What was not checked, and what was not measured; each a paragraph."""
        said = []
        if self.run.not_checked:
            said.append(f"Not everything was checked: {'; '.join(self.run.not_checked)}.")
        if self.not_measured:
            said.append(f"Not measured: {'; '.join(self.not_measured)}.")
        wrong = self.certificate is not None and self.certificate.verdict in ("scaled", "different")
        if wrong and all(one.answer.startswith("contradicted") for one in self.findings):
            said.append("No rule names the cause.")
        return said

    def as_text(self, width: int = 100) -> str:
        """All of it; a line has at most `width` characters, which is at least 60."""
        width = max(60, min(width, 110))
        head = "ddp-doctor, a report so far: " if self.run.hung else "ddp-doctor: "
        head += f"{len(self.run.ranks)} of {self.run.world} ranks, "
        head += f"{self.run.steps} optimizer steps, {len(self.run.windows)} observed"
        out = ["─" * width, head, ""]
        for line in self.observed.lines:
            first = f"  {line.name:<10} "
            out += textwrap.wrap(line.text, width, initial_indent=first, subsequent_indent=" " * 13)
        for finding in self.findings:
            out += _block(finding, width)
        for said in self.conclusion:
            out += ["", *textwrap.wrap(said, width)]
        for note in self.run.notes:
            out += textwrap.wrap(note, width)
        return "\n".join([*out, "─" * width])


def _block(finding: Finding, width: int) -> list[str]:
    def part(name: str, text: str) -> list[str]:
        return textwrap.wrap(
            text, width, initial_indent=f"    {name:<6}", subsequent_indent=" " * 10
        )

    if finding.severity == "note":
        said = f"note [{finding.code}] {finding.evidence}"
        said += f" Under --certify: {finding.answer}." if finding.answer else ""
        return ["", *textwrap.wrap(said, width, subsequent_indent="    ")]
    out = ["", f"{finding.severity.upper()} {finding.title} [{finding.code}]"]
    out += part("seen", finding.evidence)
    if finding.predicts is not None and not finding.answer:
        out += part("then", _predicted(finding.predicts))
    if finding.answer:
        out += part("proof", f"{finding.answer}.")
    if finding.where:
        out += part("where", finding.where)
    out += part("fix", finding.fix)
    return [*out, *part("read", to_read(finding.page))]


def _predicted(predicts: Prediction) -> str:
    """What has to be measured if the hint is the cause."""
    if predicts.outside:
        return f"--certify does not measure this: {predicts.outside}."
    kind = "" if predicts.ratio is None else " times that of one process"
    head = "If so, one process has " if predicts.ratio is None else "If so, the gradient is "
    return f"{head}{predicts.said}{kind}. Not measured here; --certify measures it."


def make_report(folder: Path, live: bool = False, certificate: Certificate | None = None) -> Report:
    """Read the journals of a run and examine them. Pure apart from reading.

    `live`: the run goes on, and no rank makes progress. Only then a process of another host that
    has not ended counts as alive. `certificate`: it answers the hints.
    """
    journals = read(folder)
    living = {
        journal.name
        for journal in journals
        if (alive(journal.pid) if journal.here else live and not journal.ended)
    }
    run = Run.of(journals, living, live)
    steps = steps_of(run)
    findings = examine(run, steps)
    if certificate is not None:
        findings = with_answers(certificate, findings)
    for rank in run.ranks:
        for fact in rank.facts["failed"]:
            run.notes.append(f"The doctor stopped on rank {rank.rank}: {fact['error']}{fact['at']}")
    replaced = [fact["name"] for rank in run.ranks for fact in rank.facts["cpu"]]
    if replaced and certificate is None:
        run.notes.append(f"--cpu replaced: {', '.join(dict.fromkeys(replaced))}.")
    return Report(run, observed(run, steps), findings, certificate)


def report(run_folder: Path, options: Options, live: bool = False, waited: bool = False) -> Report:
    """Merge, print, and write the files. What cannot be written is said in one line.

    `live`: ranks seem stuck (see `make_report`). `waited`: there was one before.
    """
    result = make_report(run_folder, live)
    if waited and not HANGS & {finding.code for finding in result.findings}:
        result.run.notes.append(
            f"Ranks made no progress for {options.hang_after:g} s, then continued: ignore the hang "
            "report above."
        )
    silent = options.quiet and not result.findings and not waited
    if not result.run.ranks and not (silent or _left_early(run_folder)):
        tell(NOTHING)
    write_report(result, options, run_folder.parent.parent, silent)
    return result


def write_report(result: Report, options: Options, folder: Path, silent: bool = False) -> None:
    """Print a report, and write its files. `silent`: print only what cannot be written."""
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 110))
    texts = [result.certificate.as_text(width)] if result.certificate is not None else []
    texts += [result.as_text(width)] if result.run.ranks else []
    if not silent:
        for text in texts:
            tell(text)
    path = folder / "report.txt"
    if texts and _write(path, "\n".join(texts) + "\n") and not silent:
        say(shown(str(path)))
    if options.json:
        _write(Path(options.json), json.dumps(result.as_json(), indent=2) + "\n")


def _write(path: Path, text: str) -> bool:
    """Whether it could be written; if not, one line says so."""
    try:
        write_whole(path, text)
    except OSError as error:
        say(f"could not write {path} ({error}).")
        return False
    return True


def _left_early(run_folder: Path) -> bool:
    """Whether an exception ended a process, SystemExit included: --help, an argument, an import."""
    return any(end["raised"] for journal in read(run_folder) for end in journal.facts["end"])
