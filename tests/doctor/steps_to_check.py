"""Models and losses for `check_step`: its ranks import them."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))


def ragged(sizes: list[int]) -> list[Batch]:
    """Batches of these sizes, different from each other."""
    gen = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 5, generator=gen), torch.randint(0, 4, (n,), generator=gen)) for n in sizes
    ]


def mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def total(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def sum_over_global_count(model: nn.Module, batch: Batch) -> Tensor:
    count = torch.tensor(float(len(batch[1])))
    dist.all_reduce(count)
    return total(model, batch) * dist.get_world_size() / count


def past_the_wrapper(model: nn.Module, batch: Batch) -> Tensor:
    return mean(getattr(model, "module", model), batch)


def fails(model: nn.Module, batch: Batch) -> Tensor:
    if dist.is_initialized() and dist.get_rank() == 1:
        raise ValueError("of rank 1")
    return mean(model, batch)
