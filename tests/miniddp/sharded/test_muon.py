"""Muon on shards against torch.optim.Muon in one process."""

import pytest
import torch

from labkit.launch.ranks import run_ranks
from miniddp.sharded.muon import newton_schulz
from tests.miniddp.beside_torch import muon


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_update_is_that_of_torchs_muon_in_one_process_unless_each_shard_is_alone(world_size):
    for found in run_ranks(muon, world_size, ["gather", "owner", "shard"], device="cpu"):
        _, cosine, sent = found.pop("shard")
        assert cosine < 0.98
        assert sent == 0
        for ratio, cosine, sent in found.values():
            assert abs(ratio - 1) < 2e-3  # newton_schulz rounds to bfloat16
            assert cosine > 1 - 1e-5
            assert sent > 0


def test_newton_schulz_brings_singular_values_near_one():
    for shape in ((12, 5), (5, 12)):
        matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
        values = torch.linalg.svdvals(newton_schulz(matrix).float())
        assert 0.3 < values.min() <= values.max() < 1.6
