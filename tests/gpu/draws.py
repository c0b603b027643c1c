"""The bypassed wrapper's 30 printed numbers, from the generator of a real GPU.

The numbers were printed by a training run that drew its data on GPUs, and everywhere else this
project draws them by an emulation on the CPU (`labkit.scenarios.cuda_random`). Here the data come
from the GPU's own generator, the training runs on the GPU, and the draws are compared.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from labkit.scenarios import cuda_random
from labkit.scenarios.unwrapped_loss import (
    PRINTED_DRIFT,
    PRINTED_GRADIENTS,
    Fix,
    trajectory,
)

from .machine import Machine, deterministic
from .proofs import Evidence

SEEDS = (*range(5), *range(1000, 1005))
HALVES: tuple[Fix, ...] = ("none", "all-reduce")
SHAPES = ((4, 4), (cuda_random.MOST_ELEMENTS,))


def real_randn(shape: Sequence[int], seed: int, device: torch.device) -> Tensor:
    """The first draw of the device's own generator with this seed, on the CPU."""
    if device.type == "cpu":
        return cuda_random.randn(shape, seed)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).cpu()


def apart(device: torch.device) -> tuple[int, int, float]:
    """(draws, those with the emulation's bits, the largest difference of the others)."""
    draws, equal, largest = 0, 0, 0.0
    for seed in SEEDS:
        for shape in SHAPES:
            real, ours = real_randn(shape, seed, device), cuda_random.randn(shape, seed)
            draws, equal = draws + real.numel(), equal + (real == ours).sum().item()
            largest = max(largest, (real - ours).abs().max().item())
    return draws, equal, largest


def printed_again(device: torch.device, fix: Fix) -> tuple[int, int]:
    """(numbers, those that come out as printed) of the half with this fix."""
    deterministic(device)
    steps = trajectory(fix, device=device, draw=partial(real_randn, device=device))
    ours = [f"{gradient:.5f}" for step in steps for gradient in step.gradients]
    theirs = [f"{gradient:.5f}" for pair in PRINTED_GRADIENTS[fix] for gradient in pair]
    ours += [f"{step.drift:.6f}" for step in steps]
    theirs += [f"{drift:.6f}" for drift in PRINTED_DRIFT[fix]]
    return len(ours), sum(map(str.__eq__, ours, theirs))


def find(machine: Machine) -> Iterator[Evidence]:
    group = machine.pair()
    draws, equal, largest = group.run(apart)[0]
    said = f"{equal} of {draws} draws bitwise; others apart by up to {largest:.0e}"
    yield Evidence("the emulation of the GPU's randn", group.label, largest < 1e-5, said)
    halves = [group.run(printed_again, fix) for fix in HALVES]
    numbers = sum(of_ranks[0][0] for of_ranks in halves)
    same = sum(min(same for _, same in of_ranks) for of_ranks in halves)
    said = f"{same} of {numbers} as printed"
    yield Evidence("the bypassed wrapper's numbers", group.label, same == numbers == 30, said)
