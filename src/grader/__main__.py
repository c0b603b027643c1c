"""python -m grader: release, validate, grade, export, preview."""

import argparse
import shlex
import signal
import sys
from pathlib import Path

from grader.answer_key import AnswerKey, AuthorError
from grader.batch import grade_all
from grader.export import export_canvas, export_moodle
from grader.grade import Result, fresh_seed
from grader.preview import write_preview
from grader.release import lint, write_release, write_student_package
from grader.sandbox import SandboxError
from grader.source import SourceError, read_assignment
from grader.student import read_release, validate
from grader.submissions import find_submissions
from labkit.launch.arguments import positive

_TRUST = "run without a sandbox: students' code can then read and change all that you can"
_SOURCES = {"type": Path, "nargs": "+", "metavar": "SOURCE", "help": "source notebooks"}


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Returns the exit code:

    0    done
    1    a check failed, or the lint refused the release
    2    it could not be done
    3    graded, and a person has to look at something
    130  interrupted; what was finished is kept
    """
    for stream in (sys.stdout, sys.stderr):  # a C locale has no letters for most names
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (SourceError, AuthorError, SandboxError, OSError, ValueError) as error:
        print(f"grader: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("grader: interrupted; the same command continues", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m grader", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("release", help="make the students' notebook from the source")
    add = command.add_argument
    add("sources", **_SOURCES)
    add("out", type=Path, metavar="OUT", help="a folder, or a file *.ipynb")
    package = "also write all that students need, without solutions: a folder, or a file *.zip"
    add("--package", type=Path, metavar="PATH", help=package)
    add("--trust", action="store_true", help=_TRUST)
    add("--book", default="", help="the built book's address, for the links")
    command.set_defaults(run=_release)

    command = commands.add_parser("validate", help="run the visible checks of your notebook")
    command.add_argument("notebook", type=Path, metavar="NOTEBOOK")
    command.set_defaults(run=_validate)

    command = commands.add_parser("grade", help="grade notebooks, or folders of them")
    add = command.add_argument
    add("submissions", type=Path, nargs="+", metavar="SUBMISSIONS")
    add("--assignment", type=Path, required=True, help="the source notebook")
    add("--out", type=Path, required=True, help="where the results go")
    add("--jobs", type=positive, help="submissions at a time (default: the cores and one)")
    add("--seed", type=int, help="the inputs of an earlier run, for an appeal")
    add("--again", action="store_true", help="regrade existing results, too")
    add("--trust", action="store_true", help=_TRUST)
    command.set_defaults(run=_grade)

    command = commands.add_parser("export", help="fill the table that a course system exported")
    add = command.add_argument
    add("graded", type=Path, metavar="GRADED", help="the folder that grade wrote: --out")
    system = command.add_mutually_exclusive_group(required=True)
    canvas, moodle = "Canvas's gradebook, exported as CSV", "Moodle's grading worksheet, a CSV"
    system.add_argument("--canvas", type=Path, metavar="CSV", help=canvas)
    system.add_argument("--moodle", type=Path, metavar="CSV", help=moodle)
    add("--column", default="", help="the assignment's name in Canvas, if it has another one")
    command.set_defaults(run=_export)

    command = commands.add_parser("preview", help="write assignments as pages of the book")
    command.add_argument("sources", **_SOURCES)
    command.add_argument("out", type=Path, metavar="FOLDER", help="where the pages go")
    command.set_defaults(run=_preview)
    return parser


def _release(options: argparse.Namespace) -> int:
    is_file = options.out.suffix == ".ipynb"
    if is_file and len(options.sources) > 1:
        raise SourceError(f"{len(options.sources)} notebooks do not fit into {options.out}")
    assignments = [read_assignment(source) for source in options.sources]
    released = []
    for assignment in assignments:
        path = options.out if is_file else options.out / f"{assignment.name}.ipynb"
        with AnswerKey(assignment, fresh_seed(), options.trust) as answer_key:
            if not _tried(answer_key):
                return 1
            write_release(answer_key, path, options.book)
        print(f"Released: {path} ({assignment.points:g} points)", flush=True)
        released.append(path)
    if options.package:
        write_student_package(options.package, released, assignments)
        print(f"For students: {options.package} (notebooks, checks, instructions; no solutions)")
    else:
        print("For students, add --package FILE.zip: a checkout of this project holds the keys.")
    print("Next, with what they hand in below handed_in/:")
    for source, assignment in zip(options.sources, assignments, strict=True):
        rest = f"--assignment {source} --out graded/{assignment.name}"
        print(f"  {shlex.quote(sys.executable)} -m grader grade handed_in/ {rest}")
    return 0


def _tried(answer_key: AnswerKey) -> bool:
    """Whether the key, the stubs, and the wrong answers earn what they should; prints each."""
    number = len(answer_key.assignment.wrong_answers) + 2
    print(f"{answer_key.assignment.title}: trying {number} solutions …", flush=True)
    wrong = 0
    for count, finding in enumerate(lint(answer_key), start=1):
        right = finding.found == finding.expected
        mark, also = ("ok  ", "") if right else ("NOT ", f", should be: {finding.expected}")
        print(f"[{count}/{number}] {mark} {finding.name}: {finding.found}{also}", flush=True)
        for line in finding.reads:
            print(f"           {line}")
        wrong += not right
    if wrong:
        print(f"Not released: {wrong} of these have to be fixed first.", file=sys.stderr)
    return not wrong


def _preview(options: argparse.Namespace) -> int:
    for source in options.sources:
        print(f"Written: {write_preview(source, options.out)}")
    return 0


def _validate(options: argparse.Namespace) -> int:
    verdicts = []
    for verdict in validate(options.notebook):
        print(f"{verdict.check.name}: {verdict.said}", flush=True)
        verdicts.append(verdict)
    passed = [verdict.check.points for verdict in verdicts if verdict.passed]
    hidden = read_release(options.notebook).points - sum(one.check.points for one in verdicts)
    print(
        f"Visible checks: {len(passed)} of {len(verdicts)} ({sum(passed):g} points); "
        f"{hidden:g} more points use fresh inputs after you hand in."
    )
    return 0 if len(passed) == len(verdicts) else 1


def _grade(options: argparse.Namespace) -> int:
    found = find_submissions(options.submissions, read_assignment(options.assignment).name)
    if not found:
        places = ", ".join(map(str, options.submissions))
        raise SourceError(f"no notebook in {places}; pass notebooks, or the folder that holds them")
    how = {name: getattr(options, name) for name in ("trust", "jobs", "seed", "again")}
    results = grade_all(found, options.assignment, options.out, **how)
    for result in results:
        score = "needs a person" if result.needs_human else f"{result.score:g}"
        remark = f" ({result.warning})" if result.warning else ""
        print(f"{result.student}: {score} of {result.points:g}{remark}")
    print(_summary(results))
    for said in sorted({result.in_force for result in results} - {""}):
        print(said)
    return 3 if any(result.needs_human for result in results) else 0


def _export(options: argparse.Namespace) -> int:
    if options.canvas:
        done = export_canvas(options.graded, options.canvas, options.column)
    else:
        done = export_moodle(options.graded, options.moodle)
    for problem in done.problems:
        print(f"Left as it was: {problem}")
    print(f"{done.filled} students have points in {', '.join(map(str, done.files))}")
    return 1 if done.problems else 0


def _summary(results: list[Result]) -> str:
    scores = sorted(result.score for result in results if not result.needs_human)
    if not scores:
        return f"{len(results)} submissions, none with a score."
    lost = [c.name for r in results for c in r.checks if c.score < c.points]
    often = max(set(lost), key=lost.count) if lost else ""
    said = f"; lost most often: {often} ({lost.count(often)})" if often else ""
    return f"{len(results)} submissions, median {scores[len(scores) // 2]:g} points{said}."


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: nothing is left
    sys.exit(main())
