"""Whether this machine gives memory in pages of 2 MiB to a process that asks for them."""

import platform
from pathlib import Path

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# glibc asks for them since 2.35; MADV_COLLAPSE came with Linux 6.1.
_GLIBC = platform.libc_ver() >= ("glibc", "2.35")
_LINUX = platform.system() == "Linux" and platform.release().split(".")[:1] >= ["6"]

ON_REQUEST = _GLIBC and _LINUX and _SETTING.exists() and "[never]" not in _SETTING.read_text()


def mib_in_large_pages(pid: int) -> float:
    """How much of the memory of process `pid` lies in such pages, in MiB; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    [line] = [line for line in lines if line.startswith("AnonHugePages:")]
    return int(line.split()[1]) / 1024
