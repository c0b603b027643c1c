"""What a rank sends and holds: counted, against the formulas."""

import pytest
import torch
from torch import nn

from labkit.launch.ranks import run_ranks
from labkit.profiling.step_cost import StepCost, step_cost
from miniddp import MiniDDP
from miniddp.sharded import Zero2, Zero2Optimizer, ZeroRedundancyOptimizer, fully_shard

SIZE = 4 * (24 * 12 + 24 * 24)  # bytes of the parameters, which 2 and 4 ranks share evenly
FLAGS = 64  # bytes that tell which gradients exist


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24, bias=False), nn.Linear(24, 24, bias=False))


def wrap(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    if kind == "sharded as one group":  # torch, too, keeps it whole until backward
        model = fully_shard(build())
        return model, torch.optim.Adam(model.parameters())
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


def cost_on_this_rank(rank: int, kind: str) -> StepCost:
    batch = torch.randn(5, 12, generator=torch.Generator().manual_seed(rank))
    return step_cost(*wrap(kind), lambda model: model(batch).pow(2).mean())


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("kind", "times", "whole"),
    [
        ("ddp", 2, ["parameters", "gradients", "state"]),
        ("zero1", 3, ["parameters", "gradients"]),
        ("zero2", 2, ["parameters"]),
        ("sharded", 3, []),
        ("sharded, kept whole", 2, []),
        ("sharded as one group", 2, []),
    ],
)
def test_bytes_are_those_of_the_formulas(kind, times, whole, world_size):
    for found in run_ranks(cost_on_this_rank, world_size, kind):
        expected = times * SIZE * (world_size - 1) / world_size
        assert expected <= found.sent <= expected + FLAGS * world_size
        for part in ("parameters", "gradients", "state"):
            copies = 2 if part == "state" else 1
            expected = copies * (SIZE if part in whole else SIZE // world_size)
            assert expected <= getattr(found, part) <= expected + FLAGS, part
