"""One training run with sums and averages in all combinations, and the learning rate of each.

The thread is "Is average the correct way for the gradient in DistributedDataParallel with multi
nodes?". Its questions have one form: one process trains with batch size 16 and learning rate 0.01;
which learning rate gives the same training on several processes? `train` runs one epoch of that
training with any wrapper, and `matching_lr` is the answer. The thread names no model and no data.
Both are ours, small, and drawn from a seed.
"""

from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from labkit.testing.compare import gradients

Reduction = Literal["mean", "sum"]
Combine = Literal["average", "sum"]
LOSSES: tuple[Reduction, ...] = get_args(Reduction)
COMBINATIONS: tuple[Combine, ...] = get_args(Combine)

# The thread's: of one process.
BATCH = 16
LEARNING_RATE = 0.01

SEED = 0
FEATURES, HIDDEN, CLASSES = 8, 32, 4


def seeded_data(seed: int = SEED, samples: int = 512) -> TensorDataset:
    """Inputs, float32 (samples, 8), and classes, int64 (samples,), the same on every process."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(samples, FEATURES, generator=generator)
    y = 2 * (x[:, 0] > 0).long() + (x[:, 1] > x[:, 2]).long()
    # A tenth of the labels is noise.
    noise = torch.randint(CLASSES, (samples,), generator=generator)
    noisy = torch.rand(samples, generator=generator) < 0.1
    return TensorDataset(x, torch.where(noisy, noise, y))


def seeded_model(seed: int = SEED) -> nn.Module:
    """The same weights on every process: (batch, 8) to the scores of 4 classes, (batch, 4)."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def batches(
    data: TensorDataset, own_batch: int, rank: int = 0, world_size: int = 1, epoch: int = 0
) -> DataLoader:
    """One rank's batches of `own_batch` samples in one epoch, shuffled by epoch.

    In each step, the ranks together hold the samples that one process with batch size `own_batch *
    world_size` has. Samples that do not fill a step are dropped.
    """
    sampler = DistributedSampler(data, world_size, rank, drop_last=True)
    sampler.set_epoch(epoch)
    return DataLoader(data, own_batch, sampler=sampler, drop_last=True)


def train(
    model: nn.Module,
    loader: DataLoader,
    optimizer: Optimizer,
    loss: Reduction = "mean",
    scale: float = 1.0,
    clip: float | None = None,
) -> None:
    """Train `model`, a plain module or any wrapper, on all batches of `loader`.

    The loss is `scale` times the batch's cross-entropy, its mean or its sum. The combined gradients
    are clipped to the norm `clip`.
    """
    device = next(model.parameters()).device
    for x, y in loader:
        optimizer.zero_grad()
        scores = model(x.to(device))
        (scale * F.cross_entropy(scores, y.to(device), reduction=loss)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


class Trained(NamedTuple):
    """The gradient of the first step and the weights after the epoch, on the CPU, per parameter."""

    gradient: list[Tensor]
    weights: list[Tensor]


def one_epoch(
    model: nn.Module, loader: DataLoader, loss: Reduction = "mean", lr: float = LEARNING_RATE
) -> Trained:
    """Train `model` with plain SGD; keep the gradient of the first step."""
    device = next(model.parameters()).device
    x, y = next(iter(loader))
    F.cross_entropy(model(x.to(device)), y.to(device), reduction=loss).backward()
    first = [gradient.cpu() for gradient in gradients(model)]
    train(model, loader, torch.optim.SGD(model.parameters(), lr=lr), loss)
    return Trained(first, [p.detach().cpu() for p in model.parameters()])


def combined_factor(loss: Reduction, combine: Combine, world_size: int) -> float:
    """The combined gradient as a multiple of the gradient of one process with all the samples."""
    # Means want to be averaged and sums to be summed; a sum of W means is W times too large.
    if loss == "mean":
        return world_size if combine == "sum" else 1
    return 1 / world_size if combine == "average" else 1


def matching_lr(
    loss: Reduction, combine: Combine, world_size: int, batch: int, lr: float = LEARNING_RATE
) -> float:
    """SGD's learning rate on `world_size` ranks, if one process with `BATCH` samples uses `lr`.

    Args:
        loss, combine: the loss that each rank back-propagates, and how gradients are combined. The
            single process has the same loss.
        world_size: the number of ranks.
        batch: the samples of one step on all ranks together. If it is `BATCH`, the training is the
            same up to rounding. If it is κ times that, a mean loss takes κ times the learning rate
            (the linear scaling rule, an approximation). A sum needs no change: it has grown.
    """
    growth = batch / BATCH if loss == "mean" else 1
    return lr * growth / combined_factor(loss, combine, world_size)
