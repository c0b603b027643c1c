"""The machine: its GPUs, the groups of ranks that they allow, and what a part reports."""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from labkit.launch.ranks import run_ranks


class Evidence(NamedTuple):
    """What a part found out on one group of ranks: whether the claim holds, and the numbers."""

    what: str
    on: str
    holds: bool
    detail: str


class CannotProveError(Exception):
    """Raised by a part that can say nothing about its claim on this machine; the text says why."""


# cuBLAS has deterministic results only with a workspace of its own for each stream.
_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


class Group(NamedTuple):
    """Ranks that prove something together."""

    label: str
    ranks: int
    kind: Literal["cuda", "cpu"]
    exact: bool
    """Whether a sum over the ranks has the same bits in any order of addition."""

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
        """`labkit.launch.run_ranks` on this group: the results in rank order."""
        return run_ranks(fn, self.ranks, *args, timeout=timeout, device=self.kind, env=_ENVIRONMENT)


@dataclass(frozen=True)
class Machine:
    """`kind` is "cpu" for a rehearsal; `gpus` are the names of those that torch sees."""

    kind: Literal["cuda", "cpu"]
    gpus: tuple[str, ...]

    def groups(self) -> list[Group]:
        """The groups that the parts for one GPU run on, smallest world last."""
        if self.kind == "cpu":
            return [Group("2 ranks, CPU, gloo", 2, "cpu", True)]
        alone = Group("1 rank, NCCL", 1, "cuda", True)
        count = len(self.gpus)
        if count == 1:
            return [Group("2 ranks on one GPU, gloo", 2, "cuda", True), alone]
        pair = Group("2 ranks, 2 GPUs, NCCL", 2, "cuda", True)
        more = [Group(f"{count} ranks, {count} GPUs, NCCL", count, "cuda", False)] * (count > 2)
        return [*more, pair, alone]

    def pair(self) -> Group:
        """Two ranks."""
        return next(group for group in self.groups() if group.ranks == 2)

    def versions(self) -> dict[str, str]:
        """What a report has to name, besides the date."""
        found = {"GPUs": ", ".join(self.gpus) or "none", "torch": torch.__version__}
        if self.gpus:
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
            found |= {"CUDA": str(torch.version.cuda), "NCCL": nccl}
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
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def _names() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
