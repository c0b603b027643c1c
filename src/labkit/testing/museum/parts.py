"""What exhibits share: their label, and their correct parts, so that each has one bug only."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

Bug = Literal["scale", "direction", "drift", "deadlock", "phantom update", "no overlap"]


@dataclass(frozen=True)
class Exhibit:
    """A broken implementation and its label.

    `wrap` is used as `labkit.testing.trial` describes. `bug` is its kind:

    - scale: every gradient is wrong by one factor (cosine 1), so a learning rate or Adam hides it;
    - direction: gradients point in another direction (cosine < 1); no positive factor repairs that;
    - drift: replicas that should be bitwise equal are not;
    - deadlock: ranks launch different collectives, which hang or mix up two gradients;
    - phantom update: parameters move that a single process would leave alone;
    - no overlap: every gradient is right, but communication delays it.

    `caught_by` names the function of `labkit.testing.invariants` that rejects it, on at least
    `ranks_needed` ranks.
    """

    wrap: type
    bug: Bug
    caught_by: str
    ranks_needed: int = 2

    @property
    def name(self) -> str:
        """The name of its class, in lowercase with underscores."""
        return re.sub("(?<!^)([A-Z])", r"_\1", self.wrap.__name__).lower()

    @property
    def title(self) -> str:
        """What it does wrong: the first line of its docstring."""
        return (self.wrap.__doc__ or "").partition("\n")[0]


class Trainer:
    """A module that begins with rank 0's parameters and buffers, on every rank."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        broadcast_from_rank_0(module)

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.module(inputs)


class AveragingTrainer(Trainer):
    """The right trainer: it averages the gradients after backward."""

    def finish(self) -> None:
        average_gradients(self.module)


class OverlappingTrainer(Trainer):
    """A trainer with hooks on the gradients, which do nothing under `no_sync`."""

    accumulating = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.accumulating = True
        try:
            yield
        finally:
            self.accumulating = False


def broadcast_from_rank_0(module: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0, in one float64 vector."""
    tensors = [*module.parameters(), *module.buffers()]
    flat = one_vector(tensors).double()
    dist.broadcast(flat, src=0)
    copy_back(flat, tensors)


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen, in the module's order."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def used_somewhere(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that have a gradient on some rank, in the module's order.

    If only this rank has none, its `grad` becomes zeros. Costs one all-reduce of one flag per
    parameter.
    """
    parameters = trainable(module)
    flags = [float(p.grad is not None) for p in parameters]
    used = torch.tensor(flags, device=parameters[0].device)
    dist.all_reduce(used)
    somewhere = [p for p, count in zip(parameters, used.tolist(), strict=True) if count]
    for parameter in somewhere:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return somewhere


def average_gradients(module: nn.Module) -> None:
    """The right average, after backward: one all-reduce of gradients, and one of flags."""
    gradients = [parameter.grad for parameter in used_somewhere(module)]
    flat = one_vector(gradients) / dist.get_world_size()
    dist.all_reduce(flat)
    copy_back(flat, gradients)


def piece_of_sum(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's piece of the sum of all ranks' `tensor`; the last pieces are filled with zeros.

    Costs one reduce-scatter.
    """
    size = dist.get_world_size(group)
    flat = nn.functional.pad(tensor.detach().flatten(), (0, -tensor.numel() % size))
    piece = flat.new_empty(len(flat) // size)
    dist.reduce_scatter_single(piece, flat, group=group)
    return piece


@torch.no_grad()
def fill_from_pieces(tensor: Tensor, piece: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill `tensor` with the pieces of all ranks. Costs one all-gather."""
    flat = piece.new_empty(len(piece) * dist.get_world_size(group))
    dist.all_gather_single(flat, piece, group=group)
    tensor.copy_(flat[: tensor.numel()].view_as(tensor))


def one_vector(tensors: list[Tensor]) -> Tensor:
    """All elements in one new vector."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@torch.no_grad()
def copy_back(flat: Tensor, tensors: list[Tensor]) -> None:
    """Fill `tensors` with the elements of `flat`, in the order of `one_vector`."""
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
