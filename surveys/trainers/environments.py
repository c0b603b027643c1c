"""Repeat rows in their locked environment, beside what is stored.

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
from collections.abc import Mapping, Sequence
from pathlib import Path

from labkit.tables import table
from surveys.trainers.families import FAMILIES, properties
from surveys.trainers.measure import Cell, Judged, Key, measure
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
    sources = "for uv, instead of --torch-backend cpu: an index, a folder of wheels"
    parser.add_argument("--pip-options", default="", metavar="OPTIONS", help=sources)
    given = parser.parse_args(words)
    groups: dict[Path | None, list[str]] = {}
    for name in given.trainers:
        groups.setdefault(None if given.here else lock_of(name), []).append(name)
    same = True
    for lock, group in groups.items():
        try:
            python = environment(lock, given.pip_options) if lock else Path(sys.executable)
        except subprocess.CalledProcessError as error:
            print(
                f"{lock} could not be installed: {shlex.join(error.cmd)}. Where PyTorch's index"
                " cannot be had, --pip-options names another source.",
                file=sys.stderr,
            )
            return 2
        command = [str(python), "-m", "surveys.trainers.environments", *group]
        done = subprocess.run(command, cwd=ROOT, check=False)
        same &= done.returncode == 0
    return 0 if same else 1


def lock_of(name: str) -> Path:
    """`core` if it has all that the row needs, else the smallest lock that has. Raises LookupError
    if none has.
    """
    needs = {normal(one) for one in ("torch", *TRAINERS[name].needs)}
    fitting = [one for one in LOCKS.glob("*.txt") if needs <= locked(one).keys()]
    if not fitting:
        raise LookupError(f"no file of {LOCKS} has {', '.join(sorted(needs))}: lock them first.")
    return min(fitting, key=lambda one: (one.stem != "core", len(locked(one))))


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
    """Measure the rows with what is installed here, and print them; a cell that is not as stored
    has what is stored, too. 1 if there is one, or if a row could not run.
    """
    stored = {row["trainer"]: row for row in rows() if row["trainer"] in names}
    found = measure(names, properties())
    before = {
        (name, one): of["text"] for name in stored for one, of in stored[name]["cells"].items()
    }
    changed = {key: before.get(key, "–") for key in found if before.get(key) != found[key].text}
    print(report(names, properties(), found, changed))
    for name, row in stored.items():
        pins = ", ".join(f"{one} {pin}" for one, pin in row["versions"].items())
        print(f"{name}, stored on {row['date']}: {pins}")
    print(f"{len(found) - len(changed)} of {len(found)} cells are as stored.")
    return 1 if changed or {name for name, _ in found} != set(names) else 0


def report(
    names: Sequence[str], columns: Sequence[str], judged: Judged, stored: Mapping[Key, str] = {}
) -> str:
    """The versions, a table per family, and what was measured where a cell is not equal.

    `stored` has what is stored where that is something else.
    """
    used = dict.fromkeys(["torch", *(one for name in names for one in TRAINERS[name].needs)])
    parts = [", ".join(f"{one} {version(one)}" for one in used if version(one))]
    for family in FAMILIES.values():
        shown = [one for one in columns if one in family.columns]
        lines = []
        for name in (name for name in names if TRAINERS[name].family == family):
            missing = " ".join(TRAINERS[name].missing())
            cells = [judged.get((name, one), Cell("–")).text for one in shown]
            said = [
                f"{cell} (stored: {stored[name, one]})" if (name, one) in stored else cell
                for one, cell in zip(shown, cells, strict=True)
            ]
            wanted = f"not installed: {missing}" if missing else TRAINERS[name].wanted
            lines.append([name, wanted, *said])
        if lines and shown:
            parts.append(table(["trainer", "compared with", *shown], lines))
    details = [
        [*key, " ".join(cell.detail.split())[:90]]
        for key, cell in judged.items()
        if cell.detail and key[1] in columns
    ]
    if details:
        parts.append(table(["trainer", "property", "measured"], details))
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(compare(sys.argv[1:]))
