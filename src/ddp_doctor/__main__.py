"""Run a training script unchanged, observe it, and report.

torchrun --nproc-per-node 4 -m ddp_doctor [options] train.py [its arguments]
python -m ddp_doctor [options] train.py [its arguments]
python -m ddp_doctor explain CODE
python -m ddp_doctor compare "COMMAND" "COMMAND"
"""

import argparse
import json
import shlex
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from ddp_doctor import __version__
from ddp_doctor.facts.journal import alive, read_statuses
from ddp_doctor.facts.places import users_trace
from ddp_doctor.observe.session import Session
from ddp_doctor.options import FOUND, LEVELS, MOST_RANKS, UNCHECKED, Options, say
from ddp_doctor.run.script import NotRunnableError, problem_with, run_script
from ddp_doctor.run.start import start
from ddp_doctor.run.watcher import VERDICT

VERDICT_AFTER = 150.0  # seconds; longer than the watcher waits for a rank of another host


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddp_doctor",
        description="Runs a training script unchanged and tells what one optimizer step computes, "
        "what is wrong, where, and how to fix it.",
    )
    add = parser.add_argument
    add("--version", action="version", version=f"ddp-doctor {__version__}")
    add("--folder", default="ddp-doctor", help="where report.txt goes (ddp-doctor)")
    add("--json", metavar="PATH", help="also write the report as JSON")
    add(
        "--fail-on",
        choices=["error", "warning"],
        help="exit with 3 if this is found, or 4 if not everything could be checked; torchrun then "
        "exits with 1",
    )
    add("--first", type=int, default=6, help="observe the first N steps (6)")
    add("--every", type=int, default=50, help="then every Nth step (50)")
    stuck = "report ranks stuck for so many seconds (60)"
    add("--hang-after", type=float, default=60.0, help=stuck)
    add("--quiet", action="store_true", help="print nothing if nothing is found")
    add(
        "--cpu",
        action="store_true",
        help="run a script that was written for GPUs on CPU ranks, over gloo; the report lists "
        "what was replaced",
    )
    add(
        "--certify",
        action="store_true",
        help="measure whether the ranks compute the gradient of one process; with --fail-on, exit "
        "with 3 if they do not, and 4 if it cannot be judged. Usually starts the script three "
        "times: as ranks for at most 16 steps per optimizer, as one process for five, and as ranks "
        "that the rules observe for 16. At most seven times: without --ranks, to see whether it "
        "starts its own ranks; or if one process needs other samples or makes more passes",
    )
    add("--ranks", type=int, help="with --certify and no launcher: start so many ranks (2)")
    module = "run a module, as python -m does"
    add("-m", dest="module", nargs=argparse.REMAINDER, help=module)
    add("script", nargs="?", help="the training script")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def main() -> None:
    if sys.argv[1:2] == ["compare"] and not Path("compare").exists():
        from ddp_doctor.compare.commands import main as compare

        sys.exit(compare(sys.argv[2:]))
    arguments = parser()
    given = vars(arguments.parse_args())
    try:
        names = [field.name for field in fields(Options) if field.name in given]
        options = Options(**{name: given[name] for name in names})
    except ValueError as error:
        arguments.error(str(error))
    if given["ranks"] is not None and not 1 <= given["ranks"] <= MOST_RANKS:
        arguments.error(f"--ranks is {given['ranks']}: pass 1 to {MOST_RANKS}.")
    if given["ranks"] is not None and not given["certify"]:
        arguments.error("--ranks goes with --certify; for a report, launch the ranks (torchrun).")
    script, its = given["script"], given["arguments"]
    if given["module"] is not None:
        script, its = "-m", given["module"]
    if script is None:
        arguments.error("the following arguments are required: script")
    if script == "explain" and not Path("explain").exists():
        sys.exit(_explain(its))
    if problem := problem_with(script, its):
        say(problem)
        sys.exit(2)
    if given["certify"]:
        from ddp_doctor.certificate.program import run

        try:
            sys.exit(run([script, *its], given["ranks"], options))
        except KeyboardInterrupt:
            sys.exit("ddp-doctor: interrupted, without a certificate.")
    _observed(script, its, options)


def _observed(script: str, its: list[str], options: Options) -> None:
    """Run the script, and end as it does, or with an exit code of --fail-on."""
    session = start(options)
    try:
        run_script(script, its)
    except NotRunnableError as error:
        say(str(error))
        _close(session, options, SystemExit(2), 2)
        sys.exit(2)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        _close(session, options, end, code)
        raise
    except BaseException as error:
        _close(session, options, error, 1)
        if "environment variable RANK expected" in str(error):
            command = shlex.join([*(["-m"] if script == "-m" else [script]), *its])
            launch = f"torchrun --nproc-per-node 2 -m ddp_doctor {command}"
            error.add_note(f"ddp-doctor: launch its ranks: {launch}")
        # The frames of the doctor are not part of the user's traceback.
        # A bare raise: `from` would hide the exceptions that the user's code was handling.
        error.__traceback__ = users_trace(error.__traceback__)
        raise
    _close(session, options, None, 0)


def _explain(codes: list[str]) -> int:
    """Print what each finding means; 2 if there is no such one."""
    from ddp_doctor.explain.rules import CATALOG, explanation_of

    unknown = [code for code in codes if code not in CATALOG]
    if unknown or not codes:
        known = f"no finding {unknown[0]!r}. " if unknown else ""
        sys.stderr.write(f"ddp-doctor: {known}The findings are: {', '.join(CATALOG)}.\n")
        return 2
    print("\n\n".join(explanation_of(code) for code in codes))
    return 0


def _close(
    session: Session | None, options: Options, error: BaseException | None, code: int
) -> None:
    if session is not None:
        # A process that is no rank has to say how it ended, too: for --fail-on if it starts ranks,
        # and for a report that would name no rank if an error ended it.
        if error is not None or (options.fail_on and session.leads):
            session.open()
        session.close(error)
    if not options.fail_on or code:
        return
    if session is None:
        say("--fail-on: nothing was checked, because the doctor could not start.")
        raise SystemExit(UNCHECKED)
    if session.leads and session.journal is not None:
        result = _verdict(session)
        if result["worst"] in LEVELS[options.fail_on]:
            raise SystemExit(FOUND)
        if problems := result["unchecked"]:
            say(f"--fail-on: not everything was checked: {'; '.join(problems)}.")
            raise SystemExit(UNCHECKED)


def _verdict(session: Session) -> dict[str, Any]:
    """What the watcher says of the run, once all ranks have written their last."""
    until, seen = 0.0, None
    while True:
        try:
            return dict(json.loads((session.run_folder / VERDICT).read_text()))
        except (OSError, ValueError):
            time.sleep(0.05)
        journals = read_statuses(session.run_folder)
        running = [one for one in journals if one.here and not one.ended and alive(one.pid)]
        if running or journals != seen:
            until, seen = time.monotonic() + VERDICT_AFTER, journals
        if time.monotonic() > until:
            problem = f"there is no report {VERDICT_AFTER:g} s after the last sign of a rank"
            return {"worst": None, "unchecked": [problem]}


if __name__ == "__main__":
    main()
