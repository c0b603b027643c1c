"""Results as files: Gradescope's results.json, a table for the course, a page for the student.

results.json is written for every student, with the whole result under "extra_data"; the table is
made from these. A check that needs a person has no score, so its submission has none.
"""

import csv
import hashlib
import io
import json
import os
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from grader.grade import CheckResult, Result

_LONGEST_CELL = 8_000  # characters; a spreadsheet takes 32,767
OVERRIDES = ("override", "override_reason")
RESULTS, PAGE, TABLE = "results.json", "feedback.html", "grades.csv"


def write_results(result: Result, folder: Path, fingerprint: str) -> None:
    """Write results.json into `folder`; `fingerprint` identifies the graded file."""
    report: dict[str, Any] = {
        "output": summary(result),
        "output_format": "text",
        "visibility": "visible",
        "execution_time": round(sum(check.seconds for check in result.checks)),
        "tests": [_gradescope_test(check) for check in result.checks],
        "extra_data": {"fingerprint": fingerprint, "result": asdict(result)},
    }
    if not result.needs_human:
        report["score"] = result.score
    write_whole(folder / RESULTS, json.dumps(report, indent=1, ensure_ascii=True))


def write_whole(path: Path, text: str) -> None:
    """Renamed into place: an interrupted run leaves a whole file, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.part")
    try:
        unfinished.write_text(text, encoding="utf-8", errors="replace", newline="")
        unfinished.replace(path)
    except BaseException:  # such as a full disk
        unfinished.unlink(missing_ok=True)
        raise


def read_results(folder: Path) -> tuple[Result, str] | None:
    """The result in `folder` and its fingerprint; None if there is no whole one."""
    try:
        extra = json.loads((folder / RESULTS).read_text(encoding="utf-8"))["extra_data"]
        checks = [CheckResult(**check) for check in extra["result"]["checks"]]
        return Result(**extra["result"] | {"checks": checks}), extra["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def summary(result: Result) -> str:
    """What stands above the checks."""
    lines = ["The grader could not finish. A person will look at this."] * result.needs_human
    if result.unreadable:
        lines.append(as_sentence(f"nothing could be graded: {result.unreadable}"))
    lines += [as_sentence(f"note: {note}") for note in (*result.notes, result.warning) if note]
    return "\n".join(lines)


def sentence_of(check: CheckResult) -> str:
    """What is said of one check, for people."""
    if check.needs_human:
        return "Not judged: the grader itself failed here. A person will look at it."
    if check.score >= check.points:
        return "Passed."
    parts = [as_sentence(check.sentence)]
    if check.observation:
        parts.append(as_sentence(check.observation))
    if check.line:
        parts.append(f"Your line: {printable(check.line)}")
    if check.concept not in ("", check.sentence):
        parts.append(f"What it checks: {check.concept}")
    return " ".join(parts)


def as_sentence(text: str) -> str:
    """`text` as it can be shown, with a capital first letter and a full stop."""
    text = printable(text)
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", ")", "?", "!")) else ".")


def _gradescope_test(check: CheckResult) -> dict[str, Any]:
    test = {
        "name": check.name,
        "max_score": check.points,
        "output": sentence_of(check),
        # Hidden checks stay hidden until grades are published.
        "visibility": "visible" if check.visible else "after_published",
    }
    if not check.needs_human:
        test["score"] = check.score
        test["status"] = "passed" if check.score >= check.points else "failed"
    return test


def write_feedback(result: Result, folder: Path) -> None:
    """Write feedback.html into `folder`: one file, no script, nothing loaded from elsewhere."""
    # Whatever a student wrote is text here: everything is escaped.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("feedback.html.j2")
    page = template.render(result=result, sentence_of=sentence_of, as_sentence=as_sentence)
    write_whole(folder / PAGE, page)


def write_csv(results: Iterable[Result], path: Path) -> None:
    """One line per student: score, points, each check, the reasons, and notes.

    What a person wrote into the columns `override` and `override_reason` of the table that is there
    is kept.
    """
    results = list(results)
    names = list(dict.fromkeys(check.name for result in results for check in result.checks))
    head = ["student", "id", "assignment", "score", "points", *names]
    head += ["needs_human", "reasons", "notes", "warning", *OVERRIDES]
    kept = _overrides(path)
    table = io.StringIO()
    writer = csv.writer(table, quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow(head)
    for result in results:
        of = {c.name: "" if c.needs_human else c.score for c in result.checks}
        score = "" if result.needs_human else result.score
        row = [result.student, result.id, result.assignment, score, result.points]
        row += [of.get(name, "") for name in names]
        row += [result.needs_human, reasons(result), "; ".join(result.notes), result.warning]
        row += kept.get(as_text(result.student), ("", ""))
        writer.writerow([as_text(cell) if isinstance(cell, str) else cell for cell in row])
    write_whole(path, table.getvalue())


def _overrides(path: Path) -> dict[str, tuple[str, ...]]:
    """By student: the points that a person gave instead of the score, and why."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, restval="")
        return {row["student"]: tuple(row.get(name, "") for name in OVERRIDES) for row in rows}


def reasons(result: Result) -> str:
    """Why each check without its points has none, and why a person is needed; one line."""
    if result.unreadable:
        return result.unreadable
    words = []
    for check in result.checks:
        if check.needs_human:
            words.append(f"{check.name}: needs a person: {check.needs_human}")
        elif check.score < check.points:
            words.append(f"{check.name}: {check.sentence} {check.observation}".rstrip())
    return " | ".join(words)


def as_text(text: str) -> str:
    """`text` as one line that no spreadsheet calculates.

    A spreadsheet takes a cell for a formula by its first character, and one that does not follow
    quotes may cut a cell at a separator. So no quote remains, and no formula begins anywhere. What
    a terminal would obey is a "?", and a cell is no longer than a spreadsheet takes.
    """
    line = printable(" ".join(text.replace('"', "'").split()))
    line = line if len(line) <= _LONGEST_CELL else f"{line[: _LONGEST_CELL - 1]}…"
    plain = unicodedata.normalize("NFKC", line)
    begins = re.search(r"(^|[;,|])[\s']*([=+@]|-(?!\s*\d[\d.]*\s*$))", plain)
    return f"'{re.sub('[;|]', ' ', line)}" if begins else line


def printable(text: str) -> str:
    """`text` without what a terminal or a page would obey, such as escape sequences."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def folder_name(student: str) -> str:
    """The name of a student's folder: the student's own name where it can be."""
    safe = re.sub(r"[^\w .@-]", "_", student).strip(". ")[:80] or "student"
    try:
        os.fsencode(safe)
    except UnicodeEncodeError:  # a C locale
        safe = safe.encode("ascii", "replace").decode().replace("?", "_")
    looks_added = re.search(r"-[0-9a-f]{6}$", safe)  # nobody's name is another's with its digest
    if safe == student and safe.casefold() not in (TABLE, f"{TABLE}.part") and not looks_added:
        return safe
    return f"{safe}-{hashlib.sha256(student.encode(errors='replace')).hexdigest()[:6]}"
