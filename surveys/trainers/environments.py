"""Repeat rows in their locked environment, and print their cells beside the stored ones.

    python -m surveys.trainers run lightning

`locks` has one file per group of rows that can share an environment. The environment is kept in
~/.cache/miniddp-surveys, or where SURVEYS_CACHE says, and nothing of the checkout is changed.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from labkit.tables import table
from surveys.trainers.families import properties
from surveys.trainers.measure import measure
from surveys.trainers.promises import entry
from surveys.trainers.stored import rows
from surveys.trainers.trainers import TRAINERS, version

ROOT = Path(__file__).resolve().parents[2]
LOCKS = Path(__file__).with_name("locks")
CACHE = Path(os.environ.get("SURVEYS_CACHE", Path.home() / ".cache/miniddp-surveys"))


def repeat(words: Sequence[str]) -> int:
    """The command `run`: 0 if each cell is as stored, 1 if one is not, 2 if nothing could run."""
    parser = argparse.ArgumentParser(
        prog="python -m surveys.trainers run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trainers", nargs="+", choices=list(TRAINERS), metavar="ROW")
    here = "in this environment, whatever its versions; nothing is installed"
    parser.add_argument("--here", action="store_true", help=here)
    options = "for uv, instead of --torch-backend cpu: an index, a folder of wheels"
    parser.add_argument("--pip-options", default="", metavar="OPTIONS", help=options)
    given = parser.parse_args(words)
    groups: dict[Path, list[str]] = {}
    for name in given.trainers:
        groups.setdefault(lock_of(name), []).append(name)
    same = True
    for lock, names in groups.items():
        try:
            python = Path(sys.executable) if given.here else environment(lock, given.pip_options)
        except subprocess.CalledProcessError as error:
            print(f"{lock.name} could not be installed: {shlex.join(error.cmd)}", file=sys.stderr)
            return 2
        command = [str(python), "-m", "surveys.trainers.environments", *names]
        done = subprocess.run(command, cwd=ROOT, check=False)
        same &= done.returncode == 0
    return 0 if same else 1


def lock_of(name: str) -> Path:
    """The smallest lock that has all that the row needs. Raises LookupError if none has."""
    needs = {normal(one) for one in ("torch", *TRAINERS[name].needs)}
    fitting = [one for one in LOCKS.glob("*.txt") if needs <= locked(one).keys()]
    if not fitting:
        raise LookupError(f"no file of {LOCKS} has {', '.join(sorted(needs))}: lock them first.")
    return min(fitting, key=lambda one: len(locked(one)))


def locked(lock: Path) -> dict[str, str]:
    pins = re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(), re.MULTILINE)
    return {normal(name): pin for name, pin in pins}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def environment(lock: Path, options: str) -> Path:
    """The Python of the lock's environment, which is made if it is not there, or not complete."""
    folder = CACHE / lock.stem
    python, complete = folder / "bin/python", folder / "installed.txt"
    if not complete.exists() or complete.read_text() != lock.read_text():
        print(f"{folder} gets the packages of {lock.relative_to(ROOT)}.", flush=True)
        venv.create(folder, with_pip=False, clear=True)
        command = [sys.executable, "-m", "uv", "pip", "install", "--python", str(python)]
        # The lock is complete: what its packages ask for beyond it conflicts, or needs a GPU.
        command += ["--no-deps", "--quiet", "--requirements", str(lock)]
        command += shlex.split(options) or ["--torch-backend", "cpu"]
        subprocess.run(command, check=True)
        (site,) = folder.glob("lib/*/site-packages")  # as an editable install of the checkout
        (site / "checkout.pth").write_text(f"{ROOT}\n{ROOT / 'src'}\n")
        complete.write_text(lock.read_text())
    return python


def compare(names: Sequence[str]) -> int:
    """Measure the rows with what is installed here; a table of what is stored, and of what is not
    as stored. 1 if a cell is not.
    """
    stored = {row["trainer"]: row for row in rows()}
    found = measure(names, properties())
    lines, same = [], True
    for (name, one), cell in found.items():
        before = stored.get(name, {"cells": {}})["cells"].get(one, {"text": "–"})
        same &= before["text"] == cell.text
        verdict = entry(name).verdict(one, cell.text)
        changed = "" if before["text"] == cell.text else cell.detail[:60] or "not as stored"
        lines.append([name, one, before["text"], cell.text, verdict, changed])
    needs = dict.fromkeys(need for name in names for need in ("torch", *TRAINERS[name].needs))
    print(", ".join(f"{need} {version(need) or 'not installed'}" for need in needs))
    for name in names:
        if name in stored:
            pins = ", ".join(f"{one} {pin}" for one, pin in stored[name]["versions"].items())
            print(f"{name}, stored on {stored[name]['date']}: {pins}")
    print(table(["trainer", "property", "stored", "now", "verdict", "change"], lines))
    return 0 if same and found else 1


if __name__ == "__main__":
    sys.exit(compare(sys.argv[1:]))
