"""What one process writes down: facts, one JSON line each, and what it is doing at this moment.

Two files per process in the run's folder:

- `<host>-<pid>.jsonl`: the facts. At most `MAX_BYTES`; each line is on disk when `write` returns,
  so a process that is killed loses nothing.
- `<host>-<pid>.now`: one fixed-size record, overwritten in place, of what the main thread is doing.
  A merge in another process reads from it who waits for whom while the ranks are stuck.

Nothing here communicates with other ranks. A full disk ends the journal, not the run.
"""

import json
import os
import socket
import struct
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ddp_doctor.facts.types import Facts, no_facts

MAX_BYTES = 16 << 20
OLD = 60.0  # seconds after which a process that has ended is an earlier run's
OLD_ELSEWHERE = 3600.0  # the same, if only its silence says so: longer than any group's timeout
NOW = struct.Struct("<dQB255s")  # since, optimizer steps, ended, doing


class _File:
    """An open file. A script may close all descriptors, and open files of its own with the number.

    Then it is opened again: nothing is ever written to another file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._open(os.O_TRUNC)

    def _open(self, flags: int = 0) -> None:
        if self.path.suffix == ".jsonl":
            flags |= os.O_APPEND  # with it, pwrite would append, too
        flags |= os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC
        self._number = os.open(self.path, flags, 0o644)
        self._is = self._identity()

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = os.fstat(self._number)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def number(self) -> int:
        """The descriptor, still of this file. Raises OSError."""
        if self._identity() != self._is:
            self._open()
        return self._number


class Journal:
    """The files of this process. Raises OSError from the constructor only.

    `write` costs two system calls, as does `set_status` (a few microseconds each).
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = f"{socket.gethostname()}-{os.getpid()}"
        self.process = os.getpid()
        # Empty at first: in a container, a later run's process can have the same host and pid.
        self._facts = _File(folder / f"{self.name}.jsonl")
        self._now = _File(folder / f"{self.name}.now")
        self._written = 0
        self.problem: OSError | None = None
        self.cut = False  # whether facts did not fit
        self.steps = 0
        self.text = "starting"
        self.since = time.time()

    def write(self, kind: str, **fact: Any) -> None:
        """Append one fact. Facts beyond `MAX_BYTES` are dropped, except the last one, `end`."""
        if self.problem is not None or os.getpid() != self.process:
            return
        line = json.dumps({"kind": kind, **fact}, separators=(",", ":"), default=str) + "\n"
        data = line.encode()
        if self._written + len(data) > MAX_BYTES and kind != "end":
            self.cut = True
            return
        self._written += len(data)
        try:
            os.write(self._facts.number(), data)
        except OSError as error:
            self.problem = error

    def set_status(self, text: str, ended: bool = False) -> None:
        """Say what the main thread does from now on."""
        self.text = text
        self.since = time.time()
        if self.problem is not None or os.getpid() != self.process:
            return
        record = NOW.pack(self.since, self.steps, ended, text.encode()[:255])
        try:
            os.pwrite(self._now.number(), record, 0)
        except OSError as error:
            self.problem = error


@dataclass(frozen=True)
class Status:
    """What a process was doing when it last changed what it does."""

    since: float
    steps: int
    ended: bool
    doing: str


@dataclass(frozen=True)
class ProcessJournal:
    """One process's files, as read by the merge."""

    name: str
    facts: Facts
    status: Status | None

    @property
    def pid(self) -> int:
        return int(self.name.rsplit("-", 1)[1])

    @property
    def here(self) -> bool:
        """Whether the process runs, or ran, on this host: only then `alive` can tell."""
        return self.name.rsplit("-", 1)[0] == socket.gethostname()

    @property
    def ended(self) -> bool:
        return self.status is not None and self.status.ended


def read(folder: Path) -> list[ProcessJournal]:
    """Every process that wrote into `folder`, by name. Half-written last lines are left out."""
    return [
        replace(journal, facts=_facts(folder / f"{journal.name}.jsonl"))
        for journal in read_statuses(folder)
    ]


def read_statuses(folder: Path) -> list[ProcessJournal]:
    """As `read`, without the facts: one read of a few hundred bytes per process."""
    return [
        ProcessJournal(path.stem, no_facts(), status_of(path.with_suffix(".now")))
        for path in sorted(folder.glob("*.jsonl"))
    ]


def world_size(folder: Path) -> int:
    """The number of ranks in the largest group that a process of `folder` joined; else 1."""
    groups = [fact for journal in read(folder) for fact in journal.facts["group"]]
    return max((fact["world"] for fact in groups), default=1)


def remove_old(folder: Path) -> None:
    """Remove what an earlier run left in `folder`. Called before a run's ranks have written.

    Runs on several hosts have a folder in common if they have an address, a port, and an id in
    common. The age of a file is measured by the clock of the disk that it is on. A process of
    another host that has not ended may be a rank of this run that has waited for rank 0.
    """
    clock = folder / f".clock-{os.getpid()}"
    try:
        clock.touch()
        now = clock.stat().st_mtime
        clock.unlink()
        for journal in read_statuses(folder):
            files = [folder / f"{journal.name}.jsonl", folder / f"{journal.name}.now"]
            age = now - max(file.stat().st_mtime for file in files)
            over = journal.ended or (journal.here and not alive(journal.pid))
            if age > (OLD if over else OLD_ELSEWHERE) and (over or not journal.here):
                for file in files:
                    file.unlink()
    except OSError:
        pass  # someone else removed them, or the disk is read-only: the report names what it reads


def _facts(path: Path) -> Facts:
    facts = no_facts()
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError:
        return facts  # the folder was removed while its run goes on
    for line in lines:
        try:
            fact: Any = json.loads(line)
        except ValueError:
            continue  # a disk that was full in the middle of a line
        kind = fact.pop("kind")
        if kind in facts:
            cast(dict[str, list[Any]], facts)[kind].append(fact)
    return facts


def status_of(path: Path) -> Status | None:
    """The record of one `.now` file, or None as long as there is none."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < NOW.size:
        return None
    since, steps, ended, text = NOW.unpack(data[: NOW.size])
    doing = text.rstrip(b"\0").decode(errors="replace")
    return Status(since, steps, bool(ended), doing)


def write_whole(path: Path, text: str) -> None:
    """Write a file that is whole or absent. A pipe or a device is written as it is.

    Raises OSError, for example because the disk is full; what stood at `path` stays then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def alive(pid: int) -> bool:
    """Whether a process of this host is there and not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not Path("/proc").is_dir()
