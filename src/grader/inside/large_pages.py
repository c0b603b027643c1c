"""Memory in pages of 2 MiB, so that a server of ranks forks faster: the grader's, and labkit's.

Before Linux 6.1, and on other systems, `gather_memory` does nothing.
"""

import contextlib
import ctypes

_MADV_COLLAPSE = 25  # from <linux/mman.h>
_LARGE_PAGE = 2 * 2**20


def gather_memory() -> None:
    """Move this process's memory to pages of 2 MiB, so that a fork takes a quarter of the time.

    A fork copies its parent's page table, and the child's exit frees the copy. With torch loaded,
    that is 56,000 pages of 4 KiB, and takes 26 ms. Moving them takes half a second. A process that
    was itself forked then uses 200 MiB more, because its parent keeps the old pages.
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
