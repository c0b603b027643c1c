"""How noise depends on whether ranks share their random numbers."""

import math

import torch

from labkit.scenarios.shared_masks import _noise


def test_ranks_that_deviate_alike_have_correlation_one_and_twice_the_noise_of_four():
    random = torch.Generator().manual_seed(0)
    expected = torch.ones(5, dtype=torch.float64)
    alike = torch.randn(500, 5, generator=random, dtype=torch.float64).expand(4, 500, 5) + expected
    apart = torch.randn(4, 500, 5, generator=random, dtype=torch.float64) + expected
    same, other = _noise(alike, expected), _noise(apart, expected)
    assert math.isclose(same.correlation, 1.0)
    assert abs(other.correlation) < 0.05
    assert math.isclose(same.off / other.off, 2.0, rel_tol=0.1)


def test_ranks_whose_own_means_differ_are_compared_with_their_own_mean():
    random = torch.Generator().manual_seed(0)
    own = torch.randn(4, 500, 5, generator=random, dtype=torch.float64)
    shifted = own + torch.arange(4.0).reshape(4, 1, 1)
    expected = torch.ones(5, dtype=torch.float64)
    assert math.isclose(_noise(own, expected).correlation, _noise(shifted, expected).correlation)
