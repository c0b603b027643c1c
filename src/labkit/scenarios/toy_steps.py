"""Two small models for looking at a step, and batches that ranks can share.

On one core, computing a step takes about as long as sending its gradients over 1 Gbit/s. So
overlap has something to hide, and enough computation to hide it behind.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class ToyStep(NamedTuple):
    """A model with seeded weights, and the whole batch, (samples, …) in float32, on the CPU."""

    model: nn.Module
    inputs: Tensor


def stack_of_linears(
    seed: int = 0, layers: int = 6, width: int = 512, samples: int = 1024
) -> ToyStep:
    """`layers` × Linear(width, width): by default 12 parameters, 6 of them with 1 MiB each."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return ToyStep(model, torch.randn(samples, width))


def small_transformer(seed: int = 0, samples: int = 16) -> ToyStep:
    """8 encoder layers of width 256 on sequences of 64: 96 parameters, 24.1 MiB, no dropout."""
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    for parameter in model.parameters():  # its layers begin as copies of one
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return ToyStep(model, torch.randn(samples, 64, 256))


def loss_of(outputs: Tensor) -> Tensor:
    """Half the squared output per sample, averaged over the samples."""
    return outputs.flatten(1).square().sum(dim=1).mean() / 2
