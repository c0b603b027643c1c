"""What `fully_shard` sends and holds; labs/in_pieces.py counts the other ways."""

import gc

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


def whole_gradients_on_their_way(rank: int) -> int:
    """How many tensors of a layer's size and more there are when backward reaches the input."""
    model = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(4)))
    layer = 4 * 24 * 24
    for part in (*model, model):
        fully_shard(part)
    found: list[int] = []

    def count(_gradient: torch.Tensor) -> None:
        tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        found.append(sum(size > layer for size in sizes.values()))  # a message also has flags

    inputs = torch.randn(5, 24, requires_grad=True)
    inputs.register_hook(count)
    model(inputs).pow(2).mean().backward()
    return found[0]


def test_backward_holds_the_whole_gradients_of_one_layer_at_a_time():
    assert run_ranks(whole_gradients_on_their_way, 2) == [1, 1]
