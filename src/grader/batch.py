"""Grade many submissions: several at a time, resumable, with a progress bar.

A submission that is at fault costs its own points; a fault of the grader in one submission is
written down as such and the others go on. An interrupted run keeps what is finished and continues
where it stopped: a submission is graded again only if its file or the assignment has changed, or a
person had to look. Results of students who are not in this run stay.
"""

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from grader.feedback import PAGE, write_feedback
from grader.grade import CheckResult, Result, grade_many
from grader.judge import StoppedError
from grader.merge import Submission, read_submission
from grader.notebook_file import hash_of
from grader.report import (
    RESULTS,
    folder_name,
    read_results,
    write_csv,
    write_junit,
    write_results,
    write_statistics,
)
from grader.sandbox import RankServer
from grader.source import Assignment, read_assignment
from grader.submissions import HandedIn

_AT_ONCE = 20  # submissions that share one run of nbval
_LATE = "the course system says that it is late"


def grade_all(
    submissions: dict[str, HandedIn],
    source: Path,
    out: Path,
    server: RankServer,
    *,
    jobs: int | None = None,
    seed: int | None = None,
    again: bool = False,
    finish: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Grade `submissions` on the assignment at `source` into `out`; one result each, by student.

    `jobs` run at a time, by default as many as there are processor cores. `again` also grades what
    has a result already. `finish` may change a result before it is written. Writes a folder with
    results.json and feedback.html for each student as soon as that is graded, and the tables of all
    at the end, also when the run is interrupted.
    """
    assignment = read_assignment(source)
    of_assignment = hash_of(source) + (f"-{seed}" if seed is not None else "")
    results: dict[str, Result] = {}
    fingerprints = {}
    for student, one in submissions.items():
        fingerprints[student] = f"{of_assignment}-{hash_of(one.path)}"
        earlier = None if again else read_results(out / folder_name(student))
        if earlier and earlier[1] == fingerprints[student]:
            result = _about(earlier[0], one)
            finish(result)  # what a person has decided is not graded again
            if not result.needs_human:
                results[student] = result
    waiting = [submissions[student] for student in submissions if student not in results]

    def keep(result: Result) -> None:
        student = result.student
        results[student] = _about(result, submissions[student])

    def write(result: Result) -> None:
        finish(result)
        folder = out / folder_name(result.student)
        write_results(result, folder, fingerprints[result.student])
        write_feedback(result, folder)

    for result in results.values():
        write(result)
    try:
        with tqdm(total=len(submissions), initial=len(results), unit="submission") as bar:
            for result in _graded(waiting, assignment, server, jobs or os.cpu_count() or 1, seed):
                keep(result)
                write(results[result.student])
                bar.set_postfix_str(result.student[:20], refresh=False)
                bar.update()
    finally:
        _remove_stale(out, assignment.name)
        write_tables(out, assignment.name)
    return [results[student] for student in submissions]


def write_tables(out: Path, assignment: str) -> list[Result]:
    """The tables of everything in `out` that belongs to `assignment`; returns the results."""
    out.mkdir(parents=True, exist_ok=True)
    results = list(read_all(out, assignment).values())
    results.sort(key=lambda result: result.student.casefold())
    write_csv(results, out / "grades.csv")
    write_statistics(results, out / "statistics.csv")
    write_junit(results, out / "junit.xml")
    return results


def read_all(out: Path, assignment: str) -> dict[Path, Result]:
    """The results in `out` that belong to `assignment`, by their folders."""
    folders = sorted(path for path in out.iterdir() if path.is_dir()) if out.is_dir() else []
    every = {folder: read_results(folder) for folder in folders}
    return {
        folder: found[0]
        for folder, found in every.items()
        if found and found[0].assignment == assignment
    }


def _remove_stale(out: Path, assignment: str) -> None:
    """Remove the row of each missing student who has handed in since, under another name."""
    results = read_all(out, assignment)
    present = _known(result for result in results.values() if not result.missing)
    for folder, result in results.items():
        if result.missing and present & _known([result]):
            (folder / RESULTS).unlink()
            (folder / PAGE).unlink(missing_ok=True)
            with suppress(OSError):  # it holds other files, too
                folder.rmdir()


def _about(result: Result, one: HandedIn) -> Result:
    result.id, result.warning = one.id, one.warning
    if one.late and not result.late_days and _LATE not in result.notes:
        result.notes = [*result.notes, _LATE]
    return result


def _graded(
    waiting: list[HandedIn],
    assignment: Assignment,
    server: RankServer,
    jobs: int,
    seed: int | None,
) -> Iterator[Result]:
    """The results as they come, from up to `jobs` threads, each with one run of nbval at a time."""
    # No more runs than needed: to start one takes as much processor time as to grade a submission.
    each = max(1, min(_AT_ONCE, -(-len(waiting) // jobs)))
    parts: queue.SimpleQueue[list[HandedIn]] = queue.SimpleQueue()
    for first in range(0, len(waiting), each):
        parts.put(waiting[first : first + each])
    done: queue.SimpleQueue[Result | None] = queue.SimpleQueue()
    stop = threading.Event()

    def work() -> None:
        try:
            while not stop.is_set():
                for result in _grade_part(parts.get_nowait(), assignment, server, seed, stop):
                    done.put(result)
        except (queue.Empty, StoppedError):
            pass
        finally:
            done.put(None)

    threads = [threading.Thread(target=work) for _ in range(min(jobs, len(waiting)))]
    for thread in threads:
        thread.start()
    try:
        running = len(threads)
        while running:
            result = done.get()
            if result is None:
                running -= 1
            else:
                yield result
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _grade_part(
    part: list[HandedIn],
    assignment: Assignment,
    server: RankServer,
    seed: int | None,
    stop: threading.Event,
) -> Iterator[Result]:
    left, read = [], []
    for one in part:
        try:
            read.append((one.student, _read(one, assignment)))
            left.append(one)
        except Exception as error:  # the grader's own fault: the next submissions must not suffer
            yield _failed(one.student, assignment, f"{type(error).__name__}: {error}")
    try:
        for result in grade_many(read, assignment, server, seed=seed, stop=stop):
            left.pop(0)
            yield result
    except StoppedError:
        raise
    except Exception as error:
        for one in left:
            yield _failed(one.student, assignment, f"{type(error).__name__}: {error}")


def _read(one: HandedIn, assignment: Assignment) -> Submission:
    if one.path.suffix != ".ipynb" or one.path.is_dir():
        why = one.warning or f"{one.path.name} is not a notebook"
        return Submission(assignment.stubs(), unreadable=why)
    return read_submission(one.path, assignment)


def _failed(student: str, assignment: Assignment, why: str) -> Result:
    checks = [
        CheckResult(check.name, check.points, 0, check.visible, needs_human=why)
        for check in assignment.checks
    ]
    return Result(student, assignment.name, assignment.title, 0, assignment.points, checks)


def missing(
    roster: Iterable[dict[str, str]],
    found: dict[str, HandedIn],
    source: Path,
    earlier: Iterable[Result] = (),
) -> list[Result]:
    """A result without a score for each student of the roster who handed in nothing.

    `found` is what was handed in for this run, `earlier` holds the results of other runs.
    """
    assignment = read_assignment(source)
    present = _known([*found.values(), *(result for result in earlier if not result.missing)])
    results = []
    for row in roster:
        name, number = row.get("student", ""), row.get("id", "")
        result = Result(name, assignment.name, assignment.title, 0, assignment.points, [])
        result.id, result.missing = number, True
        if not present & _known([result]):
            results.append(result)
    return results


def _known(students: Iterable[HandedIn | Result]) -> set[tuple[str, str]]:
    """What tells these students from others: their names in lower case, and their numbers."""
    students = list(students)
    names = {("name", one.student.casefold()) for one in students}
    return names | {("id", one.id) for one in students if one.id}
