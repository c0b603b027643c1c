"""Every exhibit is rejected by the invariant on its label, and is of the kind that it names."""

import pytest

from labkit.launch.ranks import run_ranks
from labkit.testing import invariants
from labkit.testing.invariants import INVARIANTS, violations
from labkit.testing.museum import exhibits
from labkit.testing.overlap import communication_overlaps_backward

NAMES = [exhibit.name for exhibit in exhibits()]
BY_NAME = {exhibit.name: exhibit for exhibit in exhibits()}


@pytest.fixture(scope="module")
def rejections():
    """Per number of ranks, on each rank: what an exhibit's own invariant and the gradient's say.

    Four ranks take only the exhibits that need so many.
    """

    def work(shown):
        found = {}
        for exhibit in shown:
            names = dict.fromkeys([exhibit.caught_by, "gradients_equal_full_batch"])
            checks = [getattr(invariants, name) for name in names]
            found[exhibit.name] = violations(exhibit.wrap, invariants=checks)
        return found

    of_four = [exhibit for exhibit in exhibits() if exhibit.ranks_needed == 4]
    shown = {2: exhibits(), 3: exhibits(), 4: of_four}
    return {n: run_ranks(work, n, shown[n], timeout=600, device="cpu") for n in shown}


def found_by(rejections, name):
    """The number of ranks, and what one of them found, for each run of an exhibit."""
    return [(n, one[name]) for n, of_ranks in rejections.items() for one in of_ranks if name in one]


@pytest.mark.slow  # the chapter's table of all checks and exhibits is compared by each test run
@pytest.mark.parametrize("name", NAMES)
def test_every_exhibit_is_rejected_on_every_rank_by_the_invariant_on_its_label(rejections, name):
    exhibit, rejected = BY_NAME[name], False
    for world_size, found in found_by(rejections, name):
        if world_size < exhibit.ranks_needed:
            assert found == {}, "it needs fewer ranks than its label says"
        else:
            rejected, error = True, found[exhibit.caught_by]
            assert error.invariant == exhibit.caught_by
            assert 0 <= error.rank < world_size
            assert error.cause
    assert rejected


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_exhibit_is_of_the_kind_that_its_label_says(rejections, name):
    exhibit = BY_NAME[name]
    for world_size, found in found_by(rejections, name):
        comparisons = [error.comparison for error in found.values() if error.comparison is not None]
        if world_size < exhibit.ranks_needed:
            assert not comparisons
        elif exhibit.bug == "scale":
            assert comparisons
            assert all(c.cosine > 1 - 1e-9 and abs(c.ratio - 1) > 0.1 for c in comparisons)
        elif exhibit.bug == "direction":
            assert any(c.cosine < 1 - 1e-4 for c in comparisons)
        else:
            assert "gradients_equal_full_batch" not in found


def test_every_invariant_rejects_some_exhibit():
    labeled = {exhibit.caught_by for exhibit in exhibits()}

    def work():
        ring = BY_NAME["whole_vector_ring"].wrap
        return list(violations(ring, invariants=[invariants.replicas_stay_identical]))

    assert run_ranks(work, 3, device="cpu") == [["replicas_stay_identical"]] * 3
    every = {check.__name__ for check in (*INVARIANTS, communication_overlaps_backward)}
    assert labeled | {"replicas_stay_identical"} == every
