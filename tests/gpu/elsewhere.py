"""Muon, local updates, meshes, and SyncBatchNorm on a GPU, against torch or a closed formula."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from miniddp.sync_batch_norm import SyncBatchNorm
from tests.miniddp.beside_torch import muon, with_local_updates, wrong_on_a_mesh

from .equality import Distance, distance
from .machine import Evidence, Machine, deterministic

# 1. Muon ------------------------------------------------------------------------------------------


def beside_muon(
    rank: int, world_size: int, device: torch.device
) -> dict[str, tuple[float, float, int]]:
    deterministic(device)
    return muon(rank, world_size, device, ["gather", "owner"])


def find_muon(machine: Machine) -> Iterator[Evidence]:
    group = machine.pair()
    of_ranks = group.run(beside_muon)
    for way in of_ranks[0]:
        off = max(abs(found[way][0] - 1) for found in of_ranks)
        angle = max(1 - found[way][1] for found in of_ranks)
        said = f"ratio 1 within {off:.0e}, cosine 1 within {max(angle, 0):.0e}"
        # Muon computes in bfloat16: another order of a sum moves a few entries by a rounding.
        holds = off < 2e-2 and angle < 1e-3  # on its rows alone, the cosine is below 0.98
        yield Evidence(f"Muon, {way}, beside torch's in one process", group.label, holds, said)


# 2. Local updates ---------------------------------------------------------------------------------


def local_updates(rank: int, device: torch.device) -> dict[str, Distance]:
    """On each rank: the distances to torch's PostLocalSGDOptimizer, and to DDP."""
    deterministic(device)

    def apart(ours: str, theirs: str, every: int) -> Distance:
        return distance(*(with_local_updates(rank, device, kind, every) for kind in (ours, theirs)))

    return {
        "local SGD beside torch's": apart("local", "torch", 3),
        "DiLoCo at every step beside DDP": apart("plain", "ddp", 1),
    }


def find_local_updates(machine: Machine) -> Iterator[Evidence]:
    group = machine.pair()
    of_ranks = group.run(local_updates)
    for name in of_ranks[0]:
        same = all(found[name].bitwise for found in of_ranks)
        off = max(found[name].relative for found in of_ranks)
        holds = off < 1e-5 and (same or "torch" not in name)
        yield Evidence(name, group.label, holds, f"bitwise: {same}; apart by {off:.0e}")


# 3. Meshes ----------------------------------------------------------------------------------------


def find_meshes(machine: Machine) -> Iterator[Evidence]:
    group = machine.group(4)
    wrong = [what for of_rank in group.run(wrong_on_a_mesh) for what in of_rank]
    said = wrong[0] if wrong else "all hold on every rank"
    yield Evidence("sum, gather, and their gradients", group.label, not wrong, said)


# 4. SyncBatchNorm ---------------------------------------------------------------------------------


def normalized(rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
    """On each rank: the distances to torch's SyncBatchNorm, which needs a GPU, and to one batch.

    Compared are outputs, gradients of inputs, and running statistics.
    """
    deterministic(device)
    draw = torch.Generator().manual_seed(0)
    rows = [4 + one for one in range(world_size)]
    x, factor = (torch.randn(sum(rows), 8, 5, 5, generator=draw).to(device) for _ in range(2))
    mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))

    def run(layer: nn.Module, own: slice) -> list[Tensor]:
        inputs = x[own].clone().requires_grad_()
        outputs = layer.to(device)(inputs)
        (outputs * factor[own]).sum().backward()
        return [outputs.detach(), inputs.grad, layer.running_mean, layer.running_var]

    ours = run(SyncBatchNorm(8), mine)
    outputs, gradients, *running = run(nn.BatchNorm2d(8), slice(None))
    found = {"one batch": distance(ours, [outputs[mine], gradients[mine], *running])}
    if device.type == "cuda":
        found["torch's"] = distance(ours, run(nn.SyncBatchNorm(8), mine))
    return found


def find_batch_norm(machine: Machine) -> Iterator[Evidence]:
    group = machine.pair()
    of_ranks = group.run(normalized)
    for name in of_ranks[0]:
        off = max(found[name].relative for found in of_ranks)
        yield Evidence(f"SyncBatchNorm beside {name}", group.label, off < 1e-5, f"off {off:.0e}")
