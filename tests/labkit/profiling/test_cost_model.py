"""The cost model: the algorithms' own counts, and steps done by hand."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from labkit.launch.ranks import run_ranks
from labkit.profiling.cost_model import (
    ALGORITHMS,
    MIB,
    Backward,
    Link,
    backward_of,
    hierarchical_seconds,
    least_bytes,
    lower_limit,
    ring,
    simulate,
    tree,
)
from labkit.profiling.recording import Gradient, RankRecording, Recording
from miniddp.collectives import (
    naive_all_reduce,
    recursive_doubling_all_reduce,
    ring_all_reduce,
)

OURS = {
    "naive": naive_all_reduce,
    "ring": ring_all_reduce,
    "recursive doubling": recursive_doubling_all_reduce,
}


def messages(rank: int, world_size: int) -> dict[str, list[tuple[int, int]]]:
    """For each algorithm (the longest message, the bytes sent) in each step of this rank."""
    found = {}
    really = dist.batch_isend_irecv
    for name, all_reduce in OURS.items():
        with mock.patch.object(dist, "batch_isend_irecv", wraps=really) as exchange:
            all_reduce(torch.arange(60.0) + rank)
        found[name] = [
            (
                max(operation.tensor.nbytes for operation in call.args[0]),
                sum(op.tensor.nbytes for op in call.args[0] if op.op is dist.isend),
            )
            for call in exchange.call_args_list
        ]
    return found


@pytest.mark.parametrize("world_size", [1, 4, 6])
def test_the_formulas_are_what_our_collectives_do(world_size):
    ranks = run_ranks(messages, world_size)
    for name in OURS:
        cost = ALGORITHMS[name](world_size, 240)
        steps = [of_rank[name] for of_rank in ranks]
        assert cost.steps == max(map(len, steps))
        assert cost.bytes == max(sum(longest for longest, _ in rank) for rank in steps)
        assert cost.sent == max(sum(sent for _, sent in rank) for rank in steps)


@given(st.integers(1, 5000), st.integers(0, 10**10))
def test_none_sends_less_than_the_bound_and_the_ring_sends_just_that(world_size, nbytes):
    bound = least_bytes(world_size, nbytes)
    for cost in ALGORITHMS.values():
        assert cost(world_size, nbytes).sent >= bound * (1 - 1e-12)
    assert ring(world_size, nbytes).sent == bound


# Three gradients of 10 bytes, ready at 1, 2 and 4 seconds; the link takes 0.5 s and 0.1 s a byte.
THREE = Backward((1.0, 2.0, 4.0), (10, 10, 10))
FLAT, EACH = [[0, 1, 2]], [[0], [1], [2]]


def slow(nbytes: int) -> float:
    return 0.5 + 0.1 * nbytes


BACKWARDS = st.lists(
    st.tuples(st.floats(0, 10), st.integers(1, 10**6)), min_size=1, max_size=12
).map(lambda drawn: Backward(tuple(sorted(r for r, _ in drawn)), tuple(b for _, b in drawn)))


@st.composite
def steps(draw):
    backward = draw(BACKWARDS)
    n = len(backward.ready)
    cuts = sorted(draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []
    plan = [list(range(a, b)) for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
    return backward, plan, draw(st.floats(0, 1)), draw(st.floats(0, 1e-5))


@given(steps())
def test_the_critical_path_is_computing_until_a_launch_and_all_messages_from_there(case):
    backward, plan, alpha, beta = case

    def cost(nbytes: int) -> float:
        return alpha + beta * nbytes

    step = simulate(backward, plan, cost)
    first = step.critical_bucket
    sent = sum(cost(sum(backward.bytes[i] for i in bucket)) for bucket in plan[first:])
    assert step.end == pytest.approx(step.sent[first][0] + sent)
    if first:  # the link rests before it
        assert step.sent[first - 1][2] < step.sent[first][0]


@given(steps())
def test_no_plan_beats_the_limit_and_none_is_worse_than_waiting_for_everything(case):
    backward, plan, alpha, beta = case

    def cost(nbytes: int) -> float:
        return alpha + beta * nbytes

    step = simulate(backward, plan, cost)
    one_by_one = backward.end + sum(cost(sum(backward.bytes[i] for i in b)) for b in plan)
    assert lower_limit(backward, cost) <= step.end * (1 + 1e-9)
    assert step.end <= one_by_one * (1 + 1e-9) + 1e-12
    assert step.exposed >= 0


@pytest.mark.parametrize("plan", [[[0, 1]], [[0, 1], [1, 2]], [[0], [1], [2], [3]]])
def test_a_plan_that_is_not_of_this_backward_is_refused(plan):
    with pytest.raises(ValueError, match="each place in the order of arrival once"):
        simulate(THREE, plan, slow)


def test_over_two_kinds_of_links_the_hierarchical_one_is_a_ring_inside_and_a_ring_across():
    fast, slow = Link.of(gbit_per_s=100, latency_us=2), Link.of(gbit_per_s=1, latency_us=50)
    nbytes = 4 * MIB
    assert hierarchical_seconds(1, 4, nbytes, fast, slow) == fast.seconds(ring(4, nbytes))
    assert hierarchical_seconds(6, 1, nbytes, fast, slow) == slow.seconds(ring(6, nbytes))
    seconds = hierarchical_seconds(2, 4, nbytes, fast, slow)
    assert seconds == pytest.approx(
        6 * 2e-6 + 1.5 * nbytes * 8e-11 + 2 * 50e-6 + nbytes * 8e-9, rel=1e-12
    )


@pytest.mark.parametrize(
    ("world_size", "depth"), [(1, 0), (2, 1), (5, 3), (8, 3), (9, 4), (16_384, 14)]
)
def test_a_tree_is_as_deep_as_the_logarithm_and_passes_every_byte_twice(world_size, depth):
    cost = tree(world_size, 1000)
    assert cost == (2 * depth, 2000 if depth else 0, 2000 if depth else 0)
    assert cost.sent >= least_bytes(world_size, 1000)


def test_a_bucket_waits_for_its_gradients_for_its_turn_and_for_the_link():
    step = simulate(THREE, EACH, slow)
    assert step.sent == ((1.0, 1.0, 2.5), (2.0, 2.5, 4.0), (4.0, 4.0, 5.5))
    assert (step.exposed, step.critical_bucket) == (1.5, 0)
    assert simulate(THREE, [[2], [0, 1]], slow).sent[1][0] == 4.0
    assert simulate(THREE, EACH, lambda nbytes: 0.3).critical_bucket == 2
    flat = simulate(THREE, FLAT, slow)
    assert (flat.sent, flat.compute_end, flat.exposed) == (((4.0, 4.0, 7.5),), 4.0, 3.5)
    assert simulate(THREE, EACH, slow, overlap=False).end == pytest.approx(4 + 3 * 1.5)


def test_a_backward_is_taken_from_the_slowest_rank_and_needs_one_order_on_all():
    def rank(number: int, names: str, ready: tuple[float, ...]) -> RankRecording:
        gradients = tuple(Gradient(n, 4, moment) for n, moment in zip(names, ready, strict=True))
        return RankRecording(number, 0.5, 9.0, (), gradients, ())

    ranks = (rank(0, "ab", (1.0, 4.0)), rank(1, "ab", (2.0, 3.0)))
    assert backward_of(Recording(ranks)) == Backward((1.5, 3.5), (4, 4))
    with pytest.raises(ValueError, match="the same order on every rank; found 2"):
        backward_of(Recording((*ranks, rank(2, "ba", (1.0, 2.0)))))
