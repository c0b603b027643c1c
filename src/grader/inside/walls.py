"""What a rank may not do: the parts of its prison that a process builds around itself (Linux).

bubblewrap has built the outer wall before this process began: a file system of its own that cannot
be written, no network, no other process in sight. Here, inside it, each rank gets walls against the
other ranks and against the fork server, and limits on what it may use.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource

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
_SIGKILL = 9

_libc = ctypes.CDLL(None, use_errno=True)

MEMORY = 2 * 2**30  # bytes of data of one process
FILE = 16 * 2**20  # bytes of one file
FOLDER = "64m"  # bytes of all files of a rank
PROCESSES = 48  # of one rank, threads included


def separate() -> bool:
    """Leave the user, process, network and IPC namespaces of the caller. The next child is pid 1.

    False where the system does not allow it; nothing has changed then.
    """
    user, group = os.getuid(), os.getgid()
    flags = _NEW_USER | _NEW_PID | _NEW_NET | _NEW_IPC | _NEW_MOUNTS
    if _libc.unshare(flags) != 0:
        return False
    # Only who can be attached to owns its files in /proc. No code of a student's runs here yet.
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
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
    import fcntl
    import socket
    import struct

    up, set_flags = 0x1 | 0x40, 0x8914  # IFF_UP | IFF_RUNNING, SIOCSIFFLAGS
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, set_flags, struct.pack("16sh14x", b"lo", up))


def unreadable_by_others() -> None:
    """No process of the same user can attach to this one, nor to its children by fork."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def no_new_privileges() -> None:
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def limit(seconds: int) -> None:
    """Bound what this process and its children may use. `seconds` are of processor time."""
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        # DATA, not AS: torch maps far more address space than it uses.
        (resource.RLIMIT_DATA, MEMORY),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_NPROC, PROCESSES),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
