"""The whole corpus, graded and counted: `python -m tests.grader.score [--jobs 2] [--times 1]`.

Entries of assignment 1 that are right, wrong, broken or hostile (`grader_corpus`), right
solutions of all five in unusual PyTorch (`grader_right`), and every known wrong answer. Prints
what was graded wrongly, how many were graded rightly, the times, and the largest memory of any
process on the trusted side: the grader itself, nbval with its kernel, the reader of large files.
The tests grade the same entries, in parts. `--ordinary` leaves out what is broken or hostile: what
remains waits for no limit, so it can be graded many times.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from grader_corpus import ENTRIES
from grader_notebooks import ASSIGNMENTS, first_assignment, submission
from grader_right import RIGHT

from grader.batch import grade_all
from grader.sandbox import RankServer, rank_server
from grader.source import Assignment, read_assignment
from grader.submissions import HandedIn

WHOSE = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
# Entries of the corpus that are as harmless as the right solutions and the known wrong answers.
ORDINARY = {"correct", "empty release", "only the first task", "missing cell", "reordered cells"}


def entries_of(
    number: int, assignment: Assignment, ordinary: bool
) -> dict[str, tuple[object, float]]:
    """{name: (a notebook or bytes, the score that it must get)}."""
    found: dict[str, tuple[object, float]] = {}
    if number == 1:
        chosen = [entry for entry in ENTRIES if entry.name in ORDINARY or not ordinary]
        found = {entry.name: (entry.make(assignment), entry.score) for entry in chosen}
    points = {check.name: check.points for check in assignment.checks}
    for task, sources in RIGHT[number].items():
        for name, source in sources.items():
            made = submission(assignment, assignment.keys() | {task: source})
            found[f"right {task} {name}"] = (made, assignment.points)
    for wrong in assignment.wrong_answers:
        made = submission(assignment, assignment.keys() | {wrong.solution: wrong.source})
        lost = sum(points[name] for name in wrong.loses)
        found[f"wrong {wrong.name}"] = (made, assignment.points - lost)
    return found


def grade(
    number: int, server: RankServer, jobs: int, ordinary: bool
) -> tuple[list[str], list[float]]:
    """What of one assignment's entries was graded wrongly, in words, and the seconds of each."""
    [source] = ASSIGNMENTS.glob(f"0{number}_*.ipynb")
    assignment = first_assignment() if number == 1 else read_assignment(source)
    wanted, handed_in = {}, {}
    with tempfile.TemporaryDirectory() as name:
        entries = entries_of(number, assignment, ordinary)
        for index, (entry, (made, score)) in enumerate(entries.items()):
            path = Path(name) / f"{index}.ipynb"
            path.write_bytes(made if isinstance(made, bytes) else json.dumps(made).encode())
            handed_in[entry], wanted[entry] = HandedIn(entry, path), score
        results = grade_all(handed_in, source, Path(name) / "out", server, jobs=jobs)
    wrong = [
        f"{number}, {r.student}: {'needs a person' if r.needs_human else r.score}, "
        f"should be {wanted[r.student]}: "
        + "; ".join(c.sentence or c.needs_human for c in r.checks if c.score < c.points)
        for r in results
        if r.needs_human or r.score != wanted[r.student]
    ]
    return wrong, [result.seconds for result in results]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--times", type=int, default=1, help="how often the whole is graded")
    parser.add_argument("--ordinary", action="store_true", help="without broken and hostile ones")
    parser.add_argument("--only", type=int, nargs="*", default=list(RIGHT), help="assignments")
    options = parser.parse_args()
    wrong: list[str] = []
    seconds: list[float] = []
    began = time.perf_counter()
    with rank_server() as server:
        for again in range(1, options.times + 1):
            for number in options.only:
                more, took = grade(number, server, options.jobs, options.ordinary)
                wrong, seconds = wrong + more, seconds + took
                print(*more, sep="\n", end="\n" if more else "")
            right, whole = len(seconds) - len(wrong), time.perf_counter() - began
            print(f"{again}: {right} of {len(seconds)} graded rightly in {whole:.0f} s", flush=True)
        # The fork server still runs: none of its ranks is among the processes waited for.
        largest = [resource.getrusage(whose).ru_maxrss / 1024 for whose in WHOSE]
    print(
        f"median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s; largest memory "
        f"of the grader {largest[0]:.0f} MiB, of its trusted children {largest[1]:.0f} MiB"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
