"""Run two commands, one after the other, until their optimizers have taken a few steps."""

import argparse
import json
import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_doctor.certificate.guard import (
    ENDED,
    STARTED,
    end_all_of,
    end_session,
    guard,
    guarded_folder,
    temporary_folder,
)
from ddp_doctor.certificate.starts import LAUNCHER, doctor_paths, error_in
from ddp_doctor.options import FOUND, UNCHECKED, say

TELL_EVERY = 20.0  # seconds after which a wait is explained
AFTER_DONE = 5.0  # seconds for what still waits for ranks that have left
TAKEN = re.compile(r"EADDRINUSE|address already in use", re.I)


class NotComparableError(Exception):
    """The two commands cannot be compared; the text says why."""


def main(words: Sequence[str]) -> int:
    """Compare, print, and return the exit code: 0 equal, 3 not equal, 4 not judged."""
    given = _parser().parse_args(words)
    try:
        names = _names(given.names)
        with guarded_folder() as folder:
            first, second = folder / "A", folder / "B"
            _run("A", given.first, first, given.steps, given.limit)
            given_to_second = {"weights": str(first), "names": names}
            _run("B", given.second, second, given.steps, given.limit, **given_to_second)
            from ddp_doctor.compare.verdict import conclude

            found = conclude(first, second)
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
    from ddp_doctor.certificate.files import read
    from ddp_doctor.compare.record import VARIABLE, Part

    if steps < 1:
        raise NotComparableError(f"--steps is {steps}: pass 1 or more.")
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    part = Part(str(folder), steps, **given)
    environment |= temporary_folder(folder) | {VARIABLE: json.dumps(asdict(part))}
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment | doctor_paths(),
            start_new_session=True,
        )
    guard().tell(STARTED, process.pid)
    try:
        ended = _wait(letter, process, folder, limit)
    finally:
        end_session(process.pid)
        end_all_of(folder)
        process.wait()
        guard().tell(ENDED, process.pid)
    if (folder / "other-shapes.pt").exists():
        raise NotComparableError(_other_shapes(*read(folder / "other-shapes.pt")))
    if list(folder.glob("done.*.pt")):
        return
    if not ended:
        why = f"did not take {steps} steps in {limit:g} s."
    elif process.returncode:
        why = _failure(process.returncode, folder)
    elif not list(folder.glob("gradient.0.*.pt")):
        why = "ended without a step of an optimizer of torch."
    else:
        return
    raise NotComparableError(f"Command {letter} {why}")


def _wait(letter: str, process: "subprocess.Popen[bytes]", folder: Path, limit: float) -> bool:
    """Until the command has ended, or rank 0 is done and has left. False after the limit."""
    started = told = time.monotonic()
    while process.poll() is None:
        now = time.monotonic()
        done = list(folder.glob("done.*.pt"))
        if done and time.time() - max(file.stat().st_mtime for file in done) > AFTER_DONE:
            return True
        if now - started > limit:
            return False
        if now - told > TELL_EVERY:
            told = now
            steps = len(list(folder.glob("gradient.*.0.pt")))
            say(f"compare: command {letter} runs for {now - started:.0f} s; steps so far: {steps}")
        time.sleep(0.05)
    return True


def _failure(code: int, folder: Path) -> str:
    text = (folder / "output").read_text(errors="replace")
    advice = ""
    if TAKEN.search(text):
        advice = " Its port is taken: launch it with torchrun --standalone, or name another port."
    return f"failed with exit code {code}: {error_in(text)}.{advice}"


def _other_shapes(wanted: dict[str, Any], found: dict[str, Any]) -> str:
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
