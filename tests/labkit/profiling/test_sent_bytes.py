"""Counting the bytes that an all-reduce of send and recv puts on the wire."""

import pytest

from labkit.profiling.sent_bytes import busiest, count_sent, leaving
from miniddp.collectives import naive_all_reduce, ring_all_reduce


def half_of_a_sum(tensor):
    ring_all_reduce(tensor)
    tensor /= 2


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_ring_sends_from_each_rank_to_its_neighbor_only(ranks):
    sent = count_sent(ranks, ring_all_reduce)
    for rank, to in enumerate(sent):
        assert to == {(rank + 1) % ranks: pytest.approx(2 * (ranks - 1) / ranks)}


def test_naively_the_first_rank_sends_to_all_and_the_others_once():
    sent = count_sent(3, naive_all_reduce)
    assert sent == [{1: 1.0, 2: 1.0}, {0: 1.0}, {0: 1.0}]
    assert busiest(sent) == 2
    assert leaving(sent, node_of=lambda rank: int(rank == 2)) == [1.0, 1.0]
    assert leaving(sent, node_of=lambda rank: 0) == [0.0]


def test_a_result_that_is_not_the_sum_is_refused():
    with pytest.raises(RuntimeError, match="and the sum is 3"):
        count_sent(2, half_of_a_sum)
