"""Five layers of 353 KiB: torch's first bucket, of 1 MiB, holds three of them."""

from typing import Any

import torch
from torch import Tensor, nn

LAYERS = 5


def model() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(300, 300) for _ in range(LAYERS)))


def step(averager: Any, module: nn.Module, rank: int) -> list[Tensor]:
    """Forward and backward through a wrapper or a rung around `module`; the gradients."""
    module.zero_grad()
    inputs = torch.randn(4, 300, generator=torch.Generator().manual_seed(rank))
    averager(inputs).square().sum().backward()
    if hasattr(averager, "finish"):
        averager.finish()
    return [parameter.grad.clone() for parameter in module.parameters()]
