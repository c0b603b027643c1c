"""MiniDDP obeys what every data-parallel implementation has to obey, with buckets of any size."""

from __future__ import annotations

from functools import partial

import pytest

from labkit.launch.ranks import run_ranks
from labkit.testing.invariants import INVARIANTS, communication_overlaps_backward, violations
from miniddp.torch_drop_in import DistributedDataParallel as MiniDDP


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_miniddp_obeys_every_invariant_and_overlaps(world_size):
    def work():
        checks = (*INVARIANTS, communication_overlaps_backward)
        ddp = partial(MiniDDP, find_unused_parameters=True)
        small_views = partial(ddp, bucket_cap_mb=0.0003, gradient_as_bucket_view=True)
        return [violations(wrap, invariants=checks) for wrap in (ddp, small_views)]

    assert run_ranks(work, world_size, timeout=120, device="cpu") == [[{}, {}]] * world_size


def test_as_it_comes_it_fails_only_where_parameters_are_unused_as_torchs_does():
    def work():
        checks = (*INVARIANTS, communication_overlaps_backward)
        return list(violations(MiniDDP, invariants=checks))

    assert run_ranks(work, 3, timeout=120, device="cpu") == [["missing_counts_as_zeros"]] * 3
