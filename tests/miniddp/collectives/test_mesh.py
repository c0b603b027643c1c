"""A mesh's collectives run along one dimension only, and their backward adds up along it, too."""

import pytest
import torch

from labkit.launch.ranks import run_ranks
from miniddp.collectives.mesh import Mesh
from tests.miniddp.beside_torch import wrong_on_a_mesh


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
