"""A few steps of training, to compare how far the weights have moved; with a loss scaler, too."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from labkit.scenarios.rare_samples import EVERY_ROW, Problem
from labkit.scenarios.variants import Held
from labkit.testing.verdict import moved, weights

BAD_STEP = 1  # the second of three


def trained(
    module: nn.Module,
    loss: Callable[[], Tensor],
    optimizer: Optimizer,
    steps: int,
    after_step: Callable[[int], None] = lambda _: None,
) -> list[Tensor]:
    """Take `steps` steps on `loss()`; return how far each parameter of `module` has moved.

    `after_step` is called with the number of steps taken, from 1.
    """
    start = weights(module)
    for number in range(1, steps + 1):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        after_step(number)
    return moved(module, start)


def average_weights(module: nn.Module) -> None:
    """Replace each parameter by its mean over the ranks of the default group."""
    for parameter in module.parameters():
        parameter.data /= dist.get_world_size()
        dist.all_reduce(parameter.data)


def scaled_steps(
    problem: Problem,
    module: nn.Module,
    rows: slice = EVERY_ROW,
    forward: nn.Module | None = None,
    before_step: Callable[[torch.amp.GradScaler, Optimizer], None] = lambda *_: None,
) -> Held:
    """Three steps with a `GradScaler` in float16, with one broken label in the second.

    The label of the last sample overflows float16, so the gradient of the rank that holds it is
    infinite. `forward` is what is called (a wrapper of `module`; `module` itself when None), and
    `before_step` runs between the backward and `scaler.step`.

    Returns how far the weights have moved, with the scale at the end and which steps were taken as
    notes.
    """
    start, taken = weights(module), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    optimizer.register_step_post_hook(lambda *_: taken.append(number))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for number in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = (forward or module)(problem.inputs[rows])
        labels = problem.targets.clone()
        if number == BAD_STEP:
            labels[-1] = 1e6
        scaler.scale(F.mse_loss(outputs.float(), labels[rows])).backward()
        before_step(scaler, optimizer)
        scaler.step(optimizer)  # not taken if it finds an infinity or a NaN
        scaler.update()
    return Held(moved(module, start), (int(scaler.get_scale()), *(n in taken for n in range(3))))
