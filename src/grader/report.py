"""Results as files: Gradescope's results.json, tables for the course, JUnit XML.

results.json is written for every student, with the whole result under "extra_data"; the other
files, and the feedback pages, are made from these. A check that needs a person has no score, so its
submission has none. A student who handed in nothing has none either: 0 would be a verdict. A person
can set these scores.
"""

import csv
import hashlib
import json
import os
import re
import statistics
import unicodedata
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grader.grade import CheckResult, Result

RESULTS = "results.json"
_TABLES = ("grades.csv", "statistics.csv", "junit.xml")
_TAKEN = {f"{name}{end}" for name in _TABLES for end in ("", ".part")}
_FORMULA = re.compile(r"(^|[;,\t\r\n|])\s*['\"]?([=+@]|-(?!\s*\d[\d.]*\s*$))")


def write_results(result: Result, folder: Path, fingerprint: str) -> None:
    """Write results.json into `folder`; `fingerprint` identifies the graded file."""
    report: dict[str, Any] = {
        "output": summary(result),
        "output_format": "text",
        "visibility": "visible",
        "execution_time": round(result.seconds),
        "tests": [_gradescope_test(check) for check in result.checks],
        "extra_data": {"fingerprint": fingerprint, "result": result.as_dict()},
    }
    if result.has_score:
        report["score"] = result.score
    folder.mkdir(parents=True, exist_ok=True)
    # Renamed into place: an interrupted run leaves a whole file, or none.
    unfinished = folder / f"{RESULTS}.part"
    unfinished.write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")
    unfinished.replace(folder / RESULTS)


def read_results(folder: Path) -> tuple[Result, str] | None:
    """The result in `folder` and its fingerprint; None if there is no whole one."""
    try:
        extra = json.loads((folder / RESULTS).read_text(encoding="utf-8"))["extra_data"]
        raw = dict(extra["result"])
        raw.pop("needs_human")
        checks = [CheckResult(**check) for check in raw.pop("checks")]
        return Result(**raw, checks=checks), extra["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def summary(result: Result) -> str:
    """What stands above the checks: load errors first, because other losses follow from them."""
    lines = []
    if result.needs_human:
        lines.append("The grader could not finish. A person will look at this.")
    if result.unreadable:
        lines.append(as_sentence(f"nothing could be graded: {result.unreadable}"))
    lines += [as_sentence(f"first of all: {error}") for error in result.load_errors]
    lines += [as_sentence(f"note: {note}") for note in [*result.repairs, *result.notes]]
    if result.changed:
        lines.append(as_sentence(result.changed))
    if result.comment:
        lines.append(f"A person's comment: {result.comment}")
    if result.warning:
        lines.append(as_sentence(f"note: {result.warning}"))
    if result.missing:
        lines.append("Nothing was handed in.")
    else:
        lines.append(as_sentence(f"isolation: {result.isolation or 'none was in force'}"))
    return "\n".join(lines)


def sentence_of(check: CheckResult) -> str:
    """What is said of one check, for people."""
    if check.set_to is not None:
        return f"A person set this to {check.set_to:g} points."
    if check.needs_human:
        return "Not judged: the grader itself failed here. A person will look at it."
    if check.score >= check.points:
        return "Passed."
    where = f" ({check.where})" if check.where else ""
    about = "" if check.concept in ("", check.sentence) else f" What it checks: {check.concept}"
    line = f" Your line: {check.line}" if check.line else ""
    return f"{as_sentence(check.sentence + where)}{line}{about}"


def as_sentence(text: str) -> str:
    """`text` with a capital first letter and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", ")", "?", "!")) else ".")


def _gradescope_test(check: CheckResult) -> dict[str, Any]:
    test = {
        "name": check.name,
        "max_score": check.points,
        "output": sentence_of(check),
        # Hidden checks stay hidden until grades are published.
        "visibility": "visible" if check.visible else "after_published",
    }
    if not check.needs_human or check.set_to is not None:
        test["score"] = score_of(check)
        test["status"] = "passed" if score_of(check) >= check.points else "failed"
    return test


def score_of(check: CheckResult) -> float:
    """What a check earned, or what a person has set."""
    return check.score if check.set_to is None else check.set_to


def reasons(result: Result) -> str:
    """Why each check without its points has none, and why a person is needed; one line."""
    if result.missing:
        return "nothing was handed in"
    if result.unreadable:
        return result.unreadable
    words = []
    for check in result.checks:
        if check.needs_human:
            words.append(f"{check.name}: needs a person: {check.needs_human}")
        elif check.score < check.points:
            words.append(f"{check.name}: {check.sentence}")
    return " | ".join(words)


def write_csv(results: Iterable[Result], path: Path) -> None:
    """One line per student: score, points, each check, the reasons, and what people said."""
    results = list(results)
    names = list(dict.fromkeys(check.name for result in results for check in result.checks))
    rows = []
    for result in results:
        of = {
            check.name: "" if check.needs_human and check.set_to is None else score_of(check)
            for check in result.checks
        }
        score = result.score if result.has_score else ""
        row = [result.student, result.id, result.assignment, score, result.points]
        row += [of.get(name, "") for name in names]
        row += [result.needs_human, reasons(result), "; ".join([*result.repairs, *result.notes])]
        rows.append([*row, result.warning, result.late_days, result.changed, result.comment])
    head = ["student", "id", "assignment", "score", "points", *names]
    head += ["needs_human", "reasons", "notes", "warning", "late_days", "changed", "comment"]
    _write_table(path, head, rows)


def write_statistics(results: Iterable[Result], path: Path) -> None:
    """One line per check: how many took, passed and lost it, and the reason given most often."""
    checks: dict[str, list[CheckResult]] = {}
    for result in results:
        if not result.unreadable and not result.missing:
            for check in result.checks:
                checks.setdefault(check.name, []).append(check)
    rows = []
    for name, every in checks.items():
        judged = [check for check in every if not check.needs_human]
        passed = sum(check.score >= check.points for check in judged)
        lost = Counter(check.sentence for check in judged if check.score < check.points)
        common = lost.most_common(1)[0] if lost else ("", 0)
        seconds = statistics.median([check.seconds for check in every])
        share = round(passed / len(judged), 3) if judged else ""
        row = [name, len(every), passed, len(judged) - passed, len(every) - len(judged), share]
        rows.append([*row, common[1], common[0], seconds])
    head = ["check", "submissions", "passed", "lost", "needs_human", "share_passed"]
    head += ["most_often", "most_often_said", "median_seconds"]
    _write_table(path, head, rows)


def _write_table(path: Path, head: list[str], rows: list[list[Any]]) -> None:
    unfinished = path.with_name(f"{path.name}.part")
    with unfinished.open("w", encoding="utf-8", newline="") as file:
        # Texts in quotes, so that a spreadsheet that separates by semicolons sees one cell, too.
        writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(head)
        for row in rows:
            writer.writerow([harmless(cell) if isinstance(cell, str) else cell for cell in row])
    unfinished.replace(path)


def harmless(text: str) -> str:
    """`text` as one line that no spreadsheet takes for a formula, wherever it cuts it."""
    line = " ".join(text.split())
    plain = unicodedata.normalize("NFKC", text)
    return f"'{line}" if any(map(_FORMULA.search, (text, plain))) else line


def folder_name(student: str) -> str:
    """The name of a student's folder: the student's own name where it can be."""
    safe = re.sub(r"[^\w .@-]", "_", student).strip(". ")[:80] or "student"
    try:
        os.fsencode(safe)
    except UnicodeEncodeError:  # a C locale
        safe = safe.encode("ascii", "replace").decode().replace("?", "_")
    if safe == student and safe.casefold() not in _TAKEN:
        return safe
    return f"{safe}-{hashlib.sha256(student.encode()).hexdigest()[:6]}"


def write_junit(results: Iterable[Result], path: Path) -> None:
    """One suite per student, one case per check; what needs a person is an error, not a failure."""
    root = ElementTree.Element("testsuites")
    for result in results:
        lost = sum(check.score < check.points and not check.needs_human for check in result.checks)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=_printable(result.student),
            tests=str(len(result.checks)),
            failures=str(lost),
            errors=str(sum(bool(check.needs_human) for check in result.checks)),
            time=f"{result.seconds:.2f}",
        )
        for check in result.checks:
            case = ElementTree.SubElement(
                suite, "testcase", classname=result.assignment, name=check.name
            )
            if check.needs_human:
                ElementTree.SubElement(case, "error", message=_printable(check.needs_human))
            elif check.score < check.points:
                ElementTree.SubElement(case, "failure", message=_printable(sentence_of(check)))
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _printable(text: str) -> str:
    """Without the control characters that XML does not allow."""
    return "".join(c if c in "\n\t" or (c.isprintable() and c < "\ufffe") else "?" for c in text)
