"""Half precision on a GPU: by the wrapper's `mixed_precision`, and by autocast with a scaler."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision  # by this name only

from labkit.book.tables import bound
from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from tests.ddp_models import loss_of

from .machine import Machine, deterministic
from .proofs import Evidence
from .training import batches, distance, full_batch, gradients, model

NAME = "mlp"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
WITHIN = {"fp16": 1e-2, "bf16": 5e-2}


def first_gradients(wrapped: nn.Module, rank: int, device: torch.device) -> list[Tensor | None]:
    """Two steps; the gradients of the second, and float32 whatever computed them."""
    for _ in range(2):
        wrapped.zero_grad()
        loss_of(wrapped(next(batches(NAME, rank, 0, 1)).to(device))).backward()
    return gradients(wrapped)


def by_the_wrapper(
    rank: int, world_size: int, device: torch.device, dtype: str
) -> tuple[bool, float, float | None]:
    """Whether all is float32 afterwards; the distances to one process in float32, and to torch's.

    torch's own DDP takes `mixed_precision` on accelerators only.
    """
    deterministic(device)
    narrow = DTYPES[dtype]

    def settings() -> Any:
        return _MixedPrecision(param_dtype=narrow, reduce_dtype=narrow, buffer_dtype=narrow)

    wrapped = DropIn(model(NAME, device), mixed_precision=settings())
    ours = first_gradients(wrapped, rank, device)
    tensors = [*wrapped.parameters(), *ours]
    wide = all(tensor is not None and tensor.dtype == torch.float32 for tensor in tensors)
    to_one = distance(ours, full_batch(NAME, world_size, device, 1)).relative
    if device.type == "cpu":
        return wide, to_one, None
    theirs = DistributedDataParallel(model(NAME, device), mixed_precision=settings())
    return wide, to_one, distance(ours, first_gradients(theirs, rank, device)).relative


def by_autocast(rank: int, device: torch.device) -> tuple[bool, float]:
    """Three steps of autocast and GradScaler: whether bitwise torch's, and the last loss scale."""
    deterministic(device)
    module = model(NAME, device)
    seen, scale = [], 0.0
    for wrap in (DropIn, DistributedDataParallel):
        wrapped = wrap(copy.deepcopy(module), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
        for step in range(3):
            optimizer.zero_grad()
            batch = next(batches(NAME, rank, step, 1)).to(device)
            with torch.autocast(device.type, torch.float16):
                loss = loss_of(wrapped(batch))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        seen.append([parameter.detach().clone() for parameter in wrapped.parameters()])
        scale = scaler.get_scale()
    return distance(*seen).bitwise, scale


def find(machine: Machine) -> Iterator[Evidence]:
    for group in machine.groups():
        for dtype in DTYPES:
            of_ranks = group.run(by_the_wrapper, dtype)
            wide = all(found[0] for found in of_ranks)
            to_one = max(found[1] for found in of_ranks)
            to_torch = [found[2] for found in of_ranks if found[2] is not None]
            right = wide and to_one < WITHIN[dtype] and all(d < WITHIN[dtype] for d in to_torch)
            said = f"one process in fp32: {to_one:.1e}"
            said += f"; torch's: {bound(max(to_torch))}" if to_torch else "; torch's needs a GPU"
            yield Evidence(f"mixed_precision, {dtype}", group.label, right, said)
        of_ranks = group.run(by_autocast)
        bitwise = all(same for same, _ in of_ranks)
        scales = {scale for _, scale in of_ranks}
        yield Evidence(
            "autocast and GradScaler",
            group.label,
            bitwise and len(scales) == 1,
            f"parameters bitwise torch's: {bitwise}; loss scale on all ranks: {scales}",
        )
