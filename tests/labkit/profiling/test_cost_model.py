"""The cost model: our algorithms' own counts, and steps done by hand, made up and recorded."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from labkit.launch.ranks import run_ranks
from labkit.profiling.cost_model import (
    ALGORITHMS,
    Backward,
    Link,
    backward_of,
    simulate,
)
from labkit.profiling.recorded_ways import ComputedStep, RecordedWay, on_one_backward
from labkit.profiling.recording import Collective, Gradient, RankRecording, Recording
from labkit.profiling.sent_bytes import count_sent
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


def test_the_bytes_of_an_all_reduce_that_gives_another_sum_are_not_counted():
    with pytest.raises(RuntimeError, match=r"gave \[1.0\], and the sum is 3.0"):
        count_sent(2, lambda tensor: tensor.fill_(1))


# Three gradients of 10 bytes, ready at 1, 2 and 4 seconds; the link takes 0.5 s and 0.1 s a byte.
THREE = Backward((1.0, 2.0, 4.0), (10, 10, 10))
FLAT, EACH = [[0, 1, 2]], [[0], [1], [2]]


def slow(nbytes: int) -> float:
    return 0.5 + 0.1 * nbytes


@pytest.mark.parametrize("plan", [[[0, 1]], [[0, 1], [1, 2]], [[0], [1], [2], [3]]])
def test_a_plan_that_is_not_of_this_backward_is_refused(plan):
    with pytest.raises(ValueError, match="each place in the order of arrival once"):
        simulate(THREE, plan, slow)


def test_a_bucket_waits_for_its_gradients_for_its_turn_and_for_the_link():
    step = simulate(THREE, EACH, slow)
    assert step.sent == ((1.0, 1.0, 2.5), (2.0, 2.5, 4.0), (4.0, 4.0, 5.5))
    assert step.exposed == 1.5
    assert simulate(THREE, [[2], [0, 1]], slow).sent[1][0] == 4.0
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


LINK = Link(latency=0.5, seconds_per_byte=1.0)  # a ring of two: 2 steps, and each byte once
COMPUTED = ComputedStep(1.0, Backward(ready=(2.0, 4.0, 6.0), bytes=(1, 2, 3)))


def recorded(noise: float, *messages: tuple[int, int]) -> RecordedWay:
    """Messages of (bytes, gradients ready at the launch), at times that are slower by `noise`."""
    sent = tuple(
        Collective("all_reduce", nbytes, after, number, noise * after, noise * after + 1)
        for number, (nbytes, after) in enumerate(messages)
    )
    rank = RankRecording(0, 0.0, 9.0 * noise, ((0.0, noise),), (), sent)
    return RecordedWay(Recording((rank,)), [torch.zeros(0)])


def test_ways_that_send_the_same_take_the_same_time_however_noisy_their_recordings_were():
    ways = {"quiet": recorded(1, (1, 1), (5, 3)), "busy": recorded(7, (1, 1), (5, 3))}
    quiet, busy = on_one_backward(ways, COMPUTED, LINK).values()
    assert quiet == busy


def test_a_message_waits_for_its_gradients_and_for_the_link():
    ways = {"overlapped": recorded(1, (2, 1), (1, 2), (3, 3)), "after": recorded(1, (6, 3))}
    overlapped, after = (one.ranks[0] for one in on_one_backward(ways, COMPUTED, LINK).values())
    assert [(c.launched, c.done) for c in overlapped.collectives] == [(2, 5), (4, 7), (6, 11)]
    assert (overlapped.end, overlapped.exposed_seconds()) == (11, 5)
    assert (after.end, after.exposed_seconds()) == (13, 7)
    assert overlapped.forwards == ((0, 1.0),)


def test_a_step_does_not_end_before_its_backward():
    [step] = on_one_backward({"one": recorded(1, (1, 1))}, COMPUTED, LINK).values()
    assert step.ranks[0].end == pytest.approx(6)
