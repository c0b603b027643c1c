"""The ladder and the average by hand on a GPU: in every step what torch's DDP computes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from miniddp.ladder import RUNGS, Rung
from miniddp.manual import average_gradients

from .equality import judge
from .machine import Machine, deterministic
from .proofs import Evidence
from .training import Distance, both

MODELS = ("mlp", "transformer", "branches")
BY_HAND = ("average_gradients", "average_gradients, flat")
NAMES = (*BY_HAND, *(rung.__name__ for rung in RUNGS))


class Finishing(nn.Module):
    """A rung that is used like a wrapper: it finishes at the end of each synchronized backward."""

    def __init__(self, rung: Rung) -> None:
        super().__init__()
        self.module, self.rung = rung.module, rung

    def forward(self, *inputs: Any) -> Any:
        return self.rung(*inputs)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.rung.no_sync()

    def finish(self) -> None:
        self.rung.finish()


class ByHand(Rung):
    """`average_gradients`, with the interface of a rung."""

    flat = False

    def finish(self) -> None:
        average_gradients(self.module, flat=self.flat, group=self.group)


class ByHandFlat(ByHand):
    """The same, with one message for all gradients."""

    flat = True


def rung(name: str, module: nn.Module) -> Rung:
    """The rung of that name around `module`."""
    classes = {
        **{one.__name__: one for one in RUNGS},
        **dict(zip(BY_HAND, (ByHand, ByHandFlat), strict=True)),
    }
    return classes[name](module)


def compare(
    rank: int, world_size: int, device: torch.device, name: str
) -> dict[str, tuple[Distance, Distance]]:
    """On each rank: by model, how far a rung is from torch's DDP, and from one process."""
    deterministic(device)
    return {
        model: both(
            lambda module: Finishing(rung(name, module)),
            lambda module, model=model: DistributedDataParallel(
                module, find_unused_parameters=model == "branches"
            ),
            model,
            (rank, world_size, device),
            device,
            micro_batches=2,
        )
        for model in MODELS
    }


def find(machine: Machine) -> Iterator[Evidence]:
    for group in machine.groups():
        for name in NAMES:
            yield judge(name, group, group.run(compare, name))
