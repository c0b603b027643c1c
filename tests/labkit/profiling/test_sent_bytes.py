"""Counting the bytes that an all-reduce of send and recv puts on the wire."""

import pytest

from labkit.profiling.sent_bytes import count_sent
from miniddp.collectives import ring_all_reduce


def half_of_a_sum(tensor):
    ring_all_reduce(tensor)
    tensor /= 2


def test_a_result_that_is_not_the_sum_is_refused():
    with pytest.raises(RuntimeError, match="and the sum is 3"):
        count_sent(2, half_of_a_sum)
