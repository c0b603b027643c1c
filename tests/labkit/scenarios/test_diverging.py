"""Ways in which replicas diverge: by how much, and under which optimizer."""

import pytest
import torch

from labkit.launch.ranks import run_ranks
from labkit.scenarios.diverging import drift, replicas


def test_replicas_that_nobody_disturbs_stay_bitwise_equal() -> None:
    assert drift(run_ranks(replicas, 3, "nothing", 20)) == [0.0] * 20


@pytest.mark.parametrize("cause", ["converted", "unfrozen"])
def test_a_parameter_without_a_hook_keeps_separating_the_replicas(cause: str) -> None:
    apart = drift(run_ranks(replicas, 2, cause, 20))
    assert all(distance > 0.01 for distance in apart)
    assert len(set(apart)) == 20


def test_with_plain_sgd_a_distance_between_replicas_stays() -> None:
    apart = drift(run_ranks(replicas, 2, "loaded on rank 1", 50))
    assert apart == pytest.approx([0.1] * 50, abs=1e-5)
    skipped = drift(run_ranks(replicas, 2, "step skipped", 50))
    assert skipped[0] == 0
    assert skipped[1] > 0.01
    assert skipped[1:] == pytest.approx([skipped[1]] * 49, abs=1e-5)


def test_weight_decay_shrinks_the_distance_and_momentum_increases_it() -> None:
    def decay(parameters):
        return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1)

    def momentum(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    shrinking = drift(run_ranks(replicas, 2, "loaded on rank 1", 50, decay))
    assert shrinking[-1] < 0.7 * shrinking[0]
    growing = drift(run_ranks(replicas, 2, "step skipped", 50, momentum))
    assert growing[-1] > 3 * growing[1]
