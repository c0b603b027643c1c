"""Read a file that somebody handed in. Whatever it is, it cannot harm the process that reads it.

A regular file is opened without following links, and read up to a limit. Parsed JSON can take
thirty times the memory of its text. So it is parsed by a separate process (`python
notebook_file.py`) with limits on memory and time.
"""

import errno
import gc
import hashlib
import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

LARGEST = 100 * 2**20  # bytes of a notebook
LONGEST = 200_000  # characters of a cell
_MEMORY = 2**29  # bytes for parsing one
_SECONDS = 20  # of processor time for that
_MOST_CELLS = 10_000


class UnreadableError(ValueError):
    """The file cannot be graded; the text says why."""


def open_regular(path: Path) -> BinaryIO:
    """The file at `path`, which is a regular one and no link. Raises UnreadableError."""
    try:
        # Without O_NONBLOCK a pipe that nobody writes to would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        what = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise UnreadableError(f"the file cannot be read: {what}") from None
    except ValueError as error:
        raise UnreadableError(f"the file cannot be read: {error}") from None
    status, why = os.fstat(descriptor), ""
    if not stat.S_ISREG(status.st_mode):
        why = "the file cannot be read: it is not a regular file"
    elif status.st_size > LARGEST:
        why = f"the file has {status.st_size:,} bytes; clear its outputs and hand in again"
    if why:
        os.close(descriptor)
        raise UnreadableError(why)
    return open(descriptor, "rb")


def hash_of(path: Path) -> str:
    """A digest of the file's content, or why there is none."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except (UnreadableError, OSError):
        return "unreadable"


def code_cells(path: Path) -> list[dict[str, Any]]:
    """The code cells of the notebook: id, grade_id and source. Raises UnreadableError."""
    command = [sys.executable, "-I", "-S", __file__]
    try:
        with open_regular(path) as file:
            done = subprocess.run(command, stdin=file, capture_output=True, timeout=10 * _SECONDS)
        answer = json.loads(done.stdout)
    except UnreadableError:
        raise
    except (ValueError, subprocess.TimeoutExpired):
        raise UnreadableError(
            "the file takes too much memory or time to be read; clear its outputs and hand in again"
        ) from None
    if "unreadable" in answer:
        raise UnreadableError(answer["unreadable"])
    return answer["cells"]


def _cells_of(data: bytes) -> list[dict[str, Any]]:
    try:
        notebook = json.loads(data)
    except (ValueError, RecursionError):
        raise UnreadableError("the file is not a notebook: not JSON") from None
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise UnreadableError("the file is not a notebook of format 4: it has no list of cells")
    if notebook.get("nbformat") != 4:
        raise UnreadableError("the file is not a notebook of format 4; save it with Jupyter again")
    if len(notebook["cells"]) > _MOST_CELLS:
        raise UnreadableError(f"the notebook has {len(notebook['cells']):,} cells")
    found = [_reduced(cell) for cell in notebook["cells"]]
    return [cell for cell in found if cell is not None]


def _reduced(cell: Any) -> dict[str, Any] | None:
    """What is read of a code cell; None for another one."""
    if not isinstance(cell, dict) or cell.get("cell_type") != "code":
        return None
    source = cell.get("source", "")
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str):
        return None
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    try:
        grade_id = cell["metadata"]["nbgrader"]["grade_id"]
    except (KeyError, TypeError, IndexError):
        grade_id = None
    return {
        "id": cell["id"] if type(cell.get("id")) is str else None,
        "grade_id": grade_id if type(grade_id) is str else None,
        "source": source[: LONGEST + 1],
        "length": len(source),
    }


def _main() -> None:
    gc.disable()  # it would look through millions of lists again and again, and free none
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        answer: dict[str, Any] = {"cells": _cells_of(sys.stdin.buffer.read())}
    except UnreadableError as error:
        answer = {"unreadable": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()
