"""the drop-in together with its neighbors: replicas within a process, SyncBatchNorm, a global mean.

Ranks have different samples and different numbers of them, and each combination is held against the
full batch in one process and against torch's DDP around the same module.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from labkit.testing.compare import gradients, largest_difference
from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from miniddp.training.data_parallel import MiniDataParallel
from miniddp.training.losses import global_mean
from miniddp.training.sync_batch_norm import SyncBatchNorm

CLASSES = 3
STEPS = 3

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": DropIn,
    "views": lambda module: DropIn(module, gradient_as_bucket_view=True),
    "strict": lambda module: DropIn(module, strict=True),
    "unused": lambda module: DropIn(module, find_unused_parameters=True),
    "torch": DistributedDataParallel,
}


def network() -> nn.Module:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def normalized_network() -> nn.Module:
    torch.manual_seed(8)
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES)
    return nn.Sequential(*layers).double()


def replicas_within_the_process() -> nn.Module:
    return MiniDataParallel(network(), ["cpu"] * 2)


def synced_statistics() -> nn.Module:
    return SyncBatchNorm.convert_sync_batchnorm(normalized_network())


def share_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """2, 5, 8, … samples, so that a mean of the ranks' means is not the mean of all."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    number = 2 + 3 * rank
    x = torch.randn(number, 4, generator=generator, dtype=torch.float64) + rank
    return x, torch.randint(CLASSES, (number,), generator=generator)


def train(module: nn.Module, rank: int, local_mean: bool = False) -> list[list[Tensor]]:
    """Three steps of SGD; the gradients of each, the parameters and buffers at the end."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    seen = []
    for step in range(STEPS):
        x, y = share_of(rank, step)
        optimizer.zero_grad()
        loss_sum = F.cross_entropy(module(x), y, reduction="sum")
        loss = loss_sum / len(y) if local_mean else global_mean(loss_sum, len(y))
        loss.backward()
        seen.append(gradients(module))
        optimizer.step()
    return [*seen, [tensor.detach().clone() for tensor in module.state_dict().values()]]


def on_the_full_batch(module: nn.Module, world_size: int) -> list[list[Tensor]]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    seen = []
    for step in range(STEPS):
        xs, ys = zip(*(share_of(rank, step) for rank in range(world_size)), strict=True)
        optimizer.zero_grad()
        F.cross_entropy(module(torch.cat(xs)), torch.cat(ys)).backward()
        seen.append(gradients(module))
        optimizer.step()
    return [*seen, [tensor.detach().clone() for tensor in module.state_dict().values()]]


CASES = {
    "replicas within the process": (replicas_within_the_process, network),
    "synced statistics": (synced_statistics, normalized_network),
}


def in_a_rank(rank: int, name: str) -> dict[str, list[list[Tensor]]]:
    build, _ = CASES[name]
    found = {how: train(wrap(build()), rank) for how, wrap in WRAPPERS.items()}
    return found | {"local means": train(DropIn(build()), rank, local_mean=True)}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_each_step_is_that_of_the_full_batch_and_of_torchs_wrapper(name, world_size):
    right = on_the_full_batch(CASES[name][1](), world_size)
    for found in run_ranks(in_a_rank, world_size, name, timeout=60):
        for how in WRAPPERS:
            for ours, torchs, wanted in zip(found[how], found["torch"], right, strict=True):
                assert largest_difference(ours, wanted) < 1e-12, how
                assert largest_difference(ours, torchs) < 1e-14, how
        # The same composition with each rank's own mean as its loss is another gradient.
        assert largest_difference(found["local means"][0], right[0]) > 1e-2
