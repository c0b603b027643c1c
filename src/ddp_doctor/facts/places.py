"""Where in the user's code something happens: file and line, and the expression at that place."""

import linecache
import os
import sys
import sysconfig
import zlib
from functools import lru_cache
from types import FrameType, TracebackType

_THIS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PATHS = sysconfig.get_paths()
_STANDARD = tuple(
    os.path.realpath(_PATHS[name]) + os.sep for name in ("stdlib", "platstdlib") if name in _PATHS
)
_NOT_THE_PROGRAM = ("", "torch", "ddp_doctor")


@lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Whether the file is neither the doctor's, nor Python's, nor an installed package's."""
    if filename.startswith("<"):
        return filename.startswith("<ipython")
    path = os.path.realpath(filename)
    if path.startswith(_THIS + os.sep) or f"{os.sep}site-packages{os.sep}" in path:
        return False
    if f"{os.sep}dist-packages{os.sep}" in path:
        return False
    return not path.startswith(_STANDARD)


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's code among `frame` and its callers."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def users_trace(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the doctor's own frames at its beginning."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_THIS + os.sep):
        trace = trace.tb_next
    return trace


def callers_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is the user's, or a library's that the user has installed."""
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name) or _package_file(name).split(os.sep)[0] not in _NOT_THE_PROGRAM:
            return frame
        frame = frame.f_back
    return None


@lru_cache(maxsize=4096)
def _package_file(filename: str) -> str:
    """The path of an installed file from its package on; empty for other files."""
    parts = os.path.realpath(filename).split(os.sep)
    at = [at for at, part in enumerate(parts) if part in ("site-packages", "dist-packages")]
    return os.sep.join(parts[at[-1] + 1 :]) if at else ""


@lru_cache(maxsize=4096)
def shown(filename: str) -> str:
    """A file as a reader knows it: relative, if it is below the current folder."""
    if filename.startswith("<ipython") or f"{os.sep}ipykernel_" in filename:
        return "<cell>"
    if filename.startswith("<"):
        return filename
    path = os.path.abspath(filename)
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def place(frame: FrameType | None = None) -> str:
    """`file:line` of the user's innermost frame, or `package/file.py:line` in an installed program.

    An empty string if there is neither.
    """
    frame = frame or sys._getframe(1)
    frame = users_frame(frame) or callers_frame(frame)
    if frame is None:
        return ""
    name = frame.f_code.co_filename
    return f"{_package_file(name) or shown(name)}:{frame.f_lineno}"


def call() -> int:
    """A hash of the lines of the user's code that are being executed, innermost first.

    Two calls of one helper differ, two rounds of a loop do not.
    """
    frame = users_frame(sys._getframe(1))
    lines: list[str] = []
    while frame is not None:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = users_frame(frame.f_back)
    return zlib.crc32(" ".join(lines).encode())


def stack(frame: FrameType | None, limit: int = 12) -> list[str]:
    """The frames from innermost outwards, `file:line in function`; the doctor's own left out."""
    lines: list[str] = []
    while frame is not None and len(lines) < limit:
        name = frame.f_code.co_filename
        if not os.path.realpath(name).startswith(_THIS + os.sep):
            lines.append(f"{shown(name)}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return lines


def expression(frame: FrameType | None = None) -> str:
    """The source text of the operation that a caller is executing; see `callers_frame`."""
    frame = callers_frame(frame or sys._getframe(1))
    if frame is None:
        return ""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    if not lines or frame.f_lasti < 0:
        return ""
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    first, last, start, end = positions
    if first is None or last is None or start is None or end is None or last > len(lines):
        return ""
    chosen = [line.encode() for line in lines[first - 1 : last]]
    chosen[-1] = chosen[-1][:end]
    chosen[0] = chosen[0][start:]
    return b"".join(chosen).decode(errors="replace").strip()[:200]
