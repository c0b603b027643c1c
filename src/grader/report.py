"""Results as files: Gradescope's results.json, a CSV for the course system, JUnit XML.

results.json is written for every student, with the whole result under "extra_data"; the other
files, and the feedback pages, are made from these. A check that needs a person has no score, and
neither has its submission: 0 would be a verdict.
"""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grader.grade import CheckResult, Result

RESULTS = "results.json"


def write_results(result: Result, folder: Path, fingerprint: str) -> None:
    """Write results.json into `folder`; `fingerprint` says of which file it is the result."""
    report: dict[str, Any] = {
        "output": summary(result),
        "output_format": "text",
        "visibility": "visible",
        "execution_time": round(result.seconds),
        "tests": [_gradescope_test(check) for check in result.checks],
        "extra_data": {"fingerprint": fingerprint, "result": result.as_dict()},
    }
    if not result.needs_human:
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
    lines.append(as_sentence(f"isolation: {result.isolation or 'none was in force'}"))
    return "\n".join(lines)


def sentence_of(check: CheckResult) -> str:
    """What is said of one check, for people."""
    if check.needs_human:
        return "Not judged: the grader itself failed here. A person will look at it."
    if check.score == check.points:
        return "Passed."
    where = f" ({check.where})" if check.where else ""
    about = "" if check.concept in ("", check.sentence) else f" What it checks: {check.concept}"
    return f"{as_sentence(check.sentence + where)}{about}"


def as_sentence(text: str) -> str:
    """`text` with a capital first letter and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", ")", "?", "!")) else ".")


def _gradescope_test(check: CheckResult) -> dict[str, Any]:
    test = {
        "name": check.name,
        "max_score": check.points,
        "output": sentence_of(check),
        "visibility": "visible",
    }
    if not check.needs_human:
        test["score"] = check.score
        test["status"] = "passed" if check.score == check.points else "failed"
    return test


def write_csv(results: Iterable[Result], path: Path) -> None:
    """One line a student: score, points, each check, whether a person has to look, and at what."""
    results = list(results)
    names = list(dict.fromkeys(check.name for result in results for check in result.checks))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        head = ["student", "assignment", "score", "points", *names, "needs_human", "notes"]
        writer.writerow(head)
        for result in results:
            of = {check.name: "" if check.needs_human else check.score for check in result.checks}
            score = "" if result.needs_human else result.score
            row = [_harmless(result.student), result.assignment, score, result.points]
            row += [of.get(name, "") for name in names]
            writer.writerow([*row, result.needs_human, "; ".join(result.notes)])


def _harmless(text: str) -> str:
    """A name that a spreadsheet would take for a formula, as text."""
    return f"'{text}" if text[:1] in "=+-@\t\r" else text


def write_junit(results: Iterable[Result], path: Path) -> None:
    """One suite a student, one case a check; what needs a person is an error, not a failure."""
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
