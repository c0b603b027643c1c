"""The walls around one submission, in the bubblewrap that all submissions share.

bubblewrap decides what can be seen at all, and mounts all of it read-only. `enter` adds what makes
submissions strangers to each other: a new process gets kernel namespaces of its own and gives up
every capability before it reads a request, so no line of a student's runs outside of them.
"""

import contextlib
import ctypes
import fcntl
import os
import platform
import resource
import shutil
import socket
import struct
import sys
from pathlib import Path

from grader.inside.calls import refuse_calls
from labkit.launch.guard import die_with_parent

_MIB = 2**20
_LIMITS = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_FSIZE: 64 * _MIB,  # of each file, so of each rank's output
    resource.RLIMIT_DATA: 1024 * _MIB,  # of each process
    resource.RLIMIT_NOFILE: 256,  # each may be a socket, whose buffers count for no process
}
_TEMPORARY = b"mode=1777,size=128M,nr_inodes=10000"  # each inode is memory of the kernel's, too
MOST_TASKS = 256  # processes and threads of one submission
_OWN_USER = 1000  # within a namespace of its own
_COUNTS_BY_NAMESPACE = (5, 14)  # the Linux that counts a user's tasks in each namespace by itself
# From <sched.h>, <sys/mount.h>, <sys/prctl.h>, <linux/capability.h>, and <linux/sockios.h>.
_NEW_USERS = 0x10000000
_NEW_MOUNTS, _NEW_IPC, _NEW_PROCESSES, _NEW_NETWORK = 0x00020000, 0x08000000, 0x20000000, 0x40000000
_NOSUID, _NODEV, _NOEXEC, _BIND, _RECURSIVE, _PRIVATE = 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000
_SET_DUMPABLE = 4
_CAPABILITY_VERSION, _CAPABILITY_WORDS = 0x20080522, 6
_SET_FLAGS, _UP_AND_RUNNING = 0x8914, 0x41


def limit() -> None:
    """Limit what this process, and each one that it starts, may use."""
    for one, most in _LIMITS.items():
        resource.setrlimit(one, (most, most))


def enter() -> None:
    """Go on behind new walls: alone with its children, its temporary files, and its loopback.

    The calling process stays outside, waits, and ends with what is inside. Raises OSError.
    """
    user = 1_000_000 + os.getpid()  # no other submission's, while this one runs
    _call("unshare", _NEW_MOUNTS | _NEW_IPC | _NEW_PROCESSES | _NEW_NETWORK)
    if inside := os.fork():
        os.waitpid(inside, 0)
        os._exit(0)
    _call("mount", None, b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None)
    own = ctypes.c_ulong(_NOSUID | _NODEV)
    _call("mount", b"tmpfs", b"/tmp", b"tmpfs", own, _TEMPORARY)
    for place in (b"/dev/shm", b"/dev/pts"):
        _call("mount", b"/tmp", place, None, ctypes.c_ulong(_BIND), None)
    _call("mount", b"proc", b"/proc", b"proc", ctypes.c_ulong(_NOSUID | _NODEV | _NOEXEC), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP_AND_RUNNING))
    os.chdir("/tmp")
    _give_up_privileges(user)
    die_with_parent()  # after the change of user, which would cancel it


def is_root() -> bool:
    """Whether this process is root of the system, who may become any user; not of a namespace."""
    whole = Path("/proc/self/uid_map")
    return os.getuid() == 0 and (not whole.exists() or "4294967295" in whole.read_text())


def _give_up_privileges(user: int) -> None:
    if is_root():  # for root, no limit on processes counts
        _limit_tasks()
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    else:  # the caller's other processes do not count in a namespace of its own
        ids = {"uid_map": os.getuid(), "gid_map": os.getgid()}
        _call("unshare", _NEW_USERS)
        Path("/proc/self/setgroups").write_text("deny")
        for name, own in ids.items():
            Path("/proc/self", name).write_text(f"{_OWN_USER} {own} 1")
        if tuple(map(int, platform.release().split(".")[:2])) >= _COUNTS_BY_NAMESPACE:
            _limit_tasks()
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    _call("capset", header, bytes(4 * _CAPABILITY_WORDS))
    # None of the ranks may trace this process, or read its memory.
    _call("prctl", _SET_DUMPABLE, 0, 0, 0, 0)
    refuse_calls()


def _limit_tasks() -> None:
    resource.setrlimit(resource.RLIMIT_NPROC, (MOST_TASKS, MOST_TASKS))


def empty_temporary() -> None:
    """Remove what a check has left in /tmp, which could fail the next one, or tell it something."""
    for one in Path("/tmp").iterdir():
        with contextlib.suppress(OSError):
            if one.is_dir() and not one.is_symlink():
                shutil.rmtree(one, ignore_errors=True)
            else:
                one.unlink()


def let_own_user_look() -> None:
    """Let processes of the same user see what this one does: ranks are watched by their parent."""
    if sys.platform.startswith("linux"):
        _call("prctl", _SET_DUMPABLE, 1, 0, 0, 0)


def _call(name: str, *args: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
