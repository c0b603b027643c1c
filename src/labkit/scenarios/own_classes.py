"""Noisy points of eight classes, and a classifier that learns them in some hundred steps.

The ranks draw from all classes, or each has its own: class c is then rank c mod W's. Local training
loses more in the second case, because each rank's best weights are different ones.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

CLASSES, INPUTS, HIDDEN = 8, 16, 32
SAMPLES = 16  # per rank and step
NOISE = 1.5  # standard deviation; the classes' centers have 1


class Batch(NamedTuple):
    """`inputs`, (samples, 16) in float32, and `labels`, (samples,) in int64, on the CPU."""

    inputs: Tensor
    labels: Tensor


def seeded_classifier(seed: int = 0) -> nn.Module:
    """An MLP of 808 parameters, the same for equal seeds; reseeds the global generator."""
    torch.manual_seed(seed)
    layers = [nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)]
    return nn.Sequential(*layers)


def draw_batch(rank: int, world_size: int, step: int, own: bool = False, seed: int = 0) -> Batch:
    """What `rank` trains on in `step`; with `own`, its own classes only."""
    generator = torch.Generator().manual_seed(1_000_000 * (seed + 1) + 1000 * step + rank)
    classes = torch.arange(CLASSES)
    if own:
        classes = classes[classes % world_size == rank % min(world_size, CLASSES)]
    return _points(classes, SAMPLES, generator, seed)


@torch.no_grad()
def held_out_loss(model: nn.Module, seed: int = 0) -> float:
    """The mean cross-entropy on 1,024 points of all classes, which no rank trains on."""
    generator = torch.Generator().manual_seed(seed + 1)
    inputs, labels = _points(torch.arange(CLASSES), 1024, generator, seed)
    device = next(model.parameters()).device
    return cross_entropy(model(inputs.to(device)), labels.to(device)).item()


def _points(classes: Tensor, samples: int, generator: torch.Generator, seed: int) -> Batch:
    centers = torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(seed))
    labels = classes[torch.randint(len(classes), (samples,), generator=generator)]
    noise = NOISE * torch.randn(samples, INPUTS, generator=generator)
    return Batch(centers[labels] + noise, labels)
