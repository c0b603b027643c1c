"""Both wrappers obey what every data-parallel implementation must, with buckets of any size."""

from functools import partial

import pytest

from labkit.launch import run_ranks
from labkit.testing import INVARIANTS, violations
from labkit.testing.overlap import communication_overlaps_backward
from miniddp import MiniDDP
from miniddp.torch_drop_in import DistributedDataParallel

CHECKS = (*INVARIANTS, communication_overlaps_backward)


@pytest.mark.parametrize("wrapper", [MiniDDP, DistributedDataParallel])
def test_it_obeys_every_invariant_and_overlaps(wrapper):
    def work():
        ddp = partial(wrapper, find_unused_parameters=True)
        small_views = partial(ddp, bucket_cap_mb=0.0003, gradient_as_bucket_view=True)
        return [violations(wrap, invariants=CHECKS) for wrap in (ddp, small_views)]

    assert run_ranks(work, 3, timeout=600, device="cpu") == [[{}, {}]] * 3
