"""For bypassed_wrapper.ipynb.

1. A trainer with the anatomy of the pull request's, with its bug or without it. It has
   a model wrapped in DDP, `_get_model()` that unwraps it, a loss computed inside the
   model, a `DistributedSampler`, and a checkpoint of rank 0. Model and data are made
   up.
2. How many all-reduces a step makes, and how many start before backward has ended.
3. Changes that DDP accepts without a message, and that make replicas diverge.
4. Two figures.
"""

import copy
from typing import Literal, NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from labkit.book import figures
from labkit.testing.compare import gradients


class Regressor(nn.Module):
    """Two linear layers; returns the mean squared error of x (n, 8) against y (n,
    1).
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def compute_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.compute_loss(x, y)


class Trainer:
    """Adam on one rank's share of the data. `bypassed`: loss on the inner module."""

    def __init__(
        self, data: TensorDataset, bypassed: bool, rank: int, shards: int
    ) -> None:
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
    """Held-out loss after each epoch, samples that this rank saw, its last
    checkpoint.
    """

    losses: list[float]
    seen: set[int]
    checkpoint: dict[str, Tensor]


def draw_samples(samples: int) -> TensorDataset:
    """Inputs (samples, 8) with noisy targets, from torch's generator as it is."""
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

    `reshuffle` calls the sampler's `set_epoch`. `shards` cuts the data into that many
    shares; the world size when None.
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


WorkingFix = Literal["all-reduce", "wrapper", "prepared"]


class Communication(NamedTuple):
    """All-reduces of one step, those before its last gradient, forwards, gradients."""

    all_reduces: int
    during_backward: int
    forwards: int
    gradients: list[Tensor]


def four_layers() -> nn.Module:
    """Four `Linear(32, 32)`, with the same weights at each call."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))


def one_step(rank: int, x: Tensor, y: Tensor, fix: WorkingFix) -> Communication:
    """One rank's second step on 8 rows of x and y, each (8 W, 32). For `run_ranks`.

    fix: "all-reduce" after backward; the loss through the "wrapper"; "prepared", a call
    of the wrapper that only prepares its reducer, and the loss on the module.
    """
    module = four_layers()
    # Small buckets, so that a small model has several: about one per layer.
    wrapper = DistributedDataParallel(module, bucket_cap_mb=0.004)
    events: list[str] = []

    def noted_all_reduce(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        events.append("all-reduce")
        return allreduce_hook(state, bucket)

    wrapper.register_comm_hook(None, noted_all_reduce)
    module.register_forward_hook(lambda *_: events.append("forward"))
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))

    mine = slice(rank * 8, rank * 8 + 8)
    for _ in range(2):  # DDP rebuilds its buckets after the first step
        module.zero_grad()
        events.clear()
        if fix == "prepared":
            wrapper(x[mine])
        forward = wrapper if fix == "wrapper" else module
        F.mse_loss(forward(x[mine]), y[mine]).backward()
        if fix == "all-reduce":
            for parameter in module.parameters():
                events.append("all-reduce")
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    after = events[::-1].index("gradient")
    all_reduces = events.count("all-reduce")
    return Communication(
        all_reduces, all_reduces - after, events.count("forward"), gradients(module)
    )


Cause = Literal["nothing", "converted", "unfrozen", "loaded on rank 1", "step skipped"]


def replicas(rank: int, cause: Cause, steps: int) -> list[Tensor]:
    """This rank's weights after each step of SGD, flattened, for `run_ranks`.

    Args:
        cause: one of

            - "nothing"
            - "converted": `.double()` after wrapping
            - "unfrozen": a parameter is frozen while the model is wrapped
            - "loaded on rank 1": rank 1 loads other weights after wrapping
            - "step skipped": rank 1 leaves out its second optimizer step
    """
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    module[0].weight.requires_grad_(cause != "unfrozen")
    wrapper = DistributedDataParallel(module)
    module[0].weight.requires_grad_(True)
    if cause == "converted":
        module.double()
    if cause == "loaded on rank 1" and rank == 1:
        module.load_state_dict({k: v + 0.1 for k, v in module.state_dict().items()})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.manual_seed(10 + rank)
    copies = []
    for step in range(steps):
        x, y = (t.to(module[0].weight) for t in (torch.randn(4, 3), torch.randn(4, 1)))
        optimizer.zero_grad()
        (wrapper(x) - y).square().mean().backward()
        if not (cause == "step skipped" and rank == 1 and step == 1):
            optimizer.step()
        copies.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    return copies


def drift(of_ranks: list[list[Tensor]]) -> list[float]:
    """For each step the largest difference of a weight between any two ranks."""
    steps = (torch.stack(copies) for copies in zip(*of_ranks, strict=True))
    return [(copies.amax(0) - copies.amin(0)).max().item() for copies in steps]


_X = (0.0, 2.35, 4.55, 6.55, 8.55)
_WIDTH = 1.75


def reducer_path() -> Figure:
    """Two rows of steps: the loss through the wrapper, and the loss on `.module`."""
    figure, ax = plt.subplots(figsize=(9.2, 2.9))
    _row(
        ax,
        0.0,
        [
            "wrapper(x)",
            "reducer:\nprepared",
            "backward",
            "hook: copy\ninto bucket",
            "all-reduce",
        ],
        ["prepares", "", "one call per\ngradient", "bucket full"],
        figures.RANKS[2],
    )
    _row(
        ax,
        1.75,
        [
            "wrapper.module(x)",
            "reducer:\nunprepared",
            "backward",
            "hook:\nreturns",
            "nothing",
        ],
        [None, "", "one call per\ngradient", None],
        figures.WRONG,
    )
    ax.set(xlim=(-0.1, _X[-1] + _WIDTH + 0.1), ylim=(2.7, -0.75))
    ax.axis("off")
    return figure


def _row(
    ax: Axes, y: float, steps: list[str], arrows: list[str | None], color: str
) -> None:
    for x, text in zip(_X, steps, strict=True):
        ax.add_patch(
            plt.Rectangle((x, y), _WIDTH, 0.8, facecolor=color + "33", edgecolor=color)
        )
        ax.text(x + _WIDTH / 2, y + 0.4, text, ha="center", va="center", fontsize=9)
    for x, following, text in zip(_X, _X[1:], arrows, strict=False):
        if text is None:  # the step is not taken
            ax.text(
                (x + _WIDTH + following) / 2,
                y + 0.4,
                "×",
                ha="center",
                va="center",
                color=color,
            )
            continue
        middle = (x + _WIDTH + following) / 2
        ax.annotate(
            "",
            (following, y + 0.4),
            (x + _WIDTH, y + 0.4),
            arrowprops={"arrowstyle": "->"},
        )
        ax.text(middle, y - 0.08, text, ha="center", va="bottom", fontsize=7.5)
