"""Start the fork server of ranks: inside bubblewrap where it works, or, if told so, in the open.

bubblewrap gives it a file system in which nothing can be written and little can be seen: Python,
its packages, and the folder `grader.inside`. No assignment, no key, no home, no network.
"""

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from grader.ranks import run_group

_PACKAGE = Path(__file__).parent
_MOUNTED = "/opt/grader"
# Searching for garbage would take a quarter of the time in which torch is loaded.
_START = (
    "import gc, sys; gc.disable(); sys.path.insert(0, sys.argv[1]); "
    "from grader.inside.zygote import serve; serve(sys.argv[2] == 'contained', int(sys.argv[3]))"
)
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "USER": "student", "OMP_NUM_THREADS": "1"}

_OTHERWISE = (
    "grade in a container (book/teach/teach.md has the command), or, for your own work only, "
    "say --trust."
)
ADVICE = f"Install bubblewrap (Debian: apt-get install bubblewrap), {_OTHERWISE}"


# What the warden of a group reports, the weakest first, and what a result says of it.
INSIDE = {
    "none": "bubblewrap, and nothing between the ranks in it",
    "a namespace per group": "bubblewrap, a namespace per group of ranks",
    "a namespace per rank": "bubblewrap, a namespace per rank",
}
TRUSTED = "none: trusted"


class SandboxError(RuntimeError):
    """The fork server cannot be started as asked."""


@dataclass(frozen=True)
class RankServer:
    """A running fork server. `isolation` is a phrase for people: what a trial at its start had."""

    address: str
    isolation: str
    pid: int

    def weakest(self, reported: Iterable[str]) -> str:
        """For a result: the least that was in force, at the start or in a group of ranks."""
        if self.isolation == TRUSTED:
            return TRUSTED
        order = list(INSIDE.values())
        return min([self.isolation, *(INSIDE[one] for one in reported)], key=order.index)


@contextmanager
def rank_server(*, trust: bool = False) -> Iterator[RankServer]:
    """A fork server that ends, with all its ranks, when the block does or this process dies.

    Before it is handed out it runs a trial. `trust` permits a server without a sandbox, or with
    less of one, where bubblewrap or the namespaces inside it do not work. Raises SandboxError.
    Costs about 1.5 s, most of it the import of torch.
    """
    hidden = _hidden_by_the_sandbox()
    if hidden and not trust:
        raise SandboxError(
            f"Python or its packages are in {hidden}, and the sandbox gives every rank an empty "
            f"{Path(hidden).parts[1]!r} folder of its own, so nothing was run. Move the checkout "
            "out of /tmp and /dev, or, for your own work only, say --trust."
        )
    bubblewrap = [] if hidden else _working_bubblewrap()
    if not bubblewrap and not trust:
        raise SandboxError(f"bubblewrap does not work here, so nothing was run. {ADVICE}")
    with tempfile.TemporaryDirectory(prefix="grader-", ignore_cleanup_errors=True) as folder:
        address = str(Path(folder, "ranks"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            command = _contained(bubblewrap) if bubblewrap else _in_the_open()
            # No preexec_fn: it is not safe beside threads, and a caller may have some.
            server = subprocess.Popen(
                [*command, str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
                pass_fds=[listener.fileno()],
            )
        try:
            if server.stdout.readline() != b"ready\n":
                raise SandboxError("the fork server of ranks did not start; what it says is above")
            isolation = _try_out(address) if bubblewrap else TRUSTED
            if isolation not in (INSIDE["a namespace per rank"], TRUSTED) and not trust:
                raise SandboxError(
                    "bubblewrap works here, but inside it no rank gets a namespace of its own, so "
                    f"nothing was run. Raise user.max_user_namespaces (sysctl), {_OTHERWISE}"
                )
            yield RankServer(address, isolation, server.pid)
        finally:
            server.stdin.close()
            try:
                server.wait(5)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            server.stdout.close()


def _try_out(address: str) -> str:
    """The isolation that a group of ranks reports. Raises SandboxError if it does not end well."""
    check = "def on_rank(student, given):\n    return 1\n"
    trial = {"call": "on_rank", "cells": [], "check": check, "given": {}, "rank": 0, "seed": 0}
    trial |= {"world_size": 1, "link": "routed", "torch_ddp": True, "seconds": 3}
    end = run_group(address, [trial])
    if end.ranks[0].how != "returned":
        raise SandboxError(f"the sandbox starts, and a trial rank in it {end.ranks[0].text}")
    return INSIDE[end.isolation]


def _in_the_open() -> list[str]:
    return [sys.executable, "-I", "-c", _START, str(_PACKAGE.parent), "open"]


def _contained(bubblewrap: list[str]) -> list[str]:
    return [*bubblewrap, sys.executable, "-I", "-c", _START, _MOUNTED, "contained"]


def _working_bubblewrap() -> list[str]:
    """The words of the command that precede the program; none if a trial of it fails."""
    if not sys.platform.startswith("linux") or not shutil.which("bwrap"):
        return []
    words = ["bwrap", *_walls()]
    trial = [*words, sys.executable, "-I", "-c", ""]
    done = subprocess.run(trial, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    return words if done.returncode == 0 else []


def _walls() -> list[str]:
    words = [
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    if os.getuid() != 0:
        # Run by root, the fork server changes to an unprivileged user itself: only a real change
        # of user makes the limit on processes count.
        words.append("--unshare-user")
    words += ["--die-with-parent", "--hostname", "sandbox", "--clearenv"]
    # First of all: Python itself may lie below /tmp, and a later mount would hide it.
    words += ["--perms", "1777", "--tmpfs", "/tmp"]
    visible = _visible()
    # Open to the unprivileged user, too: what bubblewrap makes by itself is its own user's alone.
    for parent in sorted({str(up) for path in visible for up in Path(path).parents} - {"/"}):
        words += ["--perms", "0755", "--dir", parent]
    for path in visible:
        words += ["--ro-bind", path, path]
    for name in ("bin", "lib", "lib64", "sbin"):
        path = Path("/", name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            words += ["--ro-bind", str(path), str(path)]
    for path in _covered():
        words += ["--tmpfs", path]
    for parent in ("/opt", _MOUNTED, f"{_MOUNTED}/grader"):
        words += ["--perms", "0755", "--dir", parent]
    words += ["--ro-bind", str(_PACKAGE / "__init__.py"), f"{_MOUNTED}/grader/__init__.py"]
    words += ["--ro-bind", str(_PACKAGE / "inside"), f"{_MOUNTED}/grader/inside"]
    words += ["--proc", "/proc", "--dev", "/dev", "--chdir", "/"]
    for name, value in _ENVIRONMENT.items():
        words += ["--setenv", name, value]
    return [*words, "--remount-ro", "/"]


def _visible() -> list[str]:
    """Python, its packages, the system's libraries: once each, the outer folder first."""
    wanted = {
        "/usr",
        "/etc/ld.so.cache",
        sys.prefix,
        sys.base_prefix,
        sysconfig.get_path("purelib"),
        str(Path(sys.executable).resolve().parent.parent),
    }
    found: list[Path] = []
    for path in sorted(map(Path, wanted)):
        if path.exists() and not any(path.is_relative_to(outer) for outer in found):
            found.append(path)
    return [str(path) for path in found]


def _hidden_by_the_sandbox() -> str:
    """What a rank needs and could not see, because it lies where ranks have empty folders."""
    if not sys.platform.startswith("linux") or not shutil.which("bwrap"):
        return ""
    covered = [Path("/tmp"), Path("/dev")]
    for path in map(Path, _visible()):
        if any(path.is_relative_to(folder) for folder in covered):
            return str(path)
    return ""


def _covered() -> list[str]:
    """Installed packages of this project, which hold the answers: hidden by an empty folder."""
    packages = Path(sysconfig.get_path("purelib"))
    return [str(packages / n) for n in ("miniddp", "labkit", "grader") if (packages / n).is_dir()]
