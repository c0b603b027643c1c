"""What a rank sends and holds if one group is sharded; labs/in_pieces.py counts the other ways."""

import pytest
import torch
from torch import nn

from labkit.launch.ranks import run_ranks
from labkit.profiling.step_cost import StepCost, step_cost
from miniddp.sharded import fully_shard

SIZE = 4 * (24 * 12 + 24 * 24)  # bytes of the parameters, which 2 and 4 ranks share evenly


def cost_on_this_rank(rank: int) -> StepCost:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24, bias=False), nn.Linear(24, 24, bias=False))
    model = fully_shard(model)
    batch = torch.randn(5, 12, generator=torch.Generator().manual_seed(rank))
    optimizer = torch.optim.Adam(model.parameters())
    return step_cost(model, optimizer, lambda model: model(batch).pow(2).mean())


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_group_is_kept_whole_until_backward_as_torch_keeps_it(world_size):
    for found in run_ranks(cost_on_this_rank, world_size):
        share = SIZE // world_size
        assert 2 * (SIZE - share) <= found.sent <= 2 * (SIZE - share) + 64 * world_size
        held = (found.parameters, found.gradients, found.state - share)
        assert all(share <= part <= share + 64 for part in held)
