"""Memory in pages of 2 MiB, for a server that ranks are forked from: the grader's, and labkit's.

Before Linux 6.1, and on other systems, `gather_memory` does nothing.
"""

import contextlib
import ctypes

_MADV_COLLAPSE = 25  # from <linux/mman.h>
_LARGE_PAGE = 2 * 2**20


def gather_memory() -> None:
    """Move this process's memory to pages of 2 MiB, so that a fork takes a quarter of the time.

    A fork copies its parent's table of pages, and its end frees the copy: 26 ms for the 56,000
    pages of 4 KiB that a process has with torch loaded. Costs half a second, and 200 MiB where the
    parent keeps the old pages.
    """
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        for line in maps.read().splitlines():
            span, rights, _, _, inode, *name = line.split(maxsplit=5)
            if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
                start, end = (int(address, 16) for address in span.split("-"))
                start = -(-start // _LARGE_PAGE) * _LARGE_PAGE
                if (size := (end - start) // _LARGE_PAGE * _LARGE_PAGE) > 0:
                    madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_COLLAPSE)
