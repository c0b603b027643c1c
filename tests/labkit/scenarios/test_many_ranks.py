"""The simulated job on many ranks: what its assumptions imply, computed another way."""

import pytest

from labkit.scenarios.many_ranks import (
    ALL_REDUCES,
    BACKWARD,
    BATCH,
    FORWARD,
    GRADIENTS,
    compute,
    step_seconds,
)
from miniddp.buckets import ParameterSize, arrival_plan, bucket_caps

WORLDS = [2**k for k in range(3, 15)]
SIZES = [ParameterSize(nbytes, "float32") for nbytes in GRADIENTS]
PLAN = arrival_plan(SIZES, range(len(SIZES)), bucket_caps())


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_computes_its_share_of_the_batch(world):
    assert compute(world).end == pytest.approx(BATCH / world * (FORWARD + BACKWARD))
    assert sum(compute(world).bytes) == sum(GRADIENTS)


@pytest.mark.parametrize("way", ALL_REDUCES)
def test_communication_only_adds_time_and_overlap_only_saves_it(way):
    for world in WORLDS:
        step = step_seconds(world, way, PLAN)
        assert compute(world).end < step <= step_seconds(world, way, PLAN, overlap=False)


def test_without_overlap_one_bucket_costs_the_latency_and_the_bandwidth_of_the_ring_once():
    world, nbytes = 16, sum(GRADIENTS)
    latency = (3 * 3e-6 + 10e-6) / 4  # three links inside the node, one to the next node
    expected = 2 * (world - 1) * (latency + nbytes / world * 8 / 400e9)
    step = step_seconds(world, "flat ring", [range(len(SIZES))], overlap=False)
    assert step - compute(world).end == pytest.approx(expected)


def test_more_samples_per_rank_leave_a_smaller_share_to_waiting():
    for way in ALL_REDUCES:
        shares = [
            compute(1024, batch).end / step_seconds(1024, way, PLAN, batch=batch)
            for batch in (BATCH, 4 * BATCH, 16 * BATCH)
        ]
        assert shares == sorted(shares)


@pytest.mark.parametrize("world", [0, 2, 6])
def test_ranks_that_do_not_fill_nodes_are_refused(world):
    with pytest.raises(ValueError, match=f"{world} ranks do not fill nodes of 4"):
        step_seconds(world, "tree", PLAN)
