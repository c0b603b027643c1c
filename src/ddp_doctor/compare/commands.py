"""Run two commands, one after the other, until their optimizers have taken a few steps."""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_doctor.certificate.guard import FOLDER, guard
from ddp_doctor.certificate.starts import LAUNCHED, said
from ddp_doctor.options import FOUND, UNCHECKED, say
from ddp_doctor.run.folders import SITE

TELL_EVERY = 20.0  # seconds after which a wait is explained
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class NotComparableError(Exception):
    """The two commands cannot be compared; the text says why."""


def main(words: Sequence[str]) -> int:
    """Compare, print, and return the exit code: 0 equal, 3 not equal, 4 not judged."""
    given = _parser().parse_args(words)
    try:
        names = _names(given.names)
        with tempfile.TemporaryDirectory(prefix="ddp-doctor-") as name:
            guard().tell(FOLDER, name)
            folders = Path(name) / "A", Path(name) / "B"
            _run("A", given.first, folders[0], given.steps, given.limit)
            given_to_second = {"weights": str(folders[0]), "names": names}
            _run("B", given.second, folders[1], given.steps, given.limit, **given_to_second)
            from ddp_doctor.compare.verdict import conclude

            found = conclude(*folders)
    except NotComparableError as error:
        say(f"compare: NOT JUDGED. {error}")
        return UNCHECKED
    print(found.as_text(given.first, given.second))
    return {"equal": 0, "not judged": UNCHECKED}.get(found.verdict, FOUND)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddp_doctor compare",
        description="Runs two commands from the same weights, and compares what their optimizers "
        "get in the first steps. Both run in a shell, so each may begin with `cd FOLDER &&`. The "
        "exit code is 0 if they are equal, 3 if not, and 4 if that cannot be judged.",
    )
    add = parser.add_argument
    add("first", help="a command, in quotes; its rank 0's weights are those of both")
    add("second", help="the other command")
    add("--steps", type=int, default=3, help="compare so many steps of each optimizer (3)")
    add("--limit", type=float, default=600.0, help="seconds that a command may take (600)")
    add("--names", help="a JSON file: {name of a parameter of the second: its name in the first}")
    return parser


def _names(file: str | None) -> dict[str, str] | None:
    if file is None:
        return None
    try:
        names = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise NotComparableError(f"--names {file} cannot be read: {error}.") from None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise NotComparableError(f"--names {file} holds no JSON object of names.")
    return names


def _run(letter: str, command: str, folder: Path, steps: int, limit: float, **given: Any) -> None:
    """Run a command until it has recorded `steps` steps. Raises NotComparableError."""
    from ddp_doctor.compare.record import Part

    if steps < 1:
        raise NotComparableError(f"--steps is {steps}: pass 1 or more.")
    (folder / "tmp").mkdir(parents=True)
    part = Part(str(folder), steps, os.getpid(), **given)
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    paths = [str(SITE), str(SITE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    _adopt_orphans()
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment | part.environment() | {"TMPDIR": str(folder / "tmp")},
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    try:
        ended = _wait(letter, process, folder, limit)
    finally:
        _end_all()
    if (folder / "other-shapes.json").exists():
        raise NotComparableError(_other_shapes(folder / "other-shapes.json"))
    if list(folder.glob("done.*.json")):
        return
    text = (folder / "output").read_text(errors="replace")
    if not ended:
        raise NotComparableError(f"Command {letter} did not take {steps} steps in {limit:g} s.")
    if process.returncode:
        what = f"failed with exit code {process.returncode}: {said(text)}"
        raise NotComparableError(f"Command {letter} {what}.")
    if not list(folder.glob("gradient.0.*.pt")):
        raise NotComparableError(f"Command {letter} ended without a step of an optimizer of torch.")


def _wait(letter: str, process: "subprocess.Popen[bytes]", folder: Path, limit: float) -> bool:
    """Until the command has ended, or rank 0 is done and has left. False after the limit."""
    started = told = time.monotonic()
    while process.poll() is None:
        now = time.monotonic()
        done = list(folder.glob("done.*.json"))
        if done and time.time() - max(file.stat().st_mtime for file in done) > 5.0:
            return True  # the ranks have left; whatever still waits for them is not wanted
        if now - started > limit:
            return False
        if now - told > TELL_EVERY:
            told = now
            steps = len(list(folder.glob("gradient.*.0.pt")))
            say(f"compare: command {letter} runs for {now - started:.0f} s; steps so far: {steps}")
        time.sleep(0.05)
    return True


def _other_shapes(file: Path) -> str:
    wanted, found = json.loads(file.read_text())
    for name in wanted:
        if name in found and wanted[name] != found[name]:
            return f"{name} has the shape {wanted[name]} in A and {found[name]} in B."
    only = {
        letter: sorted(ours.keys() - others.keys())
        for letter, ours, others in (("A", wanted, found), ("B", found, wanted))
    }
    listed = "; ".join(
        f"only {at} has {', '.join(names[:3])}{', …' * (len(names) > 3)}"
        for at, names in only.items()
        if names
    )
    return f"The models have other parameters: {listed}. A map of names can be given: --names."


def _adopt_orphans() -> None:
    """On Linux, what outlives its parent becomes a child of this process, which ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_all() -> None:
    """Kill all that runs below this process, until nothing does."""
    while below := _below(os.getpid()):
        for process in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _below(process: int) -> list[int]:
    """The processes that this one has started, and those that they have started (Linux)."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found: list[int] = []
    fresh = [process]
    while fresh:
        fresh = [child for child, parent in parents.items() if parent in fresh]
        found += fresh
    return found
