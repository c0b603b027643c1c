"""Muon, local updates, and meshes on ranks, and what they have to compute.

The tests start these on CPUs, and `tests.gpu` on GPUs, so nothing here needs pytest.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.optim import SGD

from labkit.testing import RecordedCollectives, ratio_and_cosine
from miniddp import MiniDDP
from miniddp.collectives.mesh import Mesh
from miniddp.extras.local_updates import DiLoCo, LocalSGD
from miniddp.sharded import fully_shard
from miniddp.sharded.muon import ShardedMuon

STEPS = 6
CPU = torch.device("cpu")


def build(device: torch.device = CPU) -> nn.Module:
    """A model, the same on every rank."""
    torch.manual_seed(0)
    layers = (nn.Linear(6, 10, bias=False), nn.Tanh(), nn.Linear(10, 7, bias=False))
    return nn.Sequential(*layers).to(device)


def batch(rank: int, step: int) -> Tensor:
    """A rank's inputs of one step, drawn on the CPU."""
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, optimizer: Any, batches: list[Tensor], device: torch.device) -> None:
    """One step per batch."""
    for x in batches:
        optimizer.zero_grad()
        model(x.to(device)).pow(2).mean().backward()
        optimizer.step()


def muon(
    rank: int, world_size: int, device: torch.device, ways: list[str]
) -> dict[str, tuple[float, float, int]]:
    """On each rank, by way: the ratio and the cosine of the movement to that of torch's Muon.

    torch's runs in one process that has all batches. Then the bytes that `step` communicates.
    """
    start = [p.detach() for p in build(device).parameters()]
    alone = build(device)
    everything = [torch.cat([batch(r, s) for r in range(world_size)]) for s in range(STEPS)]
    train(alone, torch.optim.Muon(alone.parameters(), lr=0.1), everything, device)
    wanted = [p.detach() - s for p, s in zip(alone.parameters(), start, strict=True)]
    found = {}
    for way in ways:
        model = fully_shard(build(device))
        optimizer = ShardedMuon(model.parameters(), lr=0.1, way=way)
        train(model, optimizer, [batch(rank, step) for step in range(STEPS)], device)
        wholes = [p.sharding.gather(p.detach()) for p in model.parameters()]
        moved = [whole - s for whole, s in zip(wholes, start, strict=True)]
        with RecordedCollectives() as recorded:
            optimizer.step()
        sent = sum(collective.bytes for collective in recorded.launched)
        found[way] = (*ratio_and_cosine(moved, wanted), sent)
    return found


def with_local_updates(rank: int, device: torch.device, kind: str, every: int) -> list[Tensor]:
    """On each rank: the weights after training; `kind` is ddp, torch, local, diloco, or plain.

    plain: DiLoCo whose outer optimizer only takes the average over.
    """
    model = build(device)
    inner = SGD(model.parameters(), lr=0.1, momentum=0.5 if every > 1 else 0.0)
    optimizer: Any = inner
    if kind == "torch":
        averager = PeriodicModelAverager(period=every, warmup_steps=every - 1)
        optimizer = PostLocalSGDOptimizer(inner, averager)
    elif kind == "local":
        optimizer = LocalSGD(inner, every)
    elif kind == "diloco":
        optimizer = DiLoCo(inner, every, lr=0.7, momentum=0.9)
    elif kind == "plain":
        optimizer = DiLoCo(inner, every, lr=1.0, momentum=0.0)
    mine = [batch(rank, step) for step in range(STEPS)]
    train(MiniDDP(model) if kind == "ddp" else model, optimizer, mine, device)
    return [parameter.detach() for parameter in model.parameters()]


def wrong_on_a_mesh(rank: int, device: torch.device) -> list[str]:
    """On each of 2 x 2 ranks: which collective, or gradient of one, has another value than it must.

    Each sums and gathers 1 + rank along a dimension; its loss weighs the sum by rank + 1.
    """
    mesh, wrong = Mesh(data=2, tensor=2), []
    row, column = divmod(rank, 2)
    weights = torch.tensor([1.0, 10.0], device=device)
    for dimension, members in (("data", (column, column + 2)), ("tensor", (2 * row, 2 * row + 1))):
        x = torch.tensor([1.0 + rank], device=device, requires_grad=True)
        total, everyone = mesh.sum(x, dimension), mesh.gather(x, dimension)
        (total * (rank + 1) + (everyone * weights).sum()).sum().backward()
        gradient = torch.tensor([float(rank)], device=device)
        mesh.add_up(gradient, [dimension])
        ones = [1.0 + member for member in members]
        # Both ranks' factors of the sum, and both ranks' weight of this rank's place.
        of_x = sum(ones) + 2 * weights[members.index(rank)].item()
        for what, value, right in (
            ("sum", total.tolist(), [sum(ones)]),
            ("gather", everyone.tolist(), ones),
            ("backward", x.grad.tolist(), [of_x]),
            ("add_up", gradient.tolist(), [sum(members)]),
        ):
            if value != right:
                wrong.append(f"{what} along {dimension}: {value}, and {right} is right")
    everything = torch.tensor([float(rank)], device=device)
    mesh.add_up(everything, ["data", "tensor", "a dimension of size 1"])
    if (mesh.index("data"), mesh.index("tensor"), everything.item()) != (row, column, 6):
        wrong.append("the place of this rank, or the sum over all ranks")
    return wrong
