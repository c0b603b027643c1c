"""Models and losses for `check_step`: its ranks import them."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


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


def scaled_by_the_environment(model: nn.Module, batch: Batch) -> Tensor:
    return float(os.environ["SCALE_OF_THE_STEP"]) * mean(model, batch)


def past_the_wrapper(model: nn.Module, batch: Batch) -> Tensor:
    return mean(getattr(model, "module", model), batch)


def fails_after_the_others_wait(model: nn.Module, batch: Batch) -> Tensor:
    """Rank 1 fails; rank 0, whose file would be listed first, fails because rank 1 is gone."""
    if dist.is_initialized() and dist.get_rank() == 1:
        time.sleep(0.3)
        raise ValueError("of rank 1")
    return mean(model, batch)


class LeavesWhileItStarts:
    """A loss whose import ends the process in the first rank that imports it, but in no other."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> tuple[Callable[[Path], Loss], tuple[Path]]:
        return _leave_once, (self.sign,)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return mean(model, batch)


def _leave_once(sign: Path) -> Loss:
    with contextlib.suppress(FileExistsError):
        sign.touch(exist_ok=False)
        os._exit(0)
    return mean


def unwrapped(module: nn.Module) -> nn.Module:
    return module


def never_ends(model: nn.Module, batch: Batch) -> Tensor:
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 1:
        time.sleep(60)
    return mean(model, batch)


def leaves(model: nn.Module, batch: Batch) -> Tensor:
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 1:
        os._exit(0)
    return mean(model, batch)
