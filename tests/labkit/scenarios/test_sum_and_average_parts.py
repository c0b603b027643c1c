"""Parts under DataParallel, wholes under DDP, and the noise that both average away."""

import pytest
import torch

from labkit.launch.ranks import run_ranks
from labkit.scenarios.jitter import adam, jitter, sgd
from labkit.scenarios.noise_scale import from_each_sample, two_norms
from labkit.scenarios.parts_and_wholes import parts_and_wholes
from labkit.scenarios.sum_and_average import seeded_data


def test_parts_sum_and_wholes_average_to_the_same_gradient() -> None:
    shares = parts_and_wholes(seeded_data())
    assert shares.seen_by_parallel == pytest.approx(sum(shares.parts), abs=1e-7)
    assert shares.seen_by_ddp == pytest.approx(sum(shares.wholes) / 4, abs=1e-7)
    assert shares.seen_by_ddp == pytest.approx(shares.seen_by_parallel, abs=1e-7)
    assert [4 * part for part in shares.parts] == pytest.approx(shares.wholes, abs=1e-6)


def test_sgd_keeps_its_jitter_with_kappa_and_adam_with_its_root() -> None:
    one_sgd, one_adam = jitter(sgd(1), 8), jitter(adam(1, 1), 8)
    assert jitter(sgd(4), 32) == pytest.approx(one_sgd, rel=0.05)
    assert jitter(adam(2, 4), 32) == pytest.approx(one_adam, rel=0.05)
    assert jitter(adam(4, 4), 32) > 1.3 * one_adam


def test_the_noise_scale_from_two_norms_is_near_that_from_each_sample() -> None:
    data = seeded_data()
    norms = torch.tensor(run_ranks(two_norms, 4, data, 8)).mean(dim=(0, 1))
    small, large = norms.tolist()
    variance = (small - large) / (1 / 8 - 1 / 32)
    square = (32 * large - 8 * small) / (32 - 8)
    assert variance / square == pytest.approx(from_each_sample(data), rel=0.1)
