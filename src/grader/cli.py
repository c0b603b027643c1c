"""The command line: release, validate, grade, feedback, preview."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from grader.batch import grade_all, missing, read_all, write_tables
from grader.feedback import write_feedback
from grader.grade import Result
from grader.lint import lint, trials_of
from grader.people import People
from grader.preview import write_preview
from grader.release import write_release
from grader.report import folder_name, read_results, write_results
from grader.sandbox import RankServer, SandboxError, rank_server
from grader.source import Assignment, SourceError, read_assignment
from grader.student import describe, read_release, validate
from grader.student_package import write_student_package
from grader.submissions import find_submissions, read_table

_OVERRIDES = "CSV: student and any of check, score, comment, late_days"
_TRUST = "run the submissions without a sandbox where bubblewrap does not work"


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
    except (SourceError, SandboxError, OSError, ValueError) as error:
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
    command.add_argument("--roster", type=Path, help="CSV: student, id; missing students get a row")
    command.add_argument("--overrides", type=Path, help=_OVERRIDES)
    command.add_argument("--late-penalty", type=float, default=0.0, help="points per day late")
    command.add_argument("--again", action="store_true", help="regrade existing results, too")
    command.add_argument("--trust", action="store_true", help=_TRUST)
    command.set_defaults(run=_grade)

    command = commands.add_parser("feedback", help="write the feedback pages anew from results")
    command.add_argument("out", type=Path, metavar="DIR", help="what grade wrote to")
    command.add_argument("--overrides", type=Path, help=_OVERRIDES)
    command.add_argument("--late-penalty", type=float, default=0.0, help="points per day late")
    command.set_defaults(run=_feedback)

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
    print("Starting the sandbox …", flush=True)
    with rank_server(trust=options.trust) as server:
        for assignment in assignments:
            if not _tried(assignment, server):
                return 1
            path = options.out if is_file else options.out / f"{assignment.name}.ipynb"
            write_release(assignment, path, server.address, options.book)
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


def _tried(assignment: Assignment, server: RankServer) -> bool:
    """Whether the key, the stubs, and the wrong answers earn what they should; prints each."""
    number = trials_of(assignment)
    print(f"{assignment.title}: trying {number} solutions; about {number} s …", flush=True)
    wrong = 0
    for count, finding in enumerate(lint(assignment, server, os.cpu_count() or 1), start=1):
        mark = "ok  " if finding.right else "NOT "
        also = "" if finding.right else f", should be: {finding.expected}"
        print(f"[{count}/{number}] {mark} {finding.name}: {finding.found}{also}", flush=True)
        wrong += not finding.right
    if wrong:
        print(f"Not released: {wrong} of these have to be fixed first.", file=sys.stderr)
    return not wrong


def _preview(options: argparse.Namespace) -> int:
    for source in options.sources:
        print(f"Written: {write_preview(source, options.out)}")
    return 0


def _validate(options: argparse.Namespace) -> int:
    assignment, points = read_release(options.notebook)
    passed, earned = 0, 0.0
    for check, verdict in validate(options.notebook):
        print(describe(check, verdict), flush=True)
        passed += verdict.passed
        earned += check.points if verdict.passed else 0
    hidden = points - sum(check.points for check in assignment.checks)
    print(
        f"Visible checks: {passed} of {len(assignment.checks)} ({earned:g} points); "
        f"{hidden:g} more points use fresh inputs after you hand in."
    )
    return 0 if passed == len(assignment.checks) else 1


def _grade(options: argparse.Namespace) -> int:
    name = read_assignment(options.assignment).name
    found = find_submissions(options.submissions, name)
    roster = read_table(options.roster, "student").values() if options.roster else []
    people = People.read(options.overrides, options.late_penalty)
    if not found:
        places = ", ".join(map(str, options.submissions))
        raise SourceError(f"no notebook in {places}; pass notebooks, or the folder that holds them")
    with rank_server(trust=options.trust) as server:
        results = grade_all(
            found,
            options.assignment,
            options.out,
            server,
            jobs=options.jobs,
            seed=options.seed,
            again=options.again,
            finish=people.apply,
        )
    earlier = read_all(options.out, name).values()
    absent = missing(roster, found, options.assignment, earlier)
    for result in absent:
        people.apply(result)
        folder = options.out / folder_name(result.student)
        write_results(result, folder, "missing")
        write_feedback(result, folder)
    everyone = write_tables(options.out, name)
    for result in [*results, *absent]:
        print(_in_one_line(result))
    all_matched = _all_matched(people, everyone)
    return 3 if any(result.needs_human for result in results) or not all_matched else 0


def _in_one_line(result: Result) -> str:
    remark = "nothing handed in" if result.missing else result.warning
    if result.missing and not result.has_score:
        return f"{result.student}: {remark}"
    score = "needs a person" if result.needs_human else f"{result.score:g}"
    return f"{result.student}: {score} of {result.points:g}" + (f" ({remark})" if remark else "")


def _all_matched(people: People, results: list[Result]) -> bool:
    """Whether each row of the overrides matches one of `results`; prints those that do not."""
    unmatched = people.unmatched(results)
    for sentence in unmatched:
        print(f"grader: {sentence}", file=sys.stderr)
    return not unmatched


def _feedback(options: argparse.Namespace) -> int:
    people = People.read(options.overrides, options.late_penalty)
    results: list[Result] = []
    for folder in sorted(path for path in options.out.iterdir() if path.is_dir()):
        found = read_results(folder)
        if found:
            result, fingerprint = found
            if options.overrides:
                people.apply(result)
                write_results(result, folder, fingerprint)
            write_feedback(result, folder)
            results.append(result)
    for name in {result.assignment for result in results}:
        write_tables(options.out, name)
    print(f"{len(results)} pages written below {options.out}")
    if not results:
        return 1
    return 0 if _all_matched(people, results) else 3
