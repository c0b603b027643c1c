"""Losses over gathered items have the full batch's gradient; a plain gather's has not."""

import torch

from labkit.launch.ranks import run_ranks
from miniddp.collectives.differentiable import all_gather, all_reduce


def test_the_input_is_left_as_it_was():
    def work(rank):
        x = torch.full((2,), float(rank + 1))
        assert torch.equal(all_reduce(x), torch.full((2,), 6.0))
        assert torch.equal(x, torch.full((2,), float(rank + 1)))

    run_ranks(work, 3)


def test_the_gradient_of_a_gradient_is_summed_over_the_ranks_too():
    def work(rank):
        for collective in (all_reduce, all_gather):
            x = torch.tensor([1.0 + rank], requires_grad=True)
            loss = (collective(x).sum() ** 3).sum()
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
            # Each rank computes (x₀ + x₁)³ at x₀ = 1 and x₁ = 2; the gradients of both ranks are
            # summed, so the first is 2 · 3 · 3², and of the sum of these the second is 4 · 6 · 3.
            assert (first.item(), second.item()) == (54, 72)

    run_ranks(work, 2)


def test_a_lazily_conjugated_tensor_is_gathered_by_its_value():
    def work(rank):
        conjugated = torch.tensor([1 + 2j]).conj()
        assert all_gather(conjugated * 1 if rank else conjugated).tolist() == [1 - 2j, 1 - 2j]

    run_ranks(work, 2)
