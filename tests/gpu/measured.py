"""What is measured on a GPU: memory, and the draws of its generator."""

import gc
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.scenarios.unwrapped_loss import (
    MOST_ELEMENTS,
    PRINTED_DRIFT,
    PRINTED_GRADIENTS,
    Fix,
    randn,
    trajectory,
)
from miniddp import MiniDDP

from .machine import CannotProveError, Evidence, Machine, deterministic

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch DDP": DistributedDataParallel,
    "torch DDP, views": partial(DistributedDataParallel, gradient_as_bucket_view=True),
    "MiniDDP": MiniDDP,
    "MiniDDP, views": partial(MiniDDP, gradient_as_bucket_view=True),
}


def _linears(layers: int, width: int, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).to(device)


# 1. Memory ----------------------------------------------------------------------------------------


def memory(rank: int, device: torch.device) -> dict[str, tuple[float, float, float]]:
    """On each rank, by wrapper: bytes of the allocator, divided by those of the parameters.

    (after a backward; the peak of the step that rebuilds the buckets; that of a later step), each
    beyond the parameters and the inputs.
    """
    found = {}
    x = torch.randn(1, 1024, generator=torch.Generator().manual_seed(rank)).to(device)
    for name, wrap in WRAPPERS.items():
        module = _linears(24, 1024, device)
        size = sum(parameter.nbytes for parameter in module.parameters())
        module(x).sum().backward()  # cuBLAS takes its workspace at the first product
        module.zero_grad()
        before = torch.cuda.memory_allocated(device)
        wrapped, peaks = wrap(module), []
        for _ in range(4):
            module.zero_grad()
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            wrapped(x).square().mean().backward()
            torch.cuda.synchronize(device)
            peaks.append((torch.cuda.max_memory_allocated(device) - before) / size)
        steady = (torch.cuda.memory_allocated(device) - before) / size
        found[name] = (steady, peaks[1], peaks[-1])
        del wrapped, module
        gc.collect()
    return found


def find_memory(machine: Machine) -> Iterator[Evidence]:
    if machine.kind == "cpu":
        raise CannotProveError("a CPU has no allocator that counts")
    for group in machine.groups():
        of_ranks = group.run(memory)
        for name in ("MiniDDP", "MiniDDP, views"):
            ours, torchs = (
                [max(found[wrapper][i] for found in of_ranks) for i in range(3)]
                for wrapper in (name, name.replace("MiniDDP", "torch DDP"))
            )
            holds = all(a <= 1.02 * b for a, b in zip(ours, torchs, strict=True))  # it rounds up
            numbers = " ".join(f"{a:.2f}/{b:.2f}" for a, b in zip(ours, torchs, strict=True))
            said = f"steady, rebuild's peak, later peak, ours/torch's: {numbers} × parameters"
            yield Evidence(f"memory of {name}", group.label, holds, said)


# 2. The draws of the GPU's own generator ----------------------------------------------------------


def real_randn(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """The first draw of the device's own generator with this seed, on the CPU."""
    if device.type == "cpu":
        return randn(shape, seed)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).cpu()


def draws_apart(device: torch.device) -> tuple[int, int, float]:
    """(draws, those with the emulation's bits, the largest difference of the others)."""
    draws, equal, largest = 0, 0, 0.0
    for seed in (*range(5), *range(1000, 1005)):
        for shape in ((4, 4), (MOST_ELEMENTS,)):
            real, ours = real_randn(shape, seed, device), randn(shape, seed)
            draws, equal = draws + real.numel(), equal + int((real == ours).sum())
            largest = max(largest, float((real - ours).abs().max()))
    return draws, equal, largest


def printed_again(device: torch.device, fix: Fix) -> tuple[int, int]:
    """(numbers, those that come out as printed) of one half of the bypassed wrapper's run."""
    deterministic(device)
    steps = trajectory(fix, device=device, draw=partial(real_randn, device=device))
    ours = [f"{gradient:.5f}" for step in steps for gradient in step.gradients]
    theirs = [f"{gradient:.5f}" for pair in PRINTED_GRADIENTS[fix] for gradient in pair]
    ours += [f"{step.drift:.6f}" for step in steps]
    theirs += [f"{drift:.6f}" for drift in PRINTED_DRIFT[fix]]
    return len(ours), sum(map(str.__eq__, ours, theirs))


def find_draws(machine: Machine) -> Iterator[Evidence]:
    group = machine.pair()
    draws, equal, largest = group.run(draws_apart)[0]
    said = f"{equal} of {draws} draws bitwise; others apart by up to {largest:.0e}"
    yield Evidence("the emulation of the GPU's randn", group.label, largest < 1e-5, said)
    halves = [group.run(printed_again, fix) for fix in ("none", "all-reduce")]
    numbers = sum(of_ranks[0][0] for of_ranks in halves)
    same = sum(min(same for _, same in of_ranks) for of_ranks in halves)
    said = f"{same} of {numbers} as printed"
    yield Evidence("the bypassed wrapper's numbers", group.label, same == numbers == 30, said)
