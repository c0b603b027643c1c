"""Grade many submissions: several at a time, resumable, with a progress bar.

A submission that is at fault costs its own points; a fault of the grader is written down, and the
others go on. An interrupted run keeps what is finished, and the same command continues: a
submission is graded again only if its file or the assignment has changed, or if a person had to
look. Results of students who are not in this run stay.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from grader.answer_key import AnswerKey
from grader.grade import Result, fresh_seed, grade_together
from grader.merge import Submission, read_submission
from grader.notebook_file import hash_of
from grader.report import folder_name, read_results, write_csv, write_feedback, write_results
from grader.sandbox import FORKS
from grader.source import Assignment, read_assignment
from grader.submissions import Work

_TOGETHER = 10  # submissions that share one run of nbval


def grade_all(
    submissions: dict[str, Work],
    source: Path,
    out: Path,
    *,
    trust: bool = False,
    jobs: int | None = None,
    seed: int | None = None,
    again: bool = False,
) -> list[Result]:
    """Grade `submissions` on the assignment at `source` into `out`; one result each, by student.

    `jobs` run at a time, by default one more than there are cores, because some only wait. `again`
    also grades what has a result already. Writes a folder with results.json and feedback.html for
    each student as soon as that is graded, and grades.csv at the end, also when the run is
    interrupted. Raises SandboxError and AuthorError.
    """
    assignment = read_assignment(source)
    of_assignment = hash_of(source) + (f"-{seed}" if seed is not None else "")
    fingerprints = {
        student: f"{of_assignment}-{hash_of(one.path)}" for student, one in submissions.items()
    }
    results = {} if again else _finished(fingerprints, out)
    waiting = [one for student, one in submissions.items() if student not in results]

    def keep(result: Result) -> None:
        one = submissions[result.student]
        result.id, result.warning = one.id, one.warning
        results[result.student] = result
        folder = out / folder_name(result.student)
        write_results(result, folder, fingerprints[result.student])
        write_feedback(result, folder)

    for result in list(results.values()):
        keep(result)
    try:
        with tqdm(total=len(submissions), initial=len(results), unit="submission") as bar:
            jobs = jobs or (os.cpu_count() or 1) + 1
            for result in _graded(waiting, assignment, seed, trust, jobs):
                keep(result)
                bar.update()
    finally:
        write_table(out, assignment.name)
    return [results[student] for student in submissions]


def _finished(fingerprints: dict[str, str], out: Path) -> dict[str, Result]:
    """The results in `out` that stay: of the same file and assignment, and not for a person."""
    found = {student: read_results(out / folder_name(student)) for student in fingerprints}
    return {
        student: one[0]
        for student, one in found.items()
        if one and one[1] == fingerprints[student] and not one[0].needs_human
    }


def write_table(out: Path, assignment: str) -> None:
    """grades.csv of everything in `out` that belongs to `assignment`."""
    out.mkdir(parents=True, exist_ok=True)  # none yet if the first run was interrupted
    found = [read_results(folder) for folder in sorted(out.iterdir()) if folder.is_dir()]
    results = [one[0] for one in found if one and one[0].assignment == assignment]
    results.sort(key=lambda result: result.student.casefold())
    write_csv(results, out / "grades.csv")


def _graded(
    waiting: list[Work], assignment: Assignment, seed: int | None, trust: bool, jobs: int
) -> Iterator[Result]:
    """The results as they come, from up to `jobs` threads, each with one run of nbval at a time."""
    each = max(1, min(_TOGETHER, -(-len(waiting) // jobs)))
    parts = [waiting[first : first + each] for first in range(0, len(waiting), each)]
    stop = threading.Event()
    FORKS[trust].at_once = jobs + 1  # and the key's
    with (
        AnswerKey(assignment, fresh_seed() if seed is None else seed, trust, stop) as answer_key,
        ThreadPoolExecutor(jobs) as pool,
    ):
        try:
            running = [pool.submit(_grade_part, part, answer_key) for part in parts]
            for done in as_completed(running):
                yield from done.result()
        finally:
            stop.set()  # nothing, if all has ended
            pool.shutdown(wait=True, cancel_futures=True)


def _grade_part(part: list[Work], answer_key: AnswerKey) -> list[Result]:
    read = [(one.student, _read(one, answer_key.assignment)) for one in part]
    return grade_together(read, answer_key)


def _read(one: Work, assignment: Assignment) -> Submission:
    if one.path.suffix != ".ipynb" or one.path.is_dir():
        why = one.warning or f"{one.path.name} is not a notebook"
        return Submission(assignment.stubs(), unreadable=why)
    try:
        return read_submission(one.path, assignment)
    except Exception as error:  # one student's matter, not that of all who are graded together
        why = f"the file cannot be read: {type(error).__name__}: {str(error)[:200]}"
        return Submission(assignment.stubs(), unreadable=why)
