"""Plans: every parameter in one bucket, closed at its cap; torch's own plans reproduced."""

import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from miniddp.buckets import (
    FIRST_CAP_BYTES,
    MIB,
    NO_CAP,
    ParameterSize,
    Plan,
    arrival_plan,
    bucket_caps,
    initial_plan,
    sizes_of,
)
from miniddp.extras.planner import LinkCost, fastest_plan, finish_time
from miniddp.torch_drop_in.sparse import each_alone

SIZES = st.lists(
    st.builds(
        ParameterSize,
        nbytes=st.integers(0, 300).map(lambda n: 4 * n),
        kind=st.sampled_from(["float32 on cpu", "float64 on cpu"]),
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
def test_buckets_launch_in_the_order_in_which_their_last_gradient_arrives(sizes, caps, seed):
    order = shuffled(sizes, seed)
    plan = arrival_plan(sizes, order, caps)
    last = [max(order.index(index) for index in bucket) for bucket in plan]
    assert last == sorted(last)


TENSORS = st.lists(
    st.tuples(
        st.integers(0, 200),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
        st.sampled_from([False] * 5 + [True]),
    ),
    min_size=1,
    max_size=20,
)


@example([(4, torch.float32, False)] * 2, [16])  # a bucket that its cap fits exactly
@given(TENSORS, CAPS)
def test_the_initial_plan_is_the_one_that_torch_finds(described, caps):
    tensors = [torch.empty(n, dtype=dtype) for n, dtype, _ in described]
    sparse = [flag for _, _, flag in described]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, caps, sparse)
    assert initial_plan(each_alone(sizes_of(tensors), sparse), caps) == list(reversed(theirs))


@given(TENSORS, CAPS, st.integers())
def test_the_plan_by_arrival_holds_the_buckets_that_torch_finds(described, caps, seed):
    tensors = [torch.empty(n, dtype=dtype) for n, dtype, _ in described]
    sparse = [flag for _, _, flag in described]
    sizes = each_alone(sizes_of(tensors), sparse)
    order = shuffled(sizes, seed)
    theirs, _ = dist._compute_bucket_assignment_by_size(
        [tensors[index] for index in order], caps, sparse, order
    )
    # torch appends the unfinished buckets in the order of a hash table: compare the contents.
    assert sorted(arrival_plan(sizes, order, caps)) == sorted(theirs)


def test_the_default_caps_are_a_small_first_bucket_and_then_25_mib():
    assert bucket_caps() == (FIRST_CAP_BYTES, 25 * MIB)


def test_an_explicit_cap_is_the_first_buckets_cap_too_and_a_list_names_each():
    assert bucket_caps(4) == (4 * MIB,)
    assert bucket_caps(0.5) == (MIB // 2,)
    assert bucket_caps([1, 2, 8]) == (MIB, 2 * MIB, 8 * MIB)


@pytest.mark.parametrize("cap", [-1, float("nan"), float("inf"), "25"])
def test_a_senseless_cap_is_refused(cap):
    with pytest.raises(ValueError, match="sizes in MiB"):
        bucket_caps(cap)
    with pytest.raises(ValueError, match="sizes in MiB"):
        bucket_caps([1, cap])
    with pytest.raises(ValueError, match="at least one"):
        bucket_caps([])


def test_an_order_that_forgets_a_parameter_is_refused():
    with pytest.raises(ValueError, match="each of the 3 parameters once"):
        arrival_plan([ParameterSize(4, "float32")] * 3, [0, 2, 2], NO_CAP)


# Times and sizes are small multiples of powers of two, so that sums of them are exact, and "fewest
# buckets" is not a matter of rounding. Gradients arrive about as fast as the link can send them:
# otherwise one bucket, or one per gradient, is the fastest.
BYTES = st.sampled_from([0, 1, 2, 4, 8, 16])
TIMES = st.integers(0, 12).map(float)


def sizes_of_bytes(*nbytes: int) -> list[ParameterSize]:
    return [ParameterSize(n, "float32") for n in nbytes]


@st.composite
def measured(draw) -> tuple[list[ParameterSize], list[float], LinkCost]:
    """Sizes of one kind, ready times, and a link."""
    nbytes = draw(st.lists(BYTES, min_size=1, max_size=8))
    ready = draw(st.lists(TIMES, min_size=len(nbytes), max_size=len(nbytes)))
    latency, per_byte = draw(st.sampled_from([0, 0.5, 2])), draw(st.sampled_from([0, 0.125, 0.5]))
    cpu = draw(st.sampled_from([0, latency / 4, latency]))
    cpu_per_byte = draw(st.sampled_from([0, per_byte / 2, per_byte]))
    return sizes_of_bytes(*nbytes), ready, LinkCost(latency, per_byte, cpu, cpu_per_byte)


def every_plan(ready: list[float]) -> list[Plan]:
    """All runs of the order of arrival."""
    first, *others = sorted(range(len(ready)), key=ready.__getitem__)
    plans = [[[first]]]
    for index in others:
        joined = [[*plan[:-1], [*plan[-1], index]] for plan in plans]
        plans = joined + [[*plan, [index]] for plan in plans]
    return plans


@given(measured(), st.sampled_from([1, 4, 8, 16, float("inf")]))
@example((sizes_of_bytes(4, 4, 8, 16), [2, 11, 10, 3], LinkCost(0, 0.5, 0, 0.25)), float("inf"))
def test_no_plan_ends_before_the_fastest_and_none_that_ends_with_it_has_fewer_buckets(
    case, longest
):
    sizes, ready, link = case
    plan = fastest_plan(sizes, ready, link, longest)

    def allowed(bucket: list[int]) -> bool:
        return len(bucket) == 1 or sum(sizes[index].nbytes for index in bucket[:-1]) < longest

    plans = [one for one in every_plan(ready) if all(map(allowed, one))]
    assert plan in plans
    ends = [(finish_time(other, sizes, ready, link), len(other)) for other in plans]
    assert (finish_time(plan, sizes, ready, link), len(plan)) == min(ends)


@given(SIZES, st.integers(), st.floats(0, 1), st.floats(0, 0.01))
def test_a_plan_by_the_clock_keeps_kinds_apart_and_launches_in_order(sizes, seed, alpha, beta):
    ready = [float(moment) for moment in shuffled(sizes, seed)]
    plan = fastest_plan(sizes, ready, LinkCost(alpha, beta))
    assert sorted(index for bucket in plan for index in bucket) == list(range(len(sizes)))
    last = [max(ready[index] for index in bucket) for bucket in plan]
    assert last == sorted(last)
    for bucket in plan:
        assert len({sizes[index].kind for index in bucket}) == 1


def test_a_finish_time_worked_by_hand():
    sizes = [ParameterSize(10, "float32")] * 3
    ready = [4.0, 2.0, 1.0]
    # Sent 1 to 2.5, then 2.5 to 4, then 4 to 5.5; all at once, 4 to 7.5.
    link = LinkCost(0.5, 0.1)
    assert finish_time([[2], [1], [0]], sizes, ready, link) == pytest.approx(5.5)
    assert finish_time([[2, 1, 0]], sizes, ready, link) == pytest.approx(7.5)
    # Each bucket takes 0.25 s from backward: the last gradient comes at 4.5.
    assert finish_time([[2], [1], [0]], sizes, ready, LinkCost(0.5, 0.1, 0.25)) == pytest.approx(6)


def test_times_that_are_not_one_a_parameter_are_refused():
    with pytest.raises(ValueError, match="2 ready times for 3 parameters"):
        fastest_plan([ParameterSize(4, "float32")] * 3, [0.0, 1.0], LinkCost(1, 1))


def test_without_parameters_there_are_no_buckets_to_plan():
    assert initial_plan([], bucket_caps()) == arrival_plan([], [], bucket_caps()) == []
    assert fastest_plan([], [], LinkCost(1e-4, 1e-9)) == []
