"""The machine: its GPUs, the groups of ranks that they allow, the time, and what a part reports."""

import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from labkit.launch.nodes import LOOPBACK
from labkit.launch.ranks import run_ranks
from labkit.profiling.recording import Recording


class Evidence(NamedTuple):
    """What a part found out on one group of ranks: whether the claim holds, and the numbers."""

    what: str
    on: str
    holds: bool
    detail: str


class CannotProveError(Exception):
    """Raised by a part that can say nothing about its claim on this machine; the text says why."""


ENVIRONMENT = {
    # cuBLAS has deterministic results only with a workspace of its own for each stream.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # No rank has a reason to look for a network.
    "GLOO_SOCKET_IFNAME": LOOPBACK,
    "NCCL_SOCKET_IFNAME": LOOPBACK,
}
"""Of everything that is started."""

_LEAST = 5.0  # seconds: in less, nothing starts on a GPU


class Deadline:
    """When the part that runs has to end."""

    def __init__(self) -> None:
        self.at = float("inf")

    def starts(self, seconds: float) -> None:
        """The time of a part begins."""
        self.seconds, self.at = seconds, time.monotonic() + seconds

    def left(self, at_most: float) -> float:
        """Seconds that a command may take. Raises CannotProveError if hardly any are left."""
        left = self.at - time.monotonic()
        if left < _LEAST:
            raise CannotProveError(f"the {self.seconds:.0f} s of this part were over")
        return min(left, at_most)

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.at - 0.5


class Group(NamedTuple):
    """Ranks that prove something together."""

    label: str
    ranks: int
    kind: Literal["cuda", "cpu"]
    exact: bool
    """Whether a sum over the ranks has the same bits in any order of addition."""
    deadline: Deadline

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """`labkit.launch.run_ranks` on this group, within the part's time: one result per rank."""
        left = self.deadline.left(300.0)
        return run_ranks(fn, self.ranks, *args, timeout=left, device=self.kind, env=ENVIRONMENT)


@dataclass(frozen=True)
class Machine:
    """`kind` is "cpu" for a rehearsal; `gpus` are the names of those that torch sees."""

    kind: Literal["cuda", "cpu"]
    gpus: tuple[str, ...]
    deadline: Deadline = field(default_factory=Deadline)
    timelines: dict[str, Recording] = field(default_factory=dict)
    """What the profiler saw of a step, by wrapper: the report keeps it."""

    def group(self, ranks: int, exact: bool = True) -> Group:
        """So many ranks, on a GPU each over NCCL, or on shared ones over gloo."""
        count, places = len(self.gpus), "ranks" if ranks > 1 else "rank"
        if self.kind == "cpu":
            label = f"{ranks} {places}, CPU, gloo"
        elif ranks <= count:
            label = f"{ranks} {places}, {ranks} GPUs, NCCL" if ranks > 1 else "1 rank, NCCL"
        else:
            shared = "one GPU" if count == 1 else f"{count} GPUs"
            label = f"{ranks} {places} on {shared}, gloo"
        return Group(label, ranks, self.kind, exact, self.deadline)

    def groups(self) -> list[Group]:
        """The groups that the parts for one GPU run on, smallest world last."""
        if self.kind == "cpu":
            return [self.pair()]
        count = len(self.gpus)
        more = [self.group(count, exact=False)] if count > 2 else []
        return [*more, self.pair(), self.group(1)]

    def pair(self) -> Group:
        """Two ranks."""
        return self.group(2)

    def versions(self) -> dict[str, str]:
        """What a report has to name, besides the date."""
        found = {"GPUs": ", ".join(self.gpus) or "none", "torch": torch.__version__}
        if self.gpus:
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
            found |= {"driver": _driver(), "CUDA": str(torch.version.cuda), "NCCL": nccl}
        return found | {"Python": platform.python_version(), "system": platform.platform()}


def this_machine(device: Literal["auto", "cpu"]) -> Machine:
    """The GPUs that are here; for "cpu" none, and a rehearsal. Starts no CUDA in this process."""
    # Ranks may be forked from this process, and CUDA does not survive a fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if device == "cpu":
        return Machine("cpu", ())
    count = torch.cuda.device_count()
    return Machine("cuda", tuple(run_ranks(_names, 1, device="cuda")[0]) if count else ())


def deterministic(device: torch.device) -> None:
    """In a rank: the same operations give the same bits twice, and float32 is float32."""
    torch.use_deterministic_algorithms(device.type == "cuda", warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def _names() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _driver() -> str:
    """The version of NVIDIA's driver, as `nvidia-smi` or the kernel's module says it."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return said.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown: nvidia-smi did not say"
