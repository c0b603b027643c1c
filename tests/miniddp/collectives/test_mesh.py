"""A mesh's collectives run along one dimension only, and their backward adds up along it, too."""

import pytest
import torch

from labkit.launch.ranks import run_ranks
from miniddp.collectives.mesh import Mesh


def along_both_dimensions(rank):
    mesh = Mesh(data=2, tensor=2)
    found = []
    for dimension in ("data", "tensor"):
        x = torch.tensor([1.0 + rank], requires_grad=True)
        total, everyone = mesh.sum(x, dimension), mesh.gather(x, dimension)
        (total * (rank + 1) + (everyone * torch.tensor([1.0, 10.0])).sum()).sum().backward()
        gradient = torch.tensor([float(rank)])
        mesh.add_up(gradient, [dimension])
        found.append((total.item(), everyone.tolist(), x.grad.item(), gradient.item()))
    everything = torch.tensor([float(rank)])
    mesh.add_up(everything, ["data", "tensor", "a dimension of size 1"])
    return mesh.index("data"), mesh.index("tensor"), found, everything.item()


def test_a_collective_joins_the_ranks_along_its_dimension_and_so_does_its_backward():
    for rank, (row, column, found, everything) in enumerate(run_ranks(along_both_dimensions, 4)):
        assert (row, column) == divmod(rank, 2)
        data, tensor = [column, column + 2], [2 * row, 2 * row + 1]
        for group, (total, everyone, of_x, gradient) in zip((data, tensor), found, strict=True):
            ones = [1.0 + member for member in group]
            assert (total, everyone, gradient) == (sum(ones), ones, sum(group))
            # Both ranks' factors of the sum, and both ranks' weight of this rank's place.
            assert of_x == sum(ones) + 2 * [1, 10][group.index(rank)]
        assert everything == 0 + 1 + 2 + 3


def test_a_mesh_without_dimensions_is_one_process_and_changes_nothing():
    mesh, x = Mesh(), torch.tensor([3.0])
    mesh.add_up(x, ["data"])
    assert (mesh.size("data"), mesh.index("data")) == (1, 0)
    assert mesh.sum(x, "data") is mesh.gather(x, "data") is x
    assert x.item() == 3


def test_add_up_refuses_a_string_whose_letters_are_no_dimensions():
    with pytest.raises(TypeError, match=r"pass \['data'\]"):
        Mesh().add_up(torch.tensor([3.0]), "data")
