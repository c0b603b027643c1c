"""Training one model on a device: what both wrappers, and one process alone, make of it."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.ddp_models import MODELS, loss_of

STEPS = 3
ROUNDING = 1e-5
"""Of a norm: how far float32 gradients may be apart that are the same but for rounding."""

_COARSE = {"mixed dtypes": 2e-2}  # one of its layers computes in bfloat16


class Distance(NamedTuple):
    """How far two lists of tensors are apart: in bits, and as a part of the second one's norm."""

    bitwise: bool
    relative: float


def distance(ours: list[Tensor | None], theirs: list[Tensor | None]) -> Distance:
    """The distance of two lists; infinite where one has a tensor and the other None, or a NaN."""
    bitwise, squares, norm = True, 0.0, 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a is None or b is None:
            if a is not b:
                return Distance(False, float("inf"))
            continue
        bitwise &= torch.equal(a, b)
        wide = torch.complex128 if a.is_complex() else torch.float64
        squares += (a.to(wide) - b.to(wide)).abs().pow(2).sum().item()
        norm += b.to(wide).abs().pow(2).sum().item()
    relative = (squares / norm) ** 0.5 if norm else float(squares > 0)
    return Distance(bitwise, relative if relative == relative else float("inf"))


def gradients(module: nn.Module) -> list[Tensor | None]:
    """A copy of each gradient, dense."""
    found = [parameter.grad for parameter in module.parameters()]
    return [g if g is None else (g.to_dense() if g.is_sparse else g).clone() for g in found]


def model(name: str, device: torch.device) -> nn.Module:
    """One of `MODELS`, the same on every rank and on every device."""
    torch.manual_seed(7)
    return MODELS[name].build().to(device)


def batches(name: str, rank: int, step: int, micro_batches: int) -> Iterator[Tensor]:
    """A rank's micro-batches in one step, drawn on the CPU: others on each rank, of other sizes."""
    torch.manual_seed(1000 * rank + step)
    for micro in range(micro_batches):
        yield MODELS[name].batch(5 + micro)


def train(
    wrapped: Any, name: str, rank: int, device: torch.device, micro_batches: int
) -> list[list[Tensor | None]]:
    """Train for STEPS steps: the gradients of each, and the state after it, one after the other."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    seen: list[list[Tensor | None]] = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        *accumulated, last = batches(name, rank, step, micro_batches)
        for batch in accumulated:
            with wrapped.no_sync():
                loss_of(wrapped(batch.to(device))).backward()
        loss_of(wrapped(last.to(device))).backward()
        if hasattr(wrapped, "finish"):  # a rung of the ladder
            wrapped.finish()
        seen.append(gradients(wrapped))
        optimizer.step()
        seen.append([tensor.detach().clone() for tensor in wrapped.state_dict().values()])
    return seen


def full_batch(
    name: str, world_size: int, device: torch.device, micro_batches: int
) -> list[Tensor | None]:
    """One process with the batches of all ranks: the gradients of the first step."""
    module = model(name, device)
    for rank in range(world_size):
        for batch in batches(name, rank, 0, micro_batches):
            (loss_of(module(batch.to(device))) / world_size).backward()
    return gradients(module)


def close(name: str, found: Distance) -> bool:
    """Whether this is no more than rounding, for this model."""
    return found.relative <= _COARSE.get(name, ROUNDING)


def both(
    ours: Callable[[nn.Module], Any],
    theirs: Callable[[nn.Module], Any],
    name: str,
    place: tuple[int, int, torch.device],
    where: torch.device,
    micro_batches: int = 1,
) -> tuple[Distance, Distance]:
    """Our training beside torch's, and our first gradients beside one process's.

    `where` is the device on which inputs are handed to the wrapper.
    """
    rank, world_size, device = place
    module = model(name, device)
    of_torch = train(theirs(copy.deepcopy(module)), name, rank, where, micro_batches)
    of_ours = train(ours(copy.deepcopy(module)), name, rank, where, micro_batches)
    alone = full_batch(name, world_size, device, micro_batches)
    whole = distance([t for part in of_ours for t in part], [t for part in of_torch for t in part])
    return whole, distance(of_ours[0], alone)
