"""What labs under torchrun share; the labs' own tests show the rest."""

import math

import pytest

from labkit.launch.lab import largest_on_any_rank
from labkit.launch.ranks import run_ranks


def test_the_largest_figure_is_found_on_whichever_rank_it_is_and_known_to_all():
    def largest(rank):
        return largest_on_any_rank(0.5, rank % 2 * 3.25)

    assert run_ranks(largest, 3) == [3.25] * 3


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("figures", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_nan_of_one_rank_is_the_largest_for_all(where, figures):
    def largest(rank):
        return largest_on_any_rank(*(figures if rank == where else (2.0, 3.0)))

    assert all(map(math.isnan, run_ranks(largest, 3)))
