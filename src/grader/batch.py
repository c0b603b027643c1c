"""Grade many submissions: several at a time, resumable, with a progress bar.

A submission that is at fault costs its own points; a fault of the grader in one submission is
written down as such and the others go on. An interrupted run continues where it stopped: a
submission is graded again only if its file or the assignment has changed, or a person had to look.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from grader.feedback import write_feedback
from grader.grade import CheckResult, Result, grade_file
from grader.report import read_results, write_csv, write_junit, write_results
from grader.sandbox import RankServer
from grader.source import Assignment, read_assignment


def find_submissions(paths: Iterable[Path]) -> dict[str, Path]:
    """{student: notebook}. A folder stands for the notebooks in it, and in the folders in it.

    A notebook is called after its file; in a folder of its own, after that folder, and after both
    where the folder holds several. Of notebooks that are named one by one, those that share a name
    are called after their folders. What begins with a dot is an editor's or a system's: skipped.
    Raises FileNotFoundError for a path that does not exist.
    """
    found: list[tuple[str, Path]] = []
    alone: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += _in_folder(path)
        elif path.exists():
            alone.append(path)
        else:
            raise FileNotFoundError(f"there is no {path}")
    counts = Counter(file.stem for file in alone)
    found += [(f.stem if counts[f.stem] == 1 else f.absolute().parent.name, f) for f in alone]
    named: dict[str, Path] = {}
    for name, file in found:
        name = _legible(name)
        while name in named:
            name += "_"
        named[name] = file
    return named


def _in_folder(top: Path) -> list[tuple[str, Path]]:
    """Each notebook in `top`, and in the folders in it, with its student's name."""
    found = [(file.stem, file) for file in _visible(top, "*.ipynb")]
    for folder in _visible(top, "*"):
        files = _visible(folder, "*.ipynb") if folder.is_dir() else []
        for file in files:
            found.append((folder.name if len(files) == 1 else f"{folder.name} {file.stem}", file))
    return found


def _visible(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))


def grade_all(
    submissions: dict[str, Path],
    source: Path,
    out: Path,
    server: RankServer,
    *,
    jobs: int | None = None,
    seed: int | None = None,
    again: bool = False,
) -> list[Result]:
    """Grade `submissions` on the assignment at `source` into `out`; one result each, by student.

    `jobs` run at a time, by default as many as there are processor cores. `again` grades anew what
    has a result already. Writes a folder with results.json and feedback.html for each student, and
    grades.csv and junit.xml for all.
    """
    assignment = read_assignment(source)
    of_assignment = _hash(source) + (f"-{seed}" if seed is not None else "")
    folders = {student: out / _folder_name(student) for student in submissions}
    results: dict[str, Result] = {}
    fingerprints = {}
    for student, path in submissions.items():
        fingerprints[student] = f"{of_assignment}-{_hash(path)}"
        earlier = None if again else read_results(folders[student])
        if earlier and earlier[1] == fingerprints[student] and not earlier[0].needs_human:
            results[student] = earlier[0]
    waiting = [student for student in submissions if student not in results]
    with (
        ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool,
        tqdm(total=len(submissions), initial=len(results), unit="submission") as bar,
    ):
        running = {
            pool.submit(_grade, submissions[s], s, assignment, server, seed): s for s in waiting
        }
        try:
            for done in as_completed(running):
                student = running[done]
                result = results[student] = done.result()
                _write(result, folders[student], fingerprints[student])
                bar.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    # The clock ran out beside others, which may be why: these get the machine for themselves.
    for student in waiting if jobs != 1 else []:
        if results[student].timed_out:
            results[student] = _grade(submissions[student], student, assignment, server, seed)
            _write(results[student], folders[student], fingerprints[student])
    ordered = [results[student] for student in submissions]
    out.mkdir(parents=True, exist_ok=True)
    write_csv(ordered, out / "grades.csv")
    write_junit(ordered, out / "junit.xml")
    return ordered


def _write(result: Result, folder: Path, fingerprint: str) -> None:
    write_results(result, folder, fingerprint)
    write_feedback(result, folder)


def _grade(
    path: Path, student: str, assignment: Assignment, server: RankServer, seed: int | None
) -> Result:
    try:
        return grade_file(path, student, assignment, server, seed=seed)
    except Exception as error:  # the grader's own fault: the next submission must not suffer
        why = f"{type(error).__name__}: {error}"
        checks = [
            CheckResult(check.name, check.points, 0, check.visible, needs_human=why)
            for check in assignment.checks
        ]
        return Result(student, assignment.name, assignment.title, 0, assignment.points, checks)


def _legible(name: str) -> str:
    """`name` without what no file, page or terminal can show."""
    name = name.encode("utf-8", "replace").decode()
    return "".join(c if c.isprintable() else "?" for c in name)


def _hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError:
        return "unreadable"


def _folder_name(student: str) -> str:
    """A name of a folder, the student's own where it can be."""
    safe = re.sub(r"[^\w .@-]", "_", student).strip(". ") or "student"
    return safe if safe == student else f"{safe}-{hashlib.sha256(student.encode()).hexdigest()[:6]}"
