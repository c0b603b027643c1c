"""A filter of system calls (seccomp): what would escape the limits that are counted.

Namespaces bring file systems of their own size. Memory that belongs to no process (shared anonymous
mappings, memfd, System V segments) appears in no process's count. No solution needs any of them.
"""

import ctypes
import errno
import os
import platform
import struct

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column below, AUDIT_ARCH
# Calls and their numbers on each machine, from <asm/unistd.h>.
_REFUSED = """
unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51,
open_tree 428 428, move_mount 429 429, fsopen 430 430, fsmount 432 432, mount_setattr 442 442,
add_key 248 217, request_key 249 218, keyctl 250 219, ptrace 101 117, process_vm_writev 311 271,
bpf 321 280, userfaultfd 323 282, perf_event_open 298 241, shmget 29 194, msgget 68 186,
open_by_handle_at 304 265
"""
# As if the kernel were too old for them: libraries then use something else.
_UNKNOWN = "clone3 435 435, memfd_create 319 279, memfd_secret 447 447, io_uring_setup 425 425"
_CLONE, _MMAP = (56, 220), (9, 222)
_NAMESPACES, _SHARED_AND_ANONYMOUS = 0x7E020000, 0x21
_X32 = 0x40000000  # numbers of a second table on x86_64
# From <linux/seccomp.h>, <linux/prctl.h>, and <linux/bpf_common.h>.
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06


def refuse_calls() -> None:
    """Filter the calls of this process and all that it starts, for good. Raises OSError."""
    if platform.machine() not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {platform.machine()}")
    program = ctypes.create_string_buffer(_program(*_MACHINES[platform.machine()]))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(program))
    call = ctypes.CDLL(None, use_errno=True).prctl
    if call(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or call(_SECCOMP, _FILTER, head, 0, 0):
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def _program(column: int, machine: int) -> bytes:
    """The filter in BPF. It reads the machine at 4, the number at 0, and arguments from 16 on."""
    refuse, unknown = (_RETURN, 0, 0, _ERROR | errno.EPERM), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)
    allow = (_RETURN, 0, 0, _ALLOW)
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, machine), refuse]
    lines += [(_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, _X32), unknown]
    for calls, answer in ((_REFUSED, refuse), (_UNKNOWN, unknown)):
        for call in calls.split(","):
            lines += [(_EQUAL, 0, 1, int(call.split()[1 + column])), answer]
    lines += [(_EQUAL, 0, 4, _CLONE[column]), (_LOAD, 0, 0, 16)]
    lines += [(_ANY_BIT, 0, 1, _NAMESPACES), refuse, allow]
    lines += [(_EQUAL, 0, 4, _MMAP[column]), (_LOAD, 0, 0, 40), (_AND, 0, 0, _SHARED_AND_ANONYMOUS)]
    lines += [(_EQUAL, 0, 1, _SHARED_AND_ANONYMOUS), refuse, allow]
    return b"".join(struct.pack("HBBI", *line) for line in lines)
