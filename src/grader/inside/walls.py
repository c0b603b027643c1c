"""What a rank may not do: the parts of its prison that a process builds around itself (Linux).

bubblewrap has built the outer wall before this process began: a file system of its own that cannot
be written, no network, no other process in sight. Here, inside it, each rank gets walls against the
other ranks and against the fork server, and limits on what it may use:

    namespaces    processes, network, IPC and mounts of its own
    mounts        an empty /tmp, /dev/shm and /dev/pts, and a /proc that shows its own processes
    keyring       a session keyring of its own
    capabilities  none, and no way to get one
    system calls  no mounts, namespaces, keyrings, tracing, and no file locks: see `forbid`
    descriptors   its connection and /dev/null
"""

import contextlib
import ctypes
import fcntl
import os
import platform
import resource
import signal
import socket
import struct
import sys

# From <linux/sched.h>, <sys/mount.h>, <linux/prctl.h>, <linux/keyctl.h>, <linux/seccomp.h>,
# <linux/filter.h>, and <linux/capability.h>; Python 3.11 has no wrappers for them.
_NEW_USER, _NEW_PID, _NEW_NET, _NEW_IPC, _NEW_MOUNTS = (
    0x10000000,
    0x20000000,
    0x40000000,
    0x08000000,
    0x00020000,
)
_NEW_ANY = 0x7E020000  # every namespace that a clone can ask for
_NOSUID_NODEV = 0x2 | 0x4
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_PR_SET_CHILD_SUBREAPER, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 36, 22, 24
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_JOIN_SESSION_KEYRING = 1
_CAPABILITIES_3 = 0x20080522
_UP_AND_RUNNING, _SIOCSIFFLAGS = 0x1 | 0x40, 0x8914

_libc = ctypes.CDLL(None, use_errno=True)
_LINUX = sys.platform.startswith("linux")
_PAGE = resource.getpagesize()
_TICK = os.sysconf("SC_CLK_TCK")


MEMORY = 2 * 2**30  # bytes of data of one process
OF_A_GROUP = 3 * 2**30  # bytes that all processes of a group may use beyond what they inherited
FILE = 16 * 2**20  # bytes of one file
FOLDER = "64m"  # bytes of all files of a rank
PROCESSES = 24  # of one rank, threads included

# Numbers of system calls: (x86-64, aarch64), None where there is no such call.
_FORBIDDEN = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
}
_FLOCK = (73, 32)
_FCNTL = (72, 25)
_LOCKS = (5, 6, 7, 36, 37, 38, 1024, 1026)  # F_GETLK … F_OFD_SETLKW, F_SETLEASE, F_NOTIFY
_CLONE, _CLONE3 = (56, 220), (435, 435)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def _prctl(option: int, value: int, second: int = 0) -> int:
    return _libc.prctl(option, value, second, 0, 0) if _LINUX else 0


def become_warden_of_wardens() -> bool:
    """Enter a user namespace in which this process may make the ranks' other namespaces.

    The next child is the first of a process namespace. False where the system does not allow it;
    nothing has changed then.
    """
    return _own_users(_NEW_PID | _NEW_MOUNTS)


def separate(*, network: bool = True) -> None:
    """Users, mounts and IPC objects of this process's own, and a network. Raises OSError.

    The limit on processes counts within the user namespace.
    """
    if not _own_users(_NEW_MOUNTS | _NEW_IPC | (_NEW_NET if network else 0)):
        raise OSError(ctypes.get_errno(), "cannot make the namespaces of a rank")


def _own_users(more: int) -> bool:
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(_NEW_USER | more) != 0:
        return False
    # Only a dumpable process owns its files in /proc. No code of a student's runs here.
    _prctl(_PR_SET_DUMPABLE, 1)
    with contextlib.suppress(OSError):
        _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")
    unreadable_by_others()
    return True


class Nursery:
    """Forks children that are each the first process of a process namespace of their own."""

    def __init__(self) -> None:
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY)

    def fork(self) -> int:
        """As os.fork. Raises OSError where no namespace can be made."""
        if _libc.unshare(_NEW_PID) != 0:
            raise OSError(ctypes.get_errno(), "no process namespace for the ranks")
        pid = os.fork()
        # The next child must be able to have another one; and a child has no need of ours.
        if pid and _libc.setns(self._own, _NEW_PID) != 0:
            raise OSError(ctypes.get_errno(), "cannot leave the ranks' process namespace")
        return pid


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def own_folders(*folders: str) -> None:
    """Put an empty file system of FOLDER bytes over each folder, gone with the last process."""
    for folder in folders:
        if not os.path.isdir(folder):
            continue
        options = f"size={FOLDER},mode=700".encode()
        if _libc.mount(b"tmpfs", folder.encode(), b"tmpfs", _NOSUID_NODEV, options) != 0:
            raise OSError(ctypes.get_errno(), f"cannot give the rank its own {folder}")


def hide_processes() -> None:
    """Show only the processes of this namespace under /proc, or none where that is not allowed."""
    if _libc.mount(b"proc", b"/proc", b"proc", _NOSUID_NODEV, None) != 0:
        own = _libc.mount(b"tmpfs", b"/proc", b"tmpfs", _NOSUID_NODEV, b"size=4k")
        if own != 0:
            raise OSError(ctypes.get_errno(), "cannot hide the other ranks' processes")


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


def own_keyring() -> None:
    """A session keyring that no other process has."""
    index = _ARCHITECTURES.get(platform.machine(), (None,))[0]
    if _LINUX and index is not None:
        _libc.syscall(_FORBIDDEN["keyctl"][index], _JOIN_SESSION_KEYRING, None)


def drop_capabilities() -> None:
    """Have no capability, in no set, and no way back to one. Raises OSError."""
    if not _LINUX:
        return
    for capability in range(64):
        _prctl(_PR_CAPBSET_DROP, capability)  # fails where there is none, or none is held
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header, nothing = struct.pack("Ii", _CAPABILITIES_3, 0), bytes(24)
    if _libc.capset(header, nothing) != 0:
        raise OSError(ctypes.get_errno(), "cannot drop the capabilities of a rank")


def close_all_but(keep: int) -> None:
    """Close every descriptor but 0, 1, 2 and `keep`."""
    highest = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    highest = 2**16 if highest == resource.RLIM_INFINITY else min(highest, 2**16)
    os.closerange(3, keep)
    os.closerange(keep + 1, highest)


def forbid(*, locks: bool) -> None:
    """Refuse system calls by which ranks could reach each other or leave; permanently, with EPERM.

    `locks`: file locks, too, because ranks see the same read-only files. A small BPF program
    (seccomp), one comparison per number; on a processor whose numbers are not known here, nothing.
    The other walls do not depend on it.
    """
    index, architecture = _ARCHITECTURES.get(platform.machine(), (None, 0))
    if not _LINUX or index is None:
        return
    program = _Program()
    program.unless_equal(4, architecture, _Program.KILL)
    calls = [numbers[index] for numbers in _FORBIDDEN.values()]
    if locks:
        calls.append(_FLOCK[index])
    program.load(0)
    for number in calls:
        if number is not None:
            program.if_equal(number, _Program.EPERM)
    # glibc tries clone3 first, whose flags a filter cannot see, and then clone.
    program.if_equal(_CLONE3[index], _Program.ENOSYS)
    program.if_call_and_bits(_CLONE[index], 16, _NEW_ANY, _Program.EPERM)
    if locks:
        for command in _LOCKS:
            program.load(0)
            program.if_call_and_equal(_FCNTL[index], 24, command, _Program.EPERM)
    if index == 0:
        program.load(0)
        program.if_at_least(0x40000000, _Program.EPERM)  # the x32 calls, under other numbers
    program.install()


class _Program:
    """A seccomp filter under construction. Offsets are into struct seccomp_data."""

    KILL, ALLOW, EPERM, ENOSYS = 0x80000000, 0x7FFF0000, 0x00050001, 0x00050026
    _LOAD, _EQUAL, _AT_LEAST, _BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

    def __init__(self) -> None:
        self._code: list[bytes] = []

    def _add(self, code: int, if_so: int, if_not: int, value: int) -> None:
        self._code.append(struct.pack("HBBI", code, if_so, if_not, value))

    def load(self, offset: int) -> None:
        self._add(self._LOAD, 0, 0, offset)

    def unless_equal(self, offset: int, value: int, action: int) -> None:
        self.load(offset)
        self._add(self._EQUAL, 1, 0, value)
        self._add(self._RETURN, 0, 0, action)

    def if_equal(self, value: int, action: int) -> None:
        self._add(self._EQUAL, 0, 1, value)
        self._add(self._RETURN, 0, 0, action)

    def if_at_least(self, value: int, action: int) -> None:
        self._add(self._AT_LEAST, 0, 1, value)
        self._add(self._RETURN, 0, 0, action)

    def if_call_and_bits(self, call: int, argument: int, bits: int, action: int) -> None:
        self._add(self._EQUAL, 0, 3, call)
        self.load(argument)
        self._add(self._BITS, 0, 1, bits)
        self._add(self._RETURN, 0, 0, action)
        self.load(0)

    def if_call_and_equal(self, call: int, argument: int, value: int, action: int) -> None:
        self._add(self._EQUAL, 0, 3, call)
        self.load(argument)
        self._add(self._EQUAL, 0, 1, value)
        self._add(self._RETURN, 0, 0, action)

    def install(self) -> None:
        """Needs no_new_privileges. Raises OSError."""
        self._add(self._RETURN, 0, 0, self.ALLOW)
        code = ctypes.create_string_buffer(b"".join(self._code))
        header = ctypes.create_string_buffer(
            struct.pack("HxxxxxxQ", len(self._code), ctypes.addressof(code))
        )
        if _libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(header), 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "cannot install the filter of system calls")


def limit(seconds: int, processes: int | None) -> None:
    """Bound what this process and its children may use. `seconds` are of processor time.

    `processes` counts what the user has in its namespace, so it is None outside one.
    """
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        # DATA, not AS: torch maps far more address space than it uses.
        (resource.RLIMIT_DATA, MEMORY),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        _lower(kind, most)
    if processes is not None:
        _lower(resource.RLIMIT_NPROC, processes)


def _lower(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    # A second of processor time between the soft limit, which names itself, and the hard one.
    above = 1 if kind == resource.RLIMIT_CPU and most != hard else 0
    resource.setrlimit(kind, (most, most + above))


class Below:
    """The processes below the caller, by the /proc that it saw when it began."""

    def __init__(self) -> None:
        self._proc = os.open("/proc", os.O_RDONLY) if os.path.isdir("/proc/self") else -1
        self._own = int(os.readlink("self", dir_fd=self._proc)) if self._proc >= 0 else 0
        self._inherited = self._resident(self._own)

    @property
    def known(self) -> bool:
        """Whether there is a /proc to look at."""
        return self._proc >= 0

    def pids(self) -> list[int]:
        """Every process below, zombies aside; empty where there is no /proc."""
        if self._proc < 0:
            return []
        parents = {}
        for name in filter(str.isdigit, os.listdir(self._proc)):
            fields = self._stat(name)
            if fields and fields[0] != "Z":
                parents[int(name)] = int(fields[1])
        found: list[int] = []
        frontier = {self._own}
        while frontier:
            frontier = {pid for pid, parent in parents.items() if parent in frontier}
            found += frontier
        return found

    def memory(self, pids: list[int]) -> int:
        """Bytes that they have in memory, beyond what each inherited from the fork server."""
        return sum(max(0, self._resident(pid) - self._inherited) for pid in pids)

    def seconds(self, pids: list[int]) -> float:
        """Processor time that they and the children that they have waited for have used."""
        fields = [self._stat(str(pid)) for pid in pids]
        return sum(sum(map(int, one[11:15])) for one in fields if len(one) > 15) / _TICK

    def _stat(self, name: str) -> list[str]:
        """The fields after the name: state, parent, …; the times are 11 to 14."""
        return self._read(f"{name}/stat").rpartition(")")[2].split()

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
