"""Losses over gathered items have the full batch's gradient; a plain gather's has not."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as torchs_own
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from labkit.testing.compare import gradients, largest_difference, ratio_and_cosine
from miniddp.collectives.differentiable import all_gather, all_reduce
from miniddp.torch_drop_in import DistributedDataParallel as DropIn

ITEMS = 3


def encoder() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).double()


def items(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    draw = torch.randn(2, ITEMS, 4, generator=generator, dtype=torch.float64)
    return draw[0], draw[1]


def contrastive(left: Tensor, right: Tensor) -> Tensor:
    scores = F.normalize(left, dim=1) @ F.normalize(right, dim=1).T
    return F.cross_entropy(4 * scores, torch.arange(len(scores)))


def full_batch(world_size: int) -> list[Tensor]:
    model = encoder()
    left, right = (torch.cat(x) for x in zip(*map(items, range(world_size)), strict=True))
    contrastive(model(left), model(right)).backward()
    return gradients(model)


def plain_gather(tensor: Tensor) -> Tensor:
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, tensor.detach())
    pieces[dist.get_rank()] = tensor
    return torch.cat(pieces)


def gathered_loss(rank: int, wrapper: type[nn.Module], gather: str) -> list[Tensor]:
    model = wrapper(encoder())
    left, right = model(torch.cat(items(rank))).split(ITEMS)
    take = {"ours": all_gather, "plain": plain_gather}[gather]
    contrastive(take(left), take(right)).backward()
    return gradients(model.module)


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, DropIn])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_loss_of_gathered_items_averages_to_the_full_batchs_gradient(wrapper, world_size):
    for found in run_ranks(gathered_loss, world_size, wrapper, "ours"):
        assert largest_difference(found, full_batch(world_size)) < 1e-14


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_plain_gather_gives_one_wth_of_it(world_size):
    for found in run_ranks(gathered_loss, world_size, DistributedDataParallel, "plain"):
        ratio, cosine = ratio_and_cosine(found, full_batch(world_size))
        assert ratio == pytest.approx(1 / world_size)
        assert cosine == pytest.approx(1)


def torchs_all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    if hasattr(torchs_own, "all_gather_single_autograd"):
        return torchs_own.all_gather_single_autograd(x, dim, group)
    return torchs_own.all_gather_tensor_autograd(x.contiguous(), dim, group)  # torch 2.11


def both_ways(rank: int, op: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Value and gradient, ours and those of torch's private module, for a loss unlike on each."""
    weight = torch.arange(1.0, 13.0).view(6, 2) * (rank + 1)
    found = []
    for ours in (True, False):
        x = (torch.arange(6.0).view(2, 3).T + rank).requires_grad_()  # not contiguous
        if op == "all_gather":
            out = all_gather(x) if ours else torchs_all_gather(x, 0, dist.group.WORLD)
            loss = (out * weight).sum()
        else:
            out = all_reduce(x) if ours else torchs_own.all_reduce(x, "sum", dist.group.WORLD)
            loss = (out * weight[:3]).sum()
        loss.backward()
        found += [out.detach().clone(), x.grad]
    return tuple(found)


@pytest.mark.parametrize("op", ["all_gather", "all_reduce"])
def test_values_and_gradients_equal_torchs_own_to_the_bit(op):
    for value, gradient, torchs_value, torchs_gradient in run_ranks(both_ways, 2, op):
        assert torch.equal(value, torchs_value)
        assert torch.equal(gradient, torchs_gradient)


def test_the_input_is_left_as_it_was():
    def reduce_a_copy(rank):
        x = torch.full((2,), float(rank + 1))
        before = copy.deepcopy(x)
        total = all_reduce(x)
        return torch.equal(x, before), total

    for untouched, total in run_ranks(reduce_a_copy, 3):
        assert untouched
        assert torch.equal(total, torch.full((2,), 6.0))


def differentiated_twice(rank):
    found = []
    for collective in (all_reduce, all_gather):
        x = torch.tensor([1.0 + rank], requires_grad=True)
        loss = (collective(x).sum() ** 3).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        found.append((first.item(), second.item()))
    return found


def test_the_gradient_of_a_gradient_is_summed_over_the_ranks_too():
    # Each rank computes (x₀ + x₁)³ at x₀ = 1 and x₁ = 2; the gradients of both ranks are summed,
    # so the first is 2 · 3 · 3², and of the sum of these on both ranks the second is 4 · 6 · 3.
    for found in run_ranks(differentiated_twice, 2):
        assert found == [(54.0, 72.0)] * 2


def lazily_conjugated(rank):
    return all_gather(torch.tensor([1 + 2j]).conj() * 1 if rank else torch.tensor([1 + 2j]).conj())


def test_a_lazily_conjugated_tensor_is_gathered_by_its_value():
    for gathered in run_ranks(lazily_conjugated, 2):
        assert gathered.tolist() == [1 - 2j, 1 - 2j]


def outside_the_group(rank):
    group = dist.new_group([0])
    said = []
    for collective in (all_gather, all_reduce):
        try:
            collective(torch.ones(1), group)
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_rank_outside_the_group_is_told_so():
    assert run_ranks(outside_the_group, 2) == [
        [],
        ["rank 1 is not in the group: call on its members only"] * 2,
    ]
