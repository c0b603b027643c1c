"""Losses over gathered items have the full batch's gradient; a plain gather's has not."""

import copy

import torch

from labkit.launch.ranks import run_ranks
from miniddp.collectives.differentiable import all_gather, all_reduce


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
