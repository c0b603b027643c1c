"""The rule of the book: DDP delivers the gradient of (1/W) Σ L_r, so choose Σ L_r = W · L.

It holds as long as every path between ranks carries gradient. Its special cases are the leaves of
"When do I multiply by the world size?", which the chapter runs and compares with one process.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.launch import run_ranks
from labkit.testing import gradient_of, gradients, largest_difference
from miniddp import MiniDDP
from miniddp.collectives import differentiable


class Encoder(nn.Module):
    """Outputs (n, 4), and a scale that belongs to the loss, as the temperature of CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
        self.log_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x), self.log_scale.exp()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_delivers_the_gradient_of_the_mean_of_any_local_losses(world_size):
    """Every rank weighs the outputs of all ranks as it likes, and not even as the others do."""
    torch.manual_seed(11)
    model, inputs = Encoder().double(), torch.randn(2 * world_size, 3).double()
    weights = torch.randn(world_size, len(inputs), 4).double()

    def local_loss(outputs: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        return (weight * outputs).sum().tanh() * scale

    def work(rank: int) -> list[list[Tensor]]:
        found = []
        for wrap in (DistributedDataParallel, MiniDDP):
            ddp = wrap(copy.deepcopy(model))
            outputs, scale = ddp(inputs[2 * rank : 2 * rank + 2])
            local_loss(differentiable.all_gather(outputs), scale, weights[rank]).backward()
            found.append(gradients(ddp))
        return found

    def mean_loss(model: nn.Module) -> Tensor:
        outputs, scale = model(inputs)
        return torch.stack([local_loss(outputs, scale, weight) for weight in weights]).mean()

    true = gradient_of(model, mean_loss)
    for of_rank in run_ranks(work, world_size, device="cpu"):
        assert [largest_difference(found, true) < 1e-12 for found in of_rank] == [True] * 2
