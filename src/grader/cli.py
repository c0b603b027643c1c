"""The command line: release, validate, grade, preview."""

import argparse
import shlex
import sys
from pathlib import Path

from grader.batch import grade_all
from grader.grade import Result
from grader.known import AuthorError
from grader.preview import write_preview
from grader.release import lint, write_release
from grader.sandbox import SandboxError
from grader.source import Assignment, SourceError, read_assignment
from grader.student import read_release, validate
from grader.student_package import write_student_package
from grader.submissions import find_submissions

_TRUST = "run without a sandbox: students' code can then read and change all that you can"


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


def _at_least(least: int):
    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is less than {least}")
        return number

    return read


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m grader", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("release", help="make the students' notebook from the source")
    command.add_argument("sources", type=Path, nargs="+", metavar="SOURCE", help="source notebooks")
    command.add_argument("out", type=Path, metavar="OUT", help="a folder, or a file *.ipynb")
    command.add_argument(
        "--package",
        type=Path,
        metavar="PATH",
        help="also write all that students need, without solutions: a folder, or a file *.zip",
    )
    command.add_argument("--trust", action="store_true", help=_TRUST)
    command.add_argument("--book", default="", help="the built book's address, for the links")
    command.set_defaults(run=_release)

    command = commands.add_parser("validate", help="run the visible checks of your notebook")
    command.add_argument("notebook", type=Path, metavar="NOTEBOOK")
    command.set_defaults(run=_validate)

    command = commands.add_parser("grade", help="grade notebooks, or folders of them")
    command.add_argument("submissions", type=Path, nargs="+", metavar="SUBMISSIONS")
    command.add_argument("--assignment", type=Path, required=True, help="the source notebook")
    command.add_argument("--out", type=Path, required=True, help="where the results go")
    command.add_argument(
        "--jobs", type=_at_least(1), help="submissions at a time (default: the cores)"
    )
    command.add_argument(
        "--seed", type=_at_least(0), help="the inputs of an earlier run, for an appeal"
    )
    command.add_argument("--again", action="store_true", help="regrade existing results, too")
    command.add_argument("--trust", action="store_true", help=_TRUST)
    command.set_defaults(run=_grade)

    command = commands.add_parser("preview", help="write assignments as pages of the book")
    command.add_argument("sources", type=Path, nargs="+", metavar="SOURCE", help="source notebooks")
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
        if not _tried(assignment, options.trust):
            return 1
        path = options.out if is_file else options.out / f"{assignment.name}.ipynb"
        write_release(assignment, path, options.book, options.trust)
        print(f"Released: {path} ({assignment.points:g} points)", flush=True)
        released.append(path)
    if options.package:
        print("Building the students' package …", flush=True)
        write_student_package(options.package, released, assignments)
        print(f"For students: {options.package} (notebooks, checks, instructions; no solutions)")
    else:
        print("For students, add --package FILE.zip: a checkout of this project holds the keys.")
    print("Next, with what they hand in below handed_in/:")
    for source, assignment in zip(options.sources, assignments, strict=True):
        out = f"graded/{assignment.name}"
        command = f"{_this_python()} -m grader grade handed_in/ --assignment {source} --out {out}"
        print(f"  {command}")
    return 0


def _this_python() -> str:
    """What starts this interpreter in a shell, from the current folder: `.venv/bin/python`."""
    path = Path(sys.executable)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return shlex.quote(str(path))


def _tried(assignment: Assignment, trust: bool) -> bool:
    """Whether the key, the stubs, and the wrong answers earn what they should; prints each."""
    number = len(assignment.wrong_answers) + 3
    print(f"{assignment.title}: trying {number} solutions …", flush=True)
    wrong = 0
    for count, finding in enumerate(lint(assignment, trust), start=1):
        mark = "ok  " if finding.right else "NOT "
        also = "" if finding.right else f", should be: {finding.expected}"
        print(f"[{count}/{number}] {mark} {finding.name}: {finding.found}{also}", flush=True)
        for line in finding.reads:
            print(f"           {line}")
        wrong += not finding.right
    if wrong:
        print(f"Not released: {wrong} of these have to be fixed first.", file=sys.stderr)
    return not wrong


def _preview(options: argparse.Namespace) -> int:
    for source in options.sources:
        print(f"Written: {write_preview(source, options.out)}")
    return 0


def _validate(options: argparse.Namespace) -> int:
    released = read_release(options.notebook)
    checks = released.assignment.checks
    passed, earned = 0, 0.0
    for verdict in validate(options.notebook):
        print(f"{verdict.check.name}: {verdict.said}", flush=True)
        passed += verdict.passed
        earned += verdict.check.points if verdict.passed else 0
    hidden = released.points - sum(check.points for check in checks)
    print(
        f"Visible checks: {passed} of {len(checks)} ({earned:g} points); "
        f"{hidden:g} more points use fresh inputs after you hand in."
    )
    return 0 if passed == len(checks) else 1


def _grade(options: argparse.Namespace) -> int:
    assignment = read_assignment(options.assignment)
    found = find_submissions(options.submissions, assignment.name)
    if not found:
        places = ", ".join(map(str, options.submissions))
        raise SourceError(f"no notebook in {places}; pass notebooks, or the folder that holds them")
    results = grade_all(
        found,
        options.assignment,
        options.out,
        trust=options.trust,
        jobs=options.jobs,
        seed=options.seed,
        again=options.again,
    )
    for result in results:
        print(_in_one_line(result))
    print(_summary(results))
    return 3 if any(result.needs_human for result in results) else 0


def _in_one_line(result: Result) -> str:
    score = "needs a person" if result.needs_human else f"{result.score:g}"
    remark = f" ({result.warning})" if result.warning else ""
    return f"{result.student}: {score} of {result.points:g}{remark}"


def _summary(results: list[Result]) -> str:
    scores = sorted(result.score for result in results if not result.needs_human)
    if not scores:
        return f"{len(results)} submissions, none with a score."
    lost = [c.name for r in results for c in r.checks if c.score < c.points]
    often = max(set(lost), key=lost.count) if lost else ""
    said = f"; lost most often: {often} ({lost.count(often)})" if often else ""
    return f"{len(results)} submissions, median {scores[len(scores) // 2]:g} points{said}."
