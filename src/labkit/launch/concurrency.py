"""How many chapters, or workers of pytest, run at once here: one more than the cores.

One that waits leaves its core idle. Where memory is scarce, fewer run.
"""

import contextlib
import os
from pathlib import Path

from labkit.launch.memory import available_memory

# A worker of pytest, a chapter's kernel, and four ranks.
MEMORY_OF_ONE = 2e9  # bytes

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds in each period, or "max"


def workers() -> int:
    """At least 1."""
    fit = int(available_memory() / MEMORY_OF_ONE)
    return max(1, min(_cores() + 1, fit))


def _cores() -> int:
    """Those that this process may use, and whole ones of what its container may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(OSError, ValueError):  # no such file, or no limit
        quota, period = map(int, _QUOTA.read_text().split())
        cores = min(cores or 1, max(1, quota // period))
    return cores or 1
