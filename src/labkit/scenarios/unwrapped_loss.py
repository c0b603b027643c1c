"""The toy of the pull request "Multi-GPU training does not data-parallelize", and its two tables.

Two ranks train a linear layer. The model is wrapped in DistributedDataParallel, but the loss calls
the inner module, so the wrapper's forward never runs and the gradients are never averaged. Sizes,
seeds, and the order of the draws are the pull request's, because its numbers depend on them.
It drew its data on GPUs; `randn` draws the same numbers on a CPU:

1. Philox4x32-10 encrypts the counter (0, 0, i, 0) with the seed as its key; i is the element.
2. The first two of the four words, as fractions of 1 that are never 0, are uniform.
3. The Box–Muller transform makes them a pair of normal numbers; the first is used.

Sources: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011),
for Philox; aten/src/ATen/native/cuda/DistributionTemplates.h in PyTorch, for the counters.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Fix = Literal["none", "all-reduce", "wrapper", "prepared"]

# While there are no more elements than threads, element i is the first number of thread i. Beyond
# that it depends on the GPU. One multiprocessor holds at least this many threads.
MOST_ELEMENTS = 1024

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

WORLD_SIZE = 2
SEED = 0
LEARNING_RATE = 0.05

# What the pull request printed: after each of 5 steps, the gradient of weight[0] on ranks 0 and 1
# (its Table 1), and max|W_rank0 - W_rank1| (its Table 2), without and with its fix.
PRINTED_GRADIENTS: dict[Fix, list[tuple[float, float]]] = {
    "none": [
        (0.04043, 0.19431),
        (-0.13683, -0.05685),
        (0.05426, -0.25685),
        (0.02004, -0.01721),
        (-0.21217, -0.45084),
    ],
    "all-reduce": [
        (0.11737, 0.11737),
        (-0.09659, -0.09659),
        (-0.10196, -0.10196),
        (-0.00963, -0.00963),
        (-0.34623, -0.34623),
    ],
}
PRINTED_DRIFT: dict[Fix, list[float]] = {
    "none": [0.050678, 0.073750, 0.093219, 0.118547, 0.132573],
    "all-reduce": [0.0, 0.0, 0.0, 0.0, 0.0],
}


def randn(shape: Sequence[int], seed: int) -> Tensor:
    """The first `torch.randn(shape)` of a CUDA generator with this seed; float32, on the CPU.

    A GPU computes sine and logarithm less exactly, so the last digits may differ. Checked against
    30 printed numbers of the pull request, not bit by bit against a GPU. Raises ValueError for more
    than 1024 elements.
    """
    count = math.prod(shape)
    if count > MOST_ELEMENTS:
        raise ValueError(
            f"{tuple(shape)} has {count} elements, and only up to {MOST_ELEMENTS} do all GPUs draw "
            "the same numbers. Draw smaller pieces, each with its own seed."
        )
    index = torch.arange(count)
    zero = torch.zeros_like(index)
    words = philox4x32_10((zero, zero, index, zero), (seed & _WORD, seed >> 32))
    # A word as a number in (0, 1], at the center of its interval of length 2⁻³².
    first, second = (word.float() * 2.0**-32 + 2.0**-33 for word in words[:2])
    normal = torch.sin(second * (2 * math.pi)) * torch.sqrt(-2 * torch.log(first))
    return normal.reshape(tuple(shape))


def philox4x32_10(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox on four 32-bit words, lowest first, for many counters at once.

    The words are in int64 tensors of one shape, as are those that it returns.
    """
    a, b, c, d = counter
    low_key, high_key = key
    for _ in range(10):
        # A product may wrap to a negative int64. Its bits are right; the mask removes the copies
        # of the sign that the shift brings in.
        by_a, by_c = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, c = ((by_c >> 32) & _WORD) ^ b ^ low_key, ((by_a >> 32) & _WORD) ^ d ^ high_key
        b, d = by_c & _WORD, by_a & _WORD
        low_key = (low_key + _KEY_STEPS[0]) & _WORD
        high_key = (high_key + _KEY_STEPS[1]) & _WORD
    return a, b, c, d


class BypassedStep(NamedTuple):
    """The result of one training step: weight[0]'s gradient on each rank, and the drift."""

    gradients: tuple[float, ...]
    drift: float


def trajectory(
    fix: Fix,
    steps: int = 5,
    seed: int = SEED,
    device: torch.device | str = "cpu",
) -> list[BypassedStep]:
    """Train the toy on the two ranks of the default process group; the same result on both.

    Args:
        fix: how the gradients are combined.
            "none": not at all; the loss calls the module.
            "all-reduce": the pull request's loop after backward.
            "wrapper": the loss calls the wrapper.
            "prepared": the wrapper is called only to prepare its reducer, its output is
            discarded, and the loss calls the module.
        steps: the number of steps.
        seed: the model's, for the CPU's generator.
        device: where this rank trains.
    """
    rank = dist.get_rank()
    torch.manual_seed(seed)
    module = nn.Linear(4, 4).to(device)
    wrapper = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    taken = []
    for step in range(steps):
        x, y = (t.to(device) for t in draw_inputs_and_targets(rank, step))
        optimizer.zero_grad()
        backward_with_fix(wrapper, x, y, fix)
        gradient = module.weight.grad.flatten()[0].clone()
        optimizer.step()
        weights = _gather(module.weight.detach())
        drift = (weights[0] - weights[1]).abs().max().item()
        taken.append(BypassedStep(tuple(g.item() for g in _gather(gradient)), drift))
    return taken


def draw_inputs_and_targets(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each float32 (4, 4): inputs differ between ranks, targets do not."""
    return randn((4, 4), 1000 + step) * 0.5 + rank, randn((4, 4), step)


def backward_with_fix(wrapper: DistributedDataParallel, x: Tensor, y: Tensor, fix: Fix) -> None:
    """One forward and backward pass; the gradients are combined as `fix` says."""
    if fix == "prepared":
        wrapper(x)
    model = wrapper if fix == "wrapper" else wrapper.module
    ((model(x) - y) ** 2).mean().backward()
    if fix == "all-reduce":
        for parameter in wrapper.module.parameters():
            if parameter.grad is not None:  # hangs if a gradient is missing on one rank only
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def _gather(tensor: Tensor) -> list[Tensor]:
    gathered = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return gathered
