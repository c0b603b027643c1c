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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_BYTES = 8 << 20
NOW = struct.Struct("<QdQQB255s")  # changes, since, optimizer steps, backwards, ended, doing


class Journal:
    """The files of this process. Raises OSError from the constructor only.

    `write` costs one system call, `doing` another (a few microseconds each).
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = f"{socket.gethostname()}-{os.getpid()}"
        self.process = os.getpid()
        flags = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC
        self._facts = os.open(folder / f"{self.name}.jsonl", flags | os.O_APPEND, 0o644)
        self._now = os.open(folder / f"{self.name}.now", flags, 0o644)
        self._written = 0
        self._changes = 0
        self.problem: OSError | None = None
        self.steps = 0
        self.backwards = 0
        self.text = "starting"
        self.since = time.time()

    def write(self, kind: str, **fact: Any) -> None:
        """Append one fact. Facts beyond `MAX_BYTES` are dropped, except the last one, `end`."""
        if self.problem is not None or os.getpid() != self.process:
            return
        line = json.dumps({"kind": kind, **fact}, separators=(",", ":"), default=str) + "\n"
        data = line.encode()
        if self._written + len(data) > MAX_BYTES and kind != "end":
            return
        self._written += len(data)
        try:
            os.write(self._facts, data)
        except OSError as error:
            self.problem = error

    def doing(self, text: str, ended: bool = False) -> None:
        """Say what the main thread does from now on."""
        self._changes += 1
        self.text = text
        self.since = time.time()
        if self.problem is not None or os.getpid() != self.process:
            return
        record = NOW.pack(
            self._changes, self.since, self.steps, self.backwards, ended, text.encode()[:255]
        )
        try:
            os.pwrite(self._now, record, 0)
        except OSError as error:
            self.problem = error


@dataclass(frozen=True)
class Now:
    """What a process was doing when it last changed what it does."""

    since: float
    steps: int
    backwards: int
    ended: bool
    doing: str


@dataclass(frozen=True)
class Pages:
    """One process's files, as read by the merge."""

    name: str
    facts: list[dict[str, Any]]
    now: Now | None


def read(folder: Path) -> list[Pages]:
    """Every process that wrote into `folder`, by name. Half-written last lines are left out."""
    pages = []
    for path in sorted(folder.glob("*.jsonl")):
        facts = []
        for line in path.read_bytes().split(b"\n")[:-1]:
            try:
                facts.append(json.loads(line))
            except ValueError:
                continue  # a disk that was full in the middle of a line
        pages.append(Pages(path.stem, facts, read_now(path.with_suffix(".now"))))
    return pages


def read_now(path: Path) -> Now | None:
    """The record of one `.now` file, or None as long as there is none."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < NOW.size:
        return None
    _, since, steps, backwards, ended, text = NOW.unpack(data[: NOW.size])
    doing = text.rstrip(b"\0").decode(errors="replace")
    return Now(since, steps, backwards, bool(ended), doing)


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
