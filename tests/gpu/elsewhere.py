"""Muon, local updates, meshes, and SyncBatchNorm on a GPU, against torch or a closed formula."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.optim import SGD

from labkit.testing.compare import ratio_and_cosine
from miniddp import MiniDDP
from miniddp.collectives.mesh import Mesh
from miniddp.extras.local_updates import DiLoCo, LocalSGD
from miniddp.sharded import fully_shard
from miniddp.sharded.muon import ShardedMuon
from miniddp.training import SyncBatchNorm

from .equality import distance
from .machine import Evidence, Machine, deterministic

STEPS = 6


def build(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(6, 10, bias=False), nn.Tanh(), nn.Linear(10, 7, bias=False))
    return nn.Sequential(*layers).to(device)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, optimizer: Any, batches: list[Tensor], device: torch.device) -> None:
    for x in batches:
        optimizer.zero_grad()
        model(x.to(device)).pow(2).mean().backward()
        optimizer.step()


# 1. Muon ------------------------------------------------------------------------------------------


def muon(rank: int, world_size: int, device: torch.device) -> dict[str, tuple[float, float]]:
    """On each rank, by way: (ratio, cosine) of the movement to torch's Muon in one process."""
    deterministic(device)
    start = [p.detach() for p in build(device).parameters()]
    alone = build(device)
    everything = [torch.cat([batch(r, s) for r in range(world_size)]) for s in range(STEPS)]
    train(alone, torch.optim.Muon(alone.parameters(), lr=0.1), everything, device)
    wanted = [p.detach() - s for p, s in zip(alone.parameters(), start, strict=True)]
    found = {}
    for way in ("gather", "owner"):
        model = fully_shard(build(device))
        mine = [batch(rank, step) for step in range(STEPS)]
        train(model, ShardedMuon(model.parameters(), lr=0.1, way=way), mine, device)
        wholes = [p.sharding.gather(p.detach()) for p in model.parameters()]
        moved = [whole - s for whole, s in zip(wholes, start, strict=True)]
        found[way] = ratio_and_cosine(moved, wanted)
    return found


def find_muon(machine: Machine) -> Iterator[Evidence]:
    group = machine.pair()
    of_ranks = group.run(muon)
    for way in of_ranks[0]:
        off = max(abs(found[way][0] - 1) for found in of_ranks)
        angle = max(1 - found[way][1] for found in of_ranks)
        said = f"ratio 1 within {off:.0e}, cosine 1 within {max(angle, 0):.0e}"
        # Muon computes in bfloat16: another order of a sum moves a few entries by a rounding.
        holds = off < 2e-2 and angle < 1e-3  # on its rows alone, the cosine is below 0.98
        yield Evidence(f"Muon, {way}, beside torch's in one process", group.label, holds, said)


# 2. Local updates ---------------------------------------------------------------------------------


def local_updates(rank: int, device: torch.device) -> dict[str, tuple[bool, float]]:
    """On each rank: the distances to torch's PostLocalSGDOptimizer, and to DDP."""
    deterministic(device)
    mine = [batch(rank, step) for step in range(STEPS)]

    def trained(kind: str) -> list[Tensor]:
        model = build(device)
        every = 1 if kind in ("ddp", "diloco") else 3
        inner = SGD(model.parameters(), lr=0.1, momentum=0.5 if every > 1 else 0.0)
        optimizer: Any = inner
        if kind == "torch":
            averager = PeriodicModelAverager(period=every, warmup_steps=every - 1)
            optimizer = PostLocalSGDOptimizer(inner, averager)
        elif kind == "local":
            optimizer = LocalSGD(inner, every)
        elif kind == "diloco":
            optimizer = DiLoCo(inner, every, lr=1.0, momentum=0.0)
        train(MiniDDP(model) if kind == "ddp" else model, optimizer, mine, device)
        return [parameter.detach() for parameter in model.parameters()]

    return {
        "local SGD beside torch's": distance(trained("local"), trained("torch")),
        "DiLoCo at every step beside DDP": distance(trained("diloco"), trained("ddp")),
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


def along_both_dimensions(rank: int, device: torch.device) -> list[tuple[bool, ...]]:
    """On each of 4 ranks, by dimension: whether sum, gather, their gradient, and add_up hold."""
    mesh = Mesh(data=2, tensor=2)
    row, column = divmod(rank, 2)
    found = []
    for dimension, members in (("data", (column, column + 2)), ("tensor", (2 * row, 2 * row + 1))):
        x = torch.tensor([1.0 + rank], device=device, requires_grad=True)
        weights = torch.tensor([1.0, 10.0], device=device)
        total, everyone = mesh.sum(x, dimension), mesh.gather(x, dimension)
        (total * (rank + 1) + (everyone * weights).sum()).sum().backward()
        gradient = torch.tensor([float(rank)], device=device)
        mesh.add_up(gradient, [dimension])
        ones = [1.0 + member for member in members]
        of_x = sum(ones) + 2 * weights[members.index(rank)].item()
        found.append(
            (
                total.item() == sum(ones),
                everyone.tolist() == ones,
                x.grad.item() == of_x,
                gradient.item() == sum(members),
            )
        )
    return found


def find_meshes(machine: Machine) -> Iterator[Evidence]:
    group = machine.group(4)
    checks = [all(checks) for found in group.run(along_both_dimensions) for checks in found]
    said = f"{sum(checks)} of {len(checks)} groups of checks hold"
    yield Evidence("sum, gather, and their gradients", group.label, all(checks), said)


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
