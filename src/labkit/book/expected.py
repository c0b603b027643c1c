"""What the programs of labs/programs have to print, computed in one process from the same seed.

`PROGRAMS` has each program's columns. Its `expected(seed, world_size)` gives the rows, one per
rank: the numbers of a single process that has the samples of all ranks. It shares no code with the
programs. Two things have to be the same: how samples and first weights are drawn, and for
`resume` the random numbers of each rank's dropout.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

Row = list[float]


class Program(NamedTuple):
    """A program: its columns, the numbers in all but a hash, and where to look for a column."""

    columns: dict[str, str]
    """what to look at if the column is wrong, by its name, in the order of the columns"""
    expected: Callable[[int, int], list[Row]]
    tolerance: float
    """of a number that is not whole, relative; whole numbers have to be equal"""


def _weights(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def _generators(seed: int, world_size: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(world_size)]


def _labels(inputs: Tensor) -> Tensor:
    return inputs[:, :3].argmax(dim=1)


def _evaluated(seed: int, world_size: int) -> list[Row]:
    torch.manual_seed(seed)
    inputs = torch.randn(89, 6)  # repeats: 1 on 2 and on 3 ranks, and 3 on 4 ranks
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        outputs = model(inputs)
    accuracy = (outputs.argmax(dim=1) == _labels(inputs)).double().mean().item()
    loss = cross_entropy(outputs, _labels(inputs)).item()
    return [[len(range(rank, 89, world_size)), accuracy, loss] for rank in range(world_size)]


def _logged(seed: int, world_size: int) -> list[Row]:
    torch.manual_seed(seed)
    model = nn.Linear(5, 1)
    start, generators = _weights(model), _generators(seed, world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, means = [], []
    for step in range(12):
        inputs, targets = [], []
        for rank, own in enumerate(generators):
            count = int(torch.randint(1, 9, (1,), generator=own))
            inputs.append(torch.randn(count, 5, generator=own))
            targets.append(inputs[-1].sum(dim=1, keepdim=True) + rank)
        of_samples = mse_loss(model(torch.cat(inputs)), torch.cat(targets), reduction="none")
        optimizer.zero_grad()
        of_samples.mean().backward()
        optimizer.step()
        losses.append(of_samples.detach())
        if step % 4 == 3:
            means.append(torch.cat(losses).mean().item())
            losses.clear()
    return [[*means, (_weights(model) - start).norm().item()]] * world_size


def _mixed(seed: int, world_size: int) -> list[Row]:
    """In float32, with the whole batch of each step; the first step is skipped.

    Most of the even steps' gradients are too short to be clipped, and the odd ones' are not.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    held_out, start, generators = torch.randn(64, 6), _weights(model), _generators(seed, world_size)
    norms: list[float] = []
    for step in range(6):
        of_ranks = [torch.randn(4, 6, generator=own) for own in generators for _ in range(3)]
        inputs = torch.cat(of_ranks) * (3 if step % 2 else 0.3)
        if step == 0:
            continue
        loss = cross_entropy(model(inputs), _labels(inputs))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norms.append(torch.cat([gradient.flatten() for gradient in gradients]).norm().item())
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient * min(1.0, 0.6 / norms[-1])
    with torch.no_grad():
        loss = cross_entropy(model(held_out), _labels(held_out))
    return [[1024, norms[0], loss.item(), (_weights(model) - start).norm().item()]] * world_size


def _resumed(seed: int, world_size: int) -> list[Row]:
    """Without a stop. Each rank's dropout goes on where its own last one ended."""
    torch.manual_seed(seed)
    inputs = torch.randn(48, 6)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
    start = _weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    states = [own.get_state() for own in _generators(seed, world_size)]
    step, last = 0, [0.0] * world_size
    for epoch in range(3):
        order = torch.randperm(48, generator=torch.Generator().manual_seed(seed + epoch))
        for batch in order.view(-1, 4, world_size).unbind():
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 0.2 * 0.9**step
            for rank in range(world_size):
                torch.set_rng_state(states[rank])
                own = inputs[batch[:, rank]]
                loss = cross_entropy(model(own), _labels(own))
                (loss / world_size).backward()
                states[rank], last[rank] = torch.get_rng_state(), loss.item()
            optimizer.step()
            step += 1
    moved = (_weights(model) - start).norm().item()
    return [[step, loss, moved] for loss in last]


PROGRAMS = {
    "evaluate": Program(
        {
            "samples": "which samples a rank gets twice, and whether it leaves them out",
            "accuracy": "what is added up, over which ranks, the divisor, and what the model draws",
            "loss": "a batch's loss (a sum or a mean), the divisor, and what the model draws",
        },
        _evaluated,
        5e-6,
    ),
    "resume": Program(
        {
            "steps": "which batches are trained on, and which are skipped",
            "loss": "the order of the samples, and the random numbers of each rank",
            "moved": "the order of the samples, and the random numbers of each rank",
            "weights": "what the checkpoint has of the model, the optimizer, the scheduler, the "
            "sampler, and each rank's random numbers, whether all of it is loaded, and what else "
            "draws from those random numbers",
        },
        _resumed,
        1e-3,
    ),
    "mixed": Program(
        {
            "scale": "which steps are skipped, what an overflow leaves behind, and who tells the "
            "scaler that a step has ended",
            "norm": "the gradient when its norm is taken: its scale, whether it is averaged, and "
            "which micro-batches are in it",
            "loss": "the limit of the norm, the order of the calls, and what is averaged",
            "moved": "the limit of the norm, the order of the calls, and what is averaged",
        },
        _mixed,
        0.005,
    ),
    "log_mean": Program(
        {
            "step_4": "which steps a log line covers, what is added up, over which ranks, and the "
            "divisor",
            "step_8": "what is left over from the previous log line",
            "step_12": "what is left over from the previous log line",
            "moved": "the gradient of a step: what a rank's summed loss is divided by, and what "
            "DDP's average does to it",
        },
        _logged,
        1e-3,
    ),
}
