"""The toy of the pull request "Multi-GPU training does not data-parallelize", and its two tables.

Two ranks train a linear layer. The model is wrapped in DistributedDataParallel, but the loss calls
the inner module, so the wrapper's forward never runs and the gradients are never averaged. Sizes,
seeds, and the order of the draws are the pull request's, because its numbers depend on them.
It drew its data on GPUs; `labkit.scenarios.cuda_random` draws the same numbers on a CPU.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.scenarios.cuda_random import randn

Fix = Literal["none", "all-reduce", "wrapper", "prepared"]
Draw = Callable[[Sequence[int], int], Tensor]

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


class BypassedStep(NamedTuple):
    """The result of one training step: weight[0]'s gradient on each rank, and the drift."""

    gradients: tuple[float, ...]
    drift: float


def trajectory(
    fix: Fix,
    steps: int = 5,
    seed: int = SEED,
    device: torch.device | str = "cpu",
    draw: Draw = randn,
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
        draw: `draw(shape, seed)` gives the data's random numbers, as a GPU draws them.
    """
    rank = dist.get_rank()
    torch.manual_seed(seed)
    module = nn.Linear(4, 4).to(device)
    wrapper = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    taken = []
    for step in range(steps):
        x, y = (t.to(device) for t in draw_inputs_and_targets(rank, step, draw))
        optimizer.zero_grad()
        backward_with_fix(wrapper, x, y, fix)
        gradient = module.weight.grad.flatten()[0].clone()
        optimizer.step()
        weights = _gather(module.weight.detach())
        drift = (weights[0] - weights[1]).abs().max().item()
        taken.append(BypassedStep(tuple(g.item() for g in _gather(gradient)), drift))
    return taken


def draw_inputs_and_targets(rank: int, step: int, draw: Draw = randn) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each float32 (4, 4): inputs differ between ranks, targets do not."""
    return draw((4, 4), 1000 + step) * 0.5 + rank, draw((4, 4), step)


def backward_with_fix(wrapper: DistributedDataParallel, x: Tensor, y: Tensor, fix: Fix) -> None:
    """One forward and backward pass; the gradients are combined as `fix` says."""
    if fix == "prepared":
        wrapper(x)
    model = wrapper if fix == "wrapper" else wrapper.module
    ((model(x) - y) ** 2).mean().backward()
    if fix == "all-reduce":
        all_reduce_existing_gradients(wrapper.module)


def all_reduce_existing_gradients(module: nn.Module) -> None:
    """The pull request's fix, unchanged: it hangs if a gradient is missing on one rank only."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def _gather(tensor: Tensor) -> list[Tensor]:
    gathered = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return gathered
