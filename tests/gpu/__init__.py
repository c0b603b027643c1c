"""What this project can prove on the GPUs that are here: `make gpu`, or ``python -m tests.gpu``.

Each part proves one claim about the code on GPUs, and names the ranks, devices, and backend. With
one GPU, two ranks share it over gloo with CUDA tensors, because NCCL refuses two ranks on one GPU;
NCCL itself runs with one rank. With two or more GPUs, each rank has its own, over NCCL. What needs
more GPUs than there are is listed as not proved: nothing is skipped silently.

``--device cpu`` rehearses: every part runs on the CPU, as far as it can. This proves nothing about
GPUs, and the table says so.

Exit code: 0 if all that these GPUs can prove is proved; 1 if something failed; 2 without a GPU.

This module is what the parts share: the machine, its ranks, the time, and `Evidence`.
"""

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


@dataclass
class Machine:
    """`kind` is "cpu" for a rehearsal; `gpus` are the names of those that torch sees."""

    kind: Literal["cuda", "cpu"]
    gpus: tuple[str, ...]
    ends: float = float("inf")
    """When the part that runs has to end, by `time.monotonic`."""
    timelines: dict[str, Recording] = field(default_factory=dict)
    """A step of two ranks, by wrapper: the report keeps it."""

    def left(self, at_most: float) -> float:
        """Seconds that a command may take. Raises CannotProveError if hardly any are left."""
        left = self.ends - time.monotonic()
        if left < _LEAST:
            raise CannotProveError("the time of this part was over")
        return min(left, at_most)

    def on(self, ranks: int) -> str:
        """Where so many ranks run: on a GPU each over NCCL, or on shared ones over gloo."""
        count, places = len(self.gpus), "ranks" if ranks > 1 else "rank"
        if self.kind == "cpu":
            return f"{ranks} {places}, CPU, gloo"
        if ranks <= count:
            return f"{ranks} {places}, {ranks} GPUs, NCCL" if ranks > 1 else "1 rank, NCCL"
        return f"{ranks} {places} on {'one GPU' if count == 1 else f'{count} GPUs'}, gloo"

    def worlds(self) -> list[int]:
        """The numbers of ranks that the parts for one GPU run on, the smallest last."""
        if self.kind == "cpu":
            return [2]
        return [len(self.gpus)] * (len(self.gpus) > 2) + [2, 1]

    def run(self, ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """`labkit.launch.run_ranks` within the part's time: one result per rank."""
        left = self.left(300.0)
        return run_ranks(fn, ranks, *args, timeout=left, device=self.kind, env=ENVIRONMENT)

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

    def names() -> list[str]:
        return [torch.cuda.get_device_name(index) for index in range(count)]

    return Machine("cuda", tuple(run_ranks(names, 1, device="cuda")[0]) if count else ())


def deterministic(device: torch.device) -> None:
    """In a rank: the same operations give the same bits twice, and float32 is float32."""
    torch.use_deterministic_algorithms(device.type == "cuda", warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def _driver() -> str:
    """The version of NVIDIA's driver, as `nvidia-smi` says it."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return said.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown: nvidia-smi did not say"
