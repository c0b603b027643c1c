"""Memory of many processes on one machine: import once, fork fast, and start no more than fit.

Loading torch makes a million objects, which the garbage collector walks through again and again: a
quarter of the import's processor time, without `gc_paused`. A fork copies its parent's page table,
and the child's exit frees the copy: 26 ms with 56,000 pages of 4 KiB, and 6 ms after
`use_huge_pages`. A rank needs about 150 MB. `check_memory` refuses more ranks than fit: a machine
that swaps answers nothing, not even the command that would end them. `workers` says how many
chapters, or workers of pytest, run at once.
"""

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

MEMORY_OF_A_RANK = 150e6  # bytes
MEMORY_OF_A_WORKER = 2e9  # bytes: one of pytest, a chapter's kernel, and four ranks
OVERRIDE = "LABKIT_MAX_RANKS"  # environment variable: this many ranks start, whatever they need

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds in each period, or "max"
_MADV_COLLAPSE = 25  # from <linux/mman.h>
_LARGE_PAGE = 2 * 2**20


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Turn the collector off inside the block, and freeze at its end every object that is there.

    What is frozen is left out of later walks, so a fork goes on sharing it with its parent. Blocks
    may be nested; the outermost one turns the collector on again, if it was on.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def use_huge_pages() -> None:
    """Move this process's memory to pages of 2 MiB, so that a fork takes a quarter of the time.

    Takes half a second. A process that was itself forked then uses 200 MiB more, because its parent
    keeps the old pages. Before Linux 6.1, and on other systems, nothing happens.
    """
    # In bytes: a path in this list may hold anything but a line feed.
    with contextlib.suppress(OSError), open("/proc/self/maps", "rb") as maps:
        madvise = ctypes.CDLL(None).madvise
        for line in maps.readlines():
            span, rights, _, _, inode, *name = line.split(maxsplit=5)
            if rights == b"rw-p" and inode == b"0" and name in ([], [b"[heap]\n"]):
                start, end = (int(address, 16) for address in span.split(b"-"))
                start = -(-start // _LARGE_PAGE) * _LARGE_PAGE
                if (size := (end - start) // _LARGE_PAGE * _LARGE_PAGE) > 0:
                    madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_COLLAPSE)


def check_memory(ranks: int) -> None:
    """Raise ValueError, in one sentence, if this machine's memory does not hold that many ranks."""
    available = available_memory()
    fit = int(available / MEMORY_OF_A_RANK)
    allowed = os.environ.get(OVERRIDE, "")
    if ranks <= max(1, fit, int(allowed) if allowed.isdecimal() else 0):
        return
    raise ValueError(
        f"{ranks} ranks need about {ranks * MEMORY_OF_A_RANK / 1e9:.1f} GB of memory "
        f"({MEMORY_OF_A_RANK / 1e6:.0f} MB each), and {available / 1e9:.1f} GB are available, "
        f"enough for {fit}: start fewer, or set {OVERRIDE}={ranks} to start them anyway."
    )


def workers() -> int:
    """At least 1; one more than the cores, because one that waits leaves its core idle.

    Where memory is scarce, fewer.
    """
    fit = int(available_memory() / MEMORY_OF_A_WORKER)
    return max(1, min(_cores() + 1, fit))


def _cores() -> int:
    """Those that this process may use, and whole ones of what its container may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(OSError, ValueError):  # no such file, or no limit
        quota, period = map(int, _QUOTA.read_text().split())
        cores = min(cores or 1, max(1, quota // period))
    return cores or 1


def available_memory() -> int:
    """Bytes that new processes can take: what the machine has, and what its cgroups allow."""
    return max(0, min([psutil.virtual_memory().available, *_left_in_cgroups()]))


def _left_in_cgroups() -> Iterator[int]:
    """What is left of the limit of each control group (version 2) that holds this process."""
    lines = _OWN_GROUPS.read_text().splitlines() if _OWN_GROUPS.exists() else []
    for own in (_CGROUPS / line[4:] for line in lines if line.startswith("0::/")):
        for group in [own, *own.parents]:
            # No such file, or "max": no limit here. The page cache gives way to a process.
            with contextlib.suppress(OSError, ValueError):
                limit, used = (int((group / f"memory.{n}").read_text()) for n in ("max", "current"))
                counts = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
                yield limit - used + int(counts["inactive_file"])
            if group == _CGROUPS:
                break
