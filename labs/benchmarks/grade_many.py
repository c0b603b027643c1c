"""The time to grade many mixed submissions of assignment 1 in one run.

    python labs/benchmarks/grade_many.py [--submissions 200] [--jobs 2]

Of twenty submissions, three are the key, three the empty release, and nine known wrong answers.
The others hold a syntax error, a deadlock, a dead rank, an endless loop, or a function that sleeps.
Prints the time per submission of each kind, the time of the run, and the largest memory of the
grader itself. Then it prints the time of a single submission, the key. Fails if any submission
earned other points than it should.
"""

# ruff: noqa: E402
import argparse
import copy
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

from labkit.launch.arguments import positive
from labkit.profiling.benchmark_arguments import benchmark_parser


def arguments_of_this_benchmark() -> argparse.Namespace:
    arguments = benchmark_parser(__doc__)
    arguments.add_argument("--submissions", type=positive, default=200, help="(default 200)")
    arguments.add_argument(
        "--jobs",
        type=positive,
        default=(os.cpu_count() or 1) + 1,
        help="at a time (default: the cores and one)",
    )
    return arguments.parse_args()


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    ARGUMENTS = arguments_of_this_benchmark()

from grader.batch import grade_all
from grader.release import release
from grader.source import Assignment, read_assignment, source_of
from grader.submissions import HandedIn
from labkit.launch.scripts import project_root
from labkit.profiling.benchmark import write_json
from labkit.tables import table

SOURCE = project_root() / "labs" / "assignments" / "01_average_gradients.ipynb"
Kind = tuple[str, dict[str, str], float]  # name, solutions, and points
HandedInAll = tuple[dict[str, HandedIn], dict[str, float]]  # by student: the file, and its points
QUICK = ("key", "empty", "wrong answer")  # they end quickly
BROKEN = {
    "syntax error": "def average_each(module)\n",
    "deadlock": (
        "def average_each(module):\n"
        "    if dist.get_rank() == 0:\n        dist.all_reduce(torch.ones(1))\n"
    ),
    "dead rank": "import os\ndef average_each(module):\n    os._exit(1)\n",
    "endless loop": "def average_each(module):\n    while True: pass\n",
    "sleeps": "import time\ndef average_each(module):\n    time.sleep(1000)\n",
}


def kinds(assignment: Assignment) -> list[Kind]:
    """Each kind; one may occur more than once."""
    key = assignment.keys()
    points = {check.name: check.points for check in assignment.checks}
    of_each = sum(c.points for c in assignment.checks if "each" in c.solutions)
    found = [("key", key, assignment.points), ("empty", {}, 0.0)] * 3
    for wrong in assignment.wrong_answers[:9]:
        solutions = {**key, wrong.solution: wrong.source}
        lost = sum(points[name] for name in wrong.loses)
        found.append(("wrong answer", solutions, assignment.points - lost))
    for name, source in BROKEN.items():
        found.append((name, {**key, "each": source}, assignment.points - of_each))
    return found


def hand_in(assignment: Assignment, of_kind: list[Kind], number: int, folder: Path) -> HandedInAll:
    """Write `number` submissions into `folder`, of all kinds in turn; and their points."""
    released = release(assignment, [])
    paths, wanted = {}, {}
    for at in range(number):
        kind, solutions, score = of_kind[at % len(of_kind)]
        notebook = copy.deepcopy(released)
        for cell in notebook["cells"]:
            cell["source"] = solutions.get(cell.get("id"), source_of(cell))
        student = f"{at:03} {kind}"
        path = folder / f"{at:03}.ipynb"
        path.write_text(json.dumps(notebook))
        paths[student], wanted[student] = HandedIn(student, path), score
    return paths, wanted


def main(given: argparse.Namespace) -> None:
    assignment = read_assignment(SOURCE)
    of_kind = kinds(assignment)
    if given.quick:
        of_kind = [next(kind for kind in of_kind if kind[0] == name) for name in QUICK]
    submissions = len(of_kind) if given.quick else given.submissions
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths, wanted = hand_in(assignment, of_kind, submissions, folder)
        start = time.perf_counter()
        results = grade_all(paths, SOURCE, folder / "graded", jobs=given.jobs)
        whole = time.perf_counter() - start
        start = time.perf_counter()
        single = {"key": HandedIn("key", paths[f"{0:03} key"].path)}
        grade_all(single, SOURCE, folder / "single", jobs=1)
        of_key = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB
    seconds: dict[str, list[float]] = {}
    for result in results:
        seconds.setdefault(result.student[4:], []).append(result.seconds)
    rows = [[kind, len(s), statistics.median(s), max(s)] for kind, s in seconds.items()]
    print(table(["submission", "number", "median [s]", "longest [s]"], rows, digits=1))
    print(
        f"{len(results)} submissions, {given.jobs} at a time: {whole:.0f} s, "
        f"{whole / len(results):.2f} s per submission; a single one {of_key:.1f} s"
    )
    print(f"largest memory of the grader itself {memory:.0f} MiB")
    figures = {"jobs": given.jobs, "whole": whole, "key": of_key}
    figures |= {"memory": memory, "seconds": seconds}
    write_json(given.json, figures)
    wrong = [r.student for r in results if r.needs_human or r.score != wanted[r.student]]
    if wrong:
        sys.exit(f"graded wrongly: {', '.join(wrong)}")


if __name__ == "__main__":
    main(ARGUMENTS)
