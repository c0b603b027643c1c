"""Every exhibit is rejected by the invariant on its label, and is of the kind that it names."""

import pytest

from labkit.launch.ranks import run_ranks
from labkit.testing import invariants
from labkit.testing.invariants import INVARIANTS, communication_overlaps_backward, violations
from labkit.testing.museum import exhibits

NAMES = [exhibit.name for exhibit in exhibits()]
BY_NAME = {exhibit.name: exhibit for exhibit in exhibits()}


@pytest.fixture(scope="module", params=[2, 3])
def rejections(request):
    """For each exhibit, on each rank, what its own invariant and the gradient's say of it."""

    def work():
        found = {}
        for exhibit in exhibits():
            names = dict.fromkeys([exhibit.caught_by, "gradients_equal_full_batch"])
            checks = [getattr(invariants, name) for name in names]
            found[exhibit.name] = violations(exhibit.wrap, invariants=checks)
        return found

    return request.param, run_ranks(work, request.param, timeout=150, device="cpu")


@pytest.mark.parametrize("name", NAMES)
def test_every_exhibit_is_rejected_on_every_rank_by_the_invariant_on_its_label(rejections, name):
    world_size, of_ranks = rejections
    exhibit = BY_NAME[name]
    for found in of_ranks:
        if world_size < exhibit.ranks_needed:
            assert found[name] == {}, "it needs fewer ranks than its label says"
        else:
            error = found[name][exhibit.caught_by]
            assert error.invariant == exhibit.caught_by
            assert 0 <= error.rank < world_size
            assert error.cause


@pytest.mark.parametrize("name", NAMES)
def test_every_exhibit_is_of_the_kind_that_its_label_says(rejections, name):
    _, of_ranks = rejections
    bug = BY_NAME[name].bug
    for found in of_ranks:
        comparisons = [e.comparison for e in found[name].values() if e.comparison is not None]
        if bug == "scale":
            assert comparisons
            assert all(c.cosine > 1 - 1e-9 and abs(c.ratio - 1) > 0.1 for c in comparisons)
        elif bug == "direction":
            assert any(c.cosine < 1 - 1e-4 for c in comparisons)
        else:
            assert "gradients_equal_full_batch" not in found[name]


def test_every_invariant_rejects_some_exhibit():
    labeled = {exhibit.caught_by for exhibit in exhibits()}

    def work():
        ring = BY_NAME["whole_vector_ring"].wrap
        return list(violations(ring, invariants=[invariants.replicas_stay_identical]))

    assert run_ranks(work, 3, device="cpu") == [["replicas_stay_identical"]] * 3
    every = {check.__name__ for check in (*INVARIANTS, communication_overlaps_backward)}
    assert labeled | {"replicas_stay_identical"} == every
