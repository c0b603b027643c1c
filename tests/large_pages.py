"""Whether this machine gives memory in pages of 2 MiB to a process that asks for them."""

import platform
import re
from pathlib import Path

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def _on_request() -> bool:
    collapses = platform.system() == "Linux" and _numbers(platform.release()) >= [6, 1]
    return collapses and _SETTING.exists() and "[madvise]" in _SETTING.read_text()


ON_REQUEST = _on_request()  # not where Linux gives them to every process, which proves nothing


def mib_in_large_pages(pid: int) -> float:
    """How much of the memory of process `pid` lies in such pages, in MiB; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    [line] = [line for line in lines if line.startswith("AnonHugePages:")]
    return int(line.split()[1]) / 1024
