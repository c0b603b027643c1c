"""Muon on shards against torch.optim.Muon in one process."""

import pytest
import torch
from torch import nn

from labkit.launch.ranks import run_ranks
from labkit.testing import RecordedCollectives, ratio_and_cosine
from miniddp.sharded import fully_shard
from miniddp.sharded.muon import ShardedMuon, newton_schulz

STEPS = 3


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10, bias=False), nn.Tanh(), nn.Linear(10, 7, bias=False))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def on_ranks(rank: int, way: str) -> tuple[list[torch.Tensor], int]:
    """The whole matrices after training, and the bytes of the optimizer's messages per step."""
    model = fully_shard(build())
    optimizer = ShardedMuon(model.parameters(), lr=0.1, way=way)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step)).pow(2).mean().backward()
        with RecordedCollectives() as recorded:
            optimizer.step()
    moved = sum(collective.bytes for collective in recorded.launched)
    return [p.sharding.gather(p.detach()).clone() for p in model.parameters()], moved


def alone(world_size: int) -> list[torch.Tensor]:
    model = build()
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        everything = torch.cat([batch(rank, step) for rank in range(world_size)])
        model(everything).pow(2).mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def moves(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    return [p - start for p, start in zip(parameters, build().parameters(), strict=True)]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("way", ["gather", "owner"])
def test_the_update_is_that_of_torchs_muon_in_one_process(way, world_size):
    wanted = moves(alone(world_size))
    for parameters, moved in run_ranks(on_ranks, world_size, way):
        ratio, cosine = ratio_and_cosine(moves(parameters), wanted)
        assert abs(ratio - 1) < 2e-3  # newton_schulz rounds to bfloat16
        assert cosine > 1 - 1e-5
        assert moved > 0


def test_on_each_shard_it_is_another_update_on_which_the_ranks_agree():
    results = run_ranks(on_ranks, 2, "shard")
    for parameters, moved in results:
        _, cosine = ratio_and_cosine(moves(parameters), moves(alone(2)))
        assert cosine < 0.98
        assert moved == 0
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0][0], strict=True))


def test_newton_schulz_brings_singular_values_near_one():
    for shape in ((12, 5), (5, 12)):
        matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
        values = torch.linalg.svdvals(newton_schulz(matrix).float())
        assert 0.3 < values.min() <= values.max() < 1.6
