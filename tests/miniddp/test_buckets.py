"""Plans: every parameter in one bucket, closed at its cap; torch's own plans reproduced."""

import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from miniddp.buckets import (
    FIRST_CAP_BYTES,
    MIB,
    NO_CAP,
    ParameterSize,
    arrival_plan,
    bucket_caps,
    initial_plan,
    sizes_of,
)

SIZES = st.lists(
    st.builds(
        ParameterSize,
        nbytes=st.integers(0, 300).map(lambda n: 4 * n),
        kind=st.sampled_from(["float32 on cpu", "float64 on cpu"]),
        sparse=st.sampled_from([False] * 9 + [True]),
    ),
    min_size=1,
    max_size=40,
)
CAPS = st.lists(st.integers(0, 2000), min_size=1, max_size=4)


def shuffled(sizes: list, seed: int) -> list[int]:
    order = list(range(len(sizes)))
    random.Random(seed).shuffle(order)
    return order


@given(SIZES, CAPS, st.integers())
def test_every_parameter_lies_in_exactly_one_bucket_with_its_own_kind(sizes, caps, seed):
    for plan in (initial_plan(sizes, caps), arrival_plan(sizes, shuffled(sizes, seed), caps)):
        assert sorted(index for bucket in plan for index in bucket) == list(range(len(sizes)))
        for bucket in plan:
            assert len({sizes[index].kind for index in bucket}) == 1
            assert len(bucket) == 1 or not any(sizes[index].sparse for index in bucket)


@given(SIZES, CAPS, st.integers())
def test_a_bucket_closes_once_its_size_reaches_its_cap_and_not_before(sizes, caps, seed):
    order = shuffled(sizes, seed)
    plan = arrival_plan(sizes, order, caps)
    for kind in {size.kind for size in sizes}:
        buckets = [b for b in plan if sizes[b[0]].kind == kind and not sizes[b[0]].sparse]
        for number, bucket in enumerate(buckets):
            cap = caps[min(number, len(caps) - 1)]
            nbytes = [sizes[index].nbytes for index in bucket]
            assert sum(nbytes[:-1]) < cap or len(bucket) == 1
            assert sum(nbytes) >= cap or bucket is buckets[-1]


@given(SIZES, CAPS, st.integers())
def test_buckets_launch_in_the_order_in_which_their_last_gradient_arrives(sizes, caps, seed):
    order = shuffled(sizes, seed)
    plan = arrival_plan(sizes, order, caps)
    last = [max(order.index(index) for index in bucket) for bucket in plan]
    assert last == sorted(last)


@given(SIZES, CAPS)
def test_the_initial_plan_runs_from_the_last_parameters_to_the_first(sizes, caps):
    first = [min(bucket) for bucket in initial_plan(sizes, caps)]
    assert first == sorted(first, reverse=True)


@given(SIZES)
def test_without_a_cap_there_is_one_bucket_for_each_kind(sizes):
    dense = {size.kind for size in sizes if not size.sparse}
    assert len(initial_plan(sizes, NO_CAP)) == len(dense) + sum(size.sparse for size in sizes)


TENSORS = st.lists(
    st.tuples(
        st.integers(0, 200),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
        st.sampled_from([False] * 5 + [True]),
    ),
    min_size=1,
    max_size=20,
)


@given(TENSORS, CAPS)
def test_the_initial_plan_is_the_one_that_torch_finds(described, caps):
    tensors = [torch.empty(n, dtype=dtype) for n, dtype, _ in described]
    sparse = [flag for _, _, flag in described]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, caps, sparse)
    assert initial_plan(sizes_of(tensors, sparse), caps) == list(reversed(theirs))


@given(TENSORS, CAPS, st.integers())
def test_the_plan_by_arrival_holds_the_buckets_that_torch_finds(described, caps, seed):
    tensors = [torch.empty(n, dtype=dtype) for n, dtype, _ in described]
    sparse = [flag for _, _, flag in described]
    sizes = sizes_of(tensors, sparse)
    order = shuffled(sizes, seed)
    theirs, _ = dist._compute_bucket_assignment_by_size(
        [tensors[index] for index in order], caps, sparse, order
    )
    # torch appends the unfinished buckets in the order of a hash table: compare the contents.
    assert sorted(arrival_plan(sizes, order, caps)) == sorted(theirs)


def test_the_default_caps_are_a_small_first_bucket_and_then_25_mib():
    assert bucket_caps() == (FIRST_CAP_BYTES, 25 * MIB)


def test_an_explicit_cap_is_the_first_buckets_cap_too_and_a_list_wins():
    assert bucket_caps(4) == (4 * MIB,)
    assert bucket_caps(0.5) == (MIB // 2,)
    assert bucket_caps(4, [1, 2, 8]) == (MIB, 2 * MIB, 8 * MIB)


@pytest.mark.parametrize("cap", [-1, float("nan")])
def test_a_senseless_cap_is_refused(cap):
    with pytest.raises(ValueError, match="sizes in MiB"):
        bucket_caps(cap)
    with pytest.raises(ValueError, match="sizes in MiB"):
        bucket_caps(None, [1, cap])


def test_an_order_that_forgets_a_parameter_is_refused():
    with pytest.raises(ValueError, match="each of the 3 parameters once"):
        arrival_plan([ParameterSize(4, "float32")] * 3, [0, 2, 2], NO_CAP)


def test_layers_of_a_megabyte_and_a_half_close_the_small_first_bucket_and_share_the_next():
    layer = ParameterSize(3 * MIB // 2, "float32")
    assert arrival_plan([layer] * 3, [2, 1, 0], bucket_caps(1)) == [[2], [1], [0]]
    assert arrival_plan([layer] * 3, [2, 1, 0], bucket_caps()) == [[2], [1, 0]]
