"""Memory on a GPU: gradients and buckets in steady state, and the peak of a step."""

import gc
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from miniddp import MiniDDP

from .machine import Machine, synchronize
from .proofs import CannotProveError, Evidence

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch DDP": DistributedDataParallel,
    "torch DDP, views": lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True),
    "MiniDDP": MiniDDP,
    "MiniDDP, views": lambda m: MiniDDP(m, gradient_as_bucket_view=True),
}
LAYERS, WIDTH, STEPS = 24, 1024, 4
SLACK = 1.02
"""How much more than torch's DDP MiniDDP may hold: allocators round up."""


def measure(rank: int, device: torch.device) -> dict[str, tuple[float, float, float]]:
    """On each rank, by wrapper: bytes of the allocator, divided by those of the parameters.

    (after a backward; the peak of the step that packs the buckets anew; that of a later step), each
    beyond the parameters and the inputs.
    """
    found = {}
    x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(rank)).to(device)
    for name, wrap in WRAPPERS.items():
        torch.manual_seed(0)
        module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to(device)
        size = sum(parameter.nbytes for parameter in module.parameters())
        module(x).sum().backward()  # cuBLAS takes its workspace at the first product
        module.zero_grad()
        before = torch.cuda.memory_allocated(device)
        wrapped, peaks = wrap(module), []
        for _ in range(STEPS):
            module.zero_grad()
            synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            wrapped(x).square().mean().backward()
            synchronize(device)
            peaks.append((torch.cuda.max_memory_allocated(device) - before) / size)
        steady = (torch.cuda.memory_allocated(device) - before) / size
        found[name] = (steady, peaks[1], peaks[-1])
        del wrapped, module
        gc.collect()
    return found


def find(machine: Machine) -> Iterator[Evidence]:
    if machine.kind == "cpu":
        raise CannotProveError(
            "a CPU has no allocator to ask; labs/benchmarks/memory.py counts there"
        )
    for group in machine.groups():
        of_ranks = group.run(measure)
        for name in ("MiniDDP", "MiniDDP, views"):
            theirs = name.replace("MiniDDP", "torch DDP")
            ours = [max(found[name][i] for found in of_ranks) for i in range(3)]
            torchs = [max(found[theirs][i] for found in of_ranks) for i in range(3)]
            holds = all(a <= SLACK * b for a, b in zip(ours, torchs, strict=True))
            numbers = " ".join(f"{a:.2f}/{b:.2f}" for a, b in zip(ours, torchs, strict=True))
            said = f"steady, rebuild's peak, later peak, ours/torch's: {numbers} × parameters"
            yield Evidence(f"memory of {name}", group.label, holds, said)
