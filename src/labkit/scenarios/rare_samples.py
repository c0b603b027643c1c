"""Sixteen samples, the last four of them rare: the problem of the chapters on surprises.

With W ranks, rank r holds the r-th of W equal slices. On up to four ranks, the rare samples are all
on the last rank. Its gradient is larger than the others', as happens with real data. Without that,
half of the bugs in these chapters would be invisible.
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EVERY_ROW = slice(None)


@dataclass(frozen=True)
class Problem:
    """A model, and the global batch of one step.

    Attributes:
        model: the module before the step. `replica` copies it.
        inputs: (N, features), float32.
        targets: (N, outputs), float32.
    """

    model: nn.Module
    inputs: Tensor
    targets: Tensor

    def loss(self, module: nn.Module, rows: slice = EVERY_ROW) -> Tensor:
        """The mean squared error of `module` over `rows`, 0-d."""
        return F.mse_loss(module(self.inputs[rows]), self.targets[rows])

    def rows(self, rank: int, world_size: int) -> slice:
        """The slice of samples that `rank` holds; N must be a multiple of `world_size`."""
        share = len(self.inputs) // world_size
        return slice(rank * share, (rank + 1) * share)

    def replica(self) -> nn.Module:
        """A copy of the model, to be trained or wrapped."""
        return copy.deepcopy(self.model)


def rare_samples(rare_inputs: bool = False) -> Problem:
    """The problem: 16 samples of 6 features, one target each, and an MLP of 65 parameters.

    The last four targets are shifted by 4; with `rare_inputs` the last four inputs by 2 as well.
    Seeded; the caller's random number generator is left alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inputs, targets = torch.randn(16, 6), torch.randn(16, 1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    targets[12:] += 4
    if rare_inputs:
        inputs[12:] += 2
    return Problem(model, inputs, targets)


def halves(rows: slice) -> list[slice]:
    """`rows` as two micro-batches of equal size."""
    middle = (rows.start + rows.stop) // 2
    return [slice(rows.start, middle), slice(middle, rows.stop)]
