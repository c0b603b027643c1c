"""What a rank may not do: the parts of its prison that a process builds around itself (Linux).

bubblewrap has built the outer wall before this process began: a file system of its own that cannot
be written, no network, no other process in sight. Here, inside it, each rank gets walls against the
other ranks and against the fork server, and limits on what it may use.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
import sys

# From <linux/sched.h>, <sys/mount.h> and <linux/prctl.h>; Python 3.11 has no wrappers for them.
_NEW_USER, _NEW_PID, _NEW_NET, _NEW_IPC, _NEW_MOUNTS = (
    0x10000000,
    0x20000000,
    0x40000000,
    0x08000000,
    0x00020000,
)
_NOSUID_NODEV = 0x2 | 0x4
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_PR_SET_CHILD_SUBREAPER = 36
_UP_AND_RUNNING, _SIOCSIFFLAGS = 0x1 | 0x40, 0x8914

_libc = ctypes.CDLL(None, use_errno=True)
_LINUX = sys.platform.startswith("linux")
_PAGE = resource.getpagesize()


MEMORY = 2 * 2**30  # bytes of data of one process
OF_A_GROUP = 3 * 2**30  # bytes that all processes of a group may use beyond what they inherited
FILE = 16 * 2**20  # bytes of one file
FOLDER = "64m"  # bytes of all files of a rank
PROCESSES = 24  # of one rank, threads included


def _prctl(option: int, value: int) -> None:
    if _LINUX:
        _libc.prctl(option, value, 0, 0, 0)


def separate() -> bool:
    """Leave the user, process, network and IPC namespaces of the caller. The next child is pid 1.

    False where the system does not allow it; nothing has changed then.
    """
    user, group = os.getuid(), os.getgid()
    flags = _NEW_USER | _NEW_PID | _NEW_NET | _NEW_IPC | _NEW_MOUNTS
    if _libc.unshare(flags) != 0:
        return False
    # Only who can be attached to owns its files in /proc. No code of a student's runs here yet.
    _prctl(_PR_SET_DUMPABLE, 1)
    with contextlib.suppress(OSError):
        _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")
    unreadable_by_others()
    return True


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def own_folders(*folders: str) -> None:
    """Put an empty file system of FOLDER bytes over each folder, gone with the last process."""
    for folder in folders:
        options = f"size={FOLDER},mode=700".encode()
        if _libc.mount(b"tmpfs", folder.encode(), b"tmpfs", _NOSUID_NODEV, options) != 0:
            raise OSError(ctypes.get_errno(), f"cannot give the rank its own {folder}")


def hide_processes() -> None:
    """Show only the processes of this namespace under /proc, or none where that is not allowed."""
    if _libc.mount(b"proc", b"/proc", b"proc", _NOSUID_NODEV, None) != 0:
        _libc.mount(b"tmpfs", b"/proc", b"tmpfs", _NOSUID_NODEV, b"size=4k")


def raise_loopback() -> None:
    """Switch the loopback interface of a new network namespace on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _UP_AND_RUNNING))


def adopt_orphans() -> None:
    """Become the parent of every process below whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def unreadable_by_others() -> None:
    """No process of the same user can attach to this one, nor to its children by fork."""
    _prctl(_PR_SET_DUMPABLE, 0)


def no_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def limit(seconds: int, contained: bool) -> None:
    """Bound what this process and its children may use. `seconds` are of processor time."""
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        # DATA, not AS: torch maps far more address space than it uses.
        (resource.RLIMIT_DATA, MEMORY),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        _lower(kind, most)
    if contained:
        # Outside a namespace of its own it would count the user's other processes, too.
        _lower(resource.RLIMIT_NPROC, PROCESSES)


def _lower(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    # A second of processor time between the soft limit, which names itself, and the hard one.
    above = 1 if kind == resource.RLIMIT_CPU and most != hard else 0
    resource.setrlimit(kind, (most, most + above))


class Below:
    """The processes below the caller, by a /proc that was open before it was hidden."""

    def __init__(self) -> None:
        self._proc = os.open("/proc", os.O_RDONLY) if os.path.isdir("/proc/self") else -1
        self._own = int(os.readlink("self", dir_fd=self._proc)) if self._proc >= 0 else 0
        self._inherited = self._resident(self._own)

    def pids(self) -> list[int]:
        """Every process below, zombies aside; empty where there is no /proc."""
        if self._proc < 0:
            return []
        parents = {}
        for name in filter(str.isdigit, os.listdir(self._proc)):
            state, parent = self._stat(name)
            if state != "Z":
                parents[int(name)] = parent
        found: list[int] = []
        frontier = {self._own}
        while frontier:
            frontier = {pid for pid, parent in parents.items() if parent in frontier}
            found += frontier
        return found

    def memory(self) -> int:
        """Bytes that they have in memory, beyond what each inherited from the fork server."""
        return sum(max(0, self._resident(pid) - self._inherited) for pid in self.pids())

    def _stat(self, name: str) -> tuple[str, int]:
        fields = self._read(f"{name}/stat").rpartition(")")[2].split()
        return (fields[0], int(fields[1])) if fields else ("Z", 0)

    def _resident(self, pid: int) -> int:
        fields = self._read(f"{pid}/statm").split()
        return int(fields[1]) * _PAGE if fields else 0

    def _read(self, path: str) -> str:
        try:
            file = os.open(path, os.O_RDONLY, dir_fd=self._proc)
        except OSError:  # it has ended meanwhile
            return ""
        try:
            return os.read(file, 4096).decode(errors="replace")
        except OSError:
            return ""
        finally:
            os.close(file)
