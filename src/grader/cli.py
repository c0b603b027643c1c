"""The command line: release, validate, grade, feedback."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from grader.batch import find_submissions, grade_all
from grader.feedback import write_feedback
from grader.lint import lint
from grader.release import write_release
from grader.report import read_results
from grader.sandbox import SandboxError, rank_server
from grader.source import SourceError, read_assignment
from grader.student import describe, read_release, validate

_TRUST = "run the submissions without a sandbox where bubblewrap does not work"


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Exit code 0: done; 1: a check or a lint said no; 2: it could not be done."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (SourceError, SandboxError, OSError) as error:
        print(f"grader: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="grader", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("release", help="make the students' notebook from the source")
    command.add_argument("source", type=Path, metavar="SOURCE", help="the source notebook")
    command.add_argument("out", type=Path, metavar="OUT", help="a folder, or a file *.ipynb")
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
    command.add_argument("--jobs", type=int, help="submissions at a time (default: the cores)")
    command.add_argument("--seed", type=int, help="the inputs of an earlier run, for an appeal")
    command.add_argument("--again", action="store_true", help="also what has a result already")
    command.add_argument("--trust", action="store_true", help=_TRUST)
    command.set_defaults(run=_grade)

    command = commands.add_parser("feedback", help="write the feedback pages anew from results")
    command.add_argument("out", type=Path, metavar="DIR", help="what grade wrote to")
    command.set_defaults(run=_feedback)
    return parser


def _release(options: argparse.Namespace) -> int:
    assignment = read_assignment(options.source)
    wrong = 0
    with rank_server(trust=options.trust) as server:
        for finding in lint(assignment, server, os.cpu_count() or 1):
            mark = "ok  " if finding.right else "NOT "
            also = "" if finding.right else f", should be: {finding.expected}"
            print(f"{mark} {finding.name}: {finding.found}{also}", flush=True)
            wrong += not finding.right
        if wrong:
            print(f"Not released: {wrong} of these have to be mended first.", file=sys.stderr)
            return 1
        is_file = options.out.suffix == ".ipynb"
        path = options.out if is_file else options.out / f"{assignment.name}.ipynb"
        write_release(assignment, path, server.address, options.book)
    print(f"Released: {path} ({assignment.points:g} points)")
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
    submissions = find_submissions(options.submissions)
    if not submissions:
        raise SourceError("no notebook there")
    with rank_server(trust=options.trust) as server:
        results = grade_all(
            submissions,
            options.assignment,
            options.out,
            server,
            jobs=options.jobs,
            seed=options.seed,
            again=options.again,
        )
    for result in results:
        score = "needs a person" if result.needs_human else f"{result.score:g}"
        print(f"{result.student}: {score} of {result.points:g}")
    return 0


def _feedback(options: argparse.Namespace) -> int:
    count = 0
    for folder in sorted(path for path in options.out.iterdir() if path.is_dir()):
        found = read_results(folder)
        if found:
            write_feedback(found[0], folder)
            count += 1
    print(f"{count} pages written below {options.out}")
    return 0 if count else 1
