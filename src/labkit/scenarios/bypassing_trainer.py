"""A small trainer with the anatomy of the pull request's, with its bug or without it.

It has a model wrapped in DDP, `_get_model()` that unwraps it, a loss computed inside the model, a
`DistributedSampler`, and a checkpoint of rank 0. Model and data are made up.
"""

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Regressor(nn.Module):
    """Two linear layers; calling it returns the mean squared error of x (n, 8) against y (n, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def compute_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.compute_loss(x, y)


class Trainer:
    """Adam on one rank's share of the data. With `bypassed` the loss goes around the wrapper."""

    def __init__(self, data: TensorDataset, bypassed: bool, rank: int, shards: int) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(Regressor())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.sampler = DistributedSampler(data, shards, rank, seed=0)
        self.loader = DataLoader(data, batch_size=4, sampler=self.sampler)
        self.bypassed = bypassed

    def _get_model(self) -> Regressor:
        return self.model.module

    def gradient_step(self, batch: list[Tensor]) -> None:
        """Forward and backward of one batch (x, y)."""
        self.optimizer.zero_grad()
        forward = self._get_model().compute_loss if self.bypassed else self.model
        forward(*batch).backward()

    def train_epoch(self) -> None:
        for batch in self.loader:
            self.gradient_step(batch)
            self.optimizer.step()

    def checkpoint(self) -> dict[str, Tensor]:
        """What rank 0 saves: the weights, without the wrapper's prefix."""
        return copy.deepcopy(self._get_model().state_dict())


class BypassingRun(NamedTuple):
    """Held-out loss after each epoch, the samples this rank saw, and its last checkpoint."""

    losses: list[float]
    seen: set[int]
    checkpoint: dict[str, Tensor]


def draw_samples(samples: int) -> TensorDataset:
    """`samples` inputs (8 numbers each) with noisy targets, from torch's generator as it is."""
    x = torch.randn(samples, 8)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.3 * torch.randn(samples, 1)
    return TensorDataset(x, y)


def train_bypassing(
    rank: int,
    world_size: int,
    data: TensorDataset,
    held_out: TensorDataset,
    bypassed: bool,
    reshuffle: bool,
    epochs: int = 20,
    shards: int | None = None,
) -> BypassingRun:
    """Train on every rank, as a function for `run_ranks`.

    `reshuffle` calls the sampler's `set_epoch`. `shards` cuts the data into that many shares;
    the world size when None.
    """
    trainer = Trainer(data, bypassed, rank, shards or world_size)
    losses, seen = [], set()
    for epoch in range(epochs):
        trainer.sampler.set_epoch(epoch if reshuffle else 0)
        seen |= set(trainer.sampler)
        trainer.train_epoch()
        with torch.no_grad():
            losses.append(trainer._get_model().compute_loss(*held_out.tensors).item())
    return BypassingRun(losses, seen, trainer.checkpoint())
