"""What a rank sends and holds: by the recorder and the tensors' storages, against the formulas."""

import pytest
import torch
from torch import nn

from labkit.launch.ranks import run_ranks
from labkit.testing import RecordedCollectives
from miniddp import MiniDDP
from miniddp.sharded import Zero2, Zero2Optimizer, ZeroRedundancyOptimizer, fully_shard

SIZE = 4 * (24 * 12 + 24 * 24)  # bytes of the parameters, which 2 and 4 ranks share evenly
FLAGS = 64  # bytes that tell which gradients exist


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24, bias=False), nn.Linear(24, 24, bias=False))


def wrap(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    if kind.startswith("sharded"):
        model = build()
        for part in (*model, model):
            fully_shard(part, reshard_after_forward=kind == "sharded")
        return model, torch.optim.Adam(model.parameters())
    if kind == "zero2":
        model = Zero2(build(), bucket_cap_mb=0.001)
        return model, Zero2Optimizer(model, torch.optim.Adam)
    model = MiniDDP(build())
    if kind == "zero1":
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    return model, torch.optim.Adam(model.parameters())


def sent(recorded: RecordedCollectives, world_size: int) -> float:
    """Bytes that a rank sends, if each collective is a ring."""
    total = 0.0
    for launched in recorded.launched:
        numbers = max(torch.Size(shape).numel() for shape in launched.shapes)
        whole = numbers * getattr(torch, launched.dtype).itemsize
        times = 2 if launched.op.startswith("allreduce") else 1
        total += times * whole * (world_size - 1) / world_size
    return total


def held(tensors: list[torch.Tensor]) -> int:
    """Bytes of all distinct storages."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def a_step(rank: int, world_size: int, kind: str) -> dict[str, float]:
    model, optimizer = wrap(kind)
    for step in range(2):  # the first one plans buckets
        optimizer.zero_grad()
        with RecordedCollectives() as recorded:
            batch = torch.randn(5, 12, generator=torch.Generator().manual_seed(rank + 10 * step))
            model(batch).pow(2).mean().backward()
            optimizer.step()
    parts = getattr(optimizer, "shards", list(model.parameters()))
    inner = getattr(optimizer, "inner", optimizer)
    state = [v for values in inner.state.values() for v in values.values() if v.ndim]
    gradients = [p.grad for p in parts] + [p.grad for p in model.parameters()]
    return {
        "sent": sent(recorded, world_size),
        "parameters": held([p.detach() for p in model.parameters()]),
        "gradients": held([g for g in gradients if g is not None]),
        "state": held(state),
    }


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("kind", "times", "whole"),
    [
        ("ddp", 2, ["parameters", "gradients", "state"]),
        ("zero1", 3, ["parameters", "gradients"]),
        ("zero2", 2, ["parameters"]),
        ("sharded", 3, []),
        ("sharded, kept whole", 2, []),
    ],
)
def test_bytes_are_those_of_the_formulas(kind, times, whole, world_size):
    for found in run_ranks(a_step, world_size, kind):
        expected = times * SIZE * (world_size - 1) / world_size
        assert expected <= found.pop("sent") <= expected + FLAGS * world_size
        for part, size in found.items():
            copies = 2 if part == "state" else 1
            expected = copies * (SIZE if part in whole else SIZE // world_size)
            assert expected <= size <= expected + FLAGS, part
