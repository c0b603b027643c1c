"""Run a training script unchanged, observe it, and report.

torchrun --nproc-per-node 4 -m ddp_doctor [options] train.py [its arguments]
python -m ddp_doctor [options] train.py [its arguments]
"""

import argparse
import builtins
import json
import sys
import time
import types
from pathlib import Path

from ddp_doctor.session import Options, Session
from ddp_doctor.starting import start
from ddp_doctor.watcher import VERDICT

LAUNCHERS = ("torchrun", "accelerate", "python", "python3")  # all of them take -m for a module


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ddp_doctor",
        description="Runs a training script unchanged and tells what one optimizer step computes, "
        "what is wrong, where, and how to fix it.",
    )
    parser.add_argument("--folder", default="ddp-doctor", help="where report.html goes")
    parser.add_argument("--json", metavar="PATH", help="also write the report as JSON")
    parser.add_argument(
        "--fail-on",
        choices=["error", "warning"],
        help="let ranks exit with 3 if this is found",
    )
    parser.add_argument("--first", type=int, default=6, help="observe the first N steps (6)")
    parser.add_argument("--every", type=int, default=50, help="then every Nth step (50)")
    parser.add_argument(
        "--hang-after", type=float, default=60.0, help="report ranks stuck for so many seconds (60)"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing if nothing is found")
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def main() -> None:
    given = parser().parse_args()
    options = Options(
        folder=given.folder,
        json=given.json,
        fail_on=given.fail_on,
        first=given.first,
        every=given.every,
        hang_after=given.hang_after,
        quiet=given.quiet,
    )
    if not Path(given.script).is_file():
        sys.exit(f"ddp-doctor: {no_script(given.script, given.arguments)}")
    sys.argv = [given.script, *given.arguments]
    session = start(options)
    code: int | None = None
    try:
        run_script(given.script)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        _close(session, end, code)
        raise
    except BaseException as error:
        _close(session, error, 1)
        # The frames of the doctor are not part of the user's traceback.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals.get("__package__") == "ddp_doctor":
            trace = trace.tb_next
        raise error.with_traceback(trace) from error.__cause__
    _close(session, None, 0)


def no_script(script: str, arguments: list[str]) -> str:
    """The error if `script` does not exist; if it is a launcher, with the corrected command."""
    said = f"there is no script {script!r} here ({Path.cwd()})."
    scripts = [at for at, argument in enumerate(arguments) if argument.endswith(".py")]
    if Path(script).name in LAUNCHERS and scripts:
        before, after = arguments[: scripts[0]], arguments[scripts[0] :]
        right = " ".join([script, *before, "-m ddp_doctor", *after])
        said += f" Put the launcher first:\n    {right}"
    return said


def run_script(script: str) -> None:
    """Execute the script as `python script` would: it is `__main__`, also for pickled functions."""
    path = Path(script)
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=str(path), __builtins__=builtins, __spec__=None, __package__=None
    )
    sys.modules["__main__"] = module
    sys.path[0] = str(path.resolve().parent)
    code = compile(path.read_bytes(), str(path), "exec")
    exec(code, module.__dict__)


def _close(session: Session | None, error: BaseException | None, code: int) -> None:
    if session is None:
        return
    session.close(error, code)
    if session.options.fail_on and session.journal is not None:
        worst = _verdict(session)
        levels = {"error": ["error"], "warning": ["error", "warning"]}[session.options.fail_on]
        if code == 0 and worst in levels:
            raise SystemExit(3)


def _verdict(session: Session, patience: float = 15.0) -> str | None:
    """The worst severity in the report. All ranks wait for it, once all have written their last."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        try:
            return str(json.loads((session.run / VERDICT).read_text())["worst"])
        except (OSError, ValueError):
            time.sleep(0.05)
    return None


if __name__ == "__main__":
    main()
