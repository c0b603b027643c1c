"""Collectives that carry gradients, over all ranks and along one dimension of a mesh."""

import pytest
import torch

from labkit.launch.ranks import run_ranks
from miniddp.collectives.differentiable import all_gather, all_reduce
from miniddp.collectives.mesh import Mesh
from tests.miniddp.beside_torch import wrong_on_a_mesh
from tests.on_ranks import on_ranks


@on_ranks(3)
def test_the_input_is_left_as_it_was(rank):
    x = torch.full((2,), float(rank + 1))
    assert torch.equal(all_reduce(x), torch.full((2,), 6.0))
    assert torch.equal(x, torch.full((2,), float(rank + 1)))


@on_ranks(2)
def test_the_gradient_of_a_gradient_is_summed_over_the_ranks_too(rank):
    for collective in (all_reduce, all_gather):
        x = torch.tensor([1.0 + rank], requires_grad=True)
        loss = (collective(x).sum() ** 3).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        # Each rank computes (x₀ + x₁)³ at x₀ = 1 and x₁ = 2; the gradients of both ranks are
        # summed, so the first is 2 · 3 · 3², and of the sum of these the second is 4 · 6 · 3.
        assert (first.item(), second.item()) == (54, 72)


@on_ranks(2)
def test_a_lazily_conjugated_tensor_is_gathered_by_its_value(rank):
    conjugated = torch.tensor([1 + 2j]).conj()
    assert all_gather(conjugated * 1 if rank else conjugated).tolist() == [1 - 2j, 1 - 2j]


def test_a_collective_joins_the_ranks_along_its_dimension_and_so_does_its_backward():
    assert run_ranks(wrong_on_a_mesh, 4, device="cpu") == [[]] * 4


def test_a_mesh_without_dimensions_is_one_process_and_changes_nothing():
    mesh, x = Mesh(), torch.tensor([3.0])
    mesh.add_up(x, ["data"])
    assert (mesh.size("data"), mesh.index("data")) == (1, 0)
    assert mesh.sum(x, "data") is mesh.gather(x, "data") is x
    assert x.item() == 3


def test_add_up_refuses_a_string_whose_letters_are_no_dimensions():
    with pytest.raises(TypeError, match=r"pass \['data'\]"):
        Mesh().add_up(torch.tensor([3.0]), "data")
