"""The figure of the ring: its schedules give the sum, and send what `miniddp.collectives` sends."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from figures.node import call
from torch import Tensor

from labkit.profiling import sent_bytes
from miniddp.collectives import (
    Nodes,
    hierarchical_all_reduce,
    naive_all_reduce,
    recursive_doubling_all_reduce,
    ring_all_reduce,
)

WAYS: dict[str, Callable[[Tensor], object]] = {
    "naive": naive_all_reduce,
    "ring": ring_all_reduce,
    "doubling": recursive_doubling_all_reduce,
    "hierarchical": lambda tensor: hierarchical_all_reduce(tensor, nodes=Nodes.groups(4)),
}


def some_case(draw: random.Random) -> tuple[str, int, int, int]:
    """The arguments of `schedule`: the way, ranks, elements, and ranks per node."""
    way = draw.choice(list(WAYS))
    per_node = draw.randint(1, 4)
    ranks = draw.randint(1, 3) * per_node if way == "hierarchical" else draw.randint(1, 9)
    # Also lengths below the number of ranks, which leave some chunks empty, and odd ones.
    return way, ranks, draw.randint(1, 40), per_node


def test_after_all_steps_of_600_random_schedules_every_rank_has_the_sum_and_not_before() -> None:
    draw = random.Random(20)
    cases = [some_case(draw) for _ in range(600)]
    asked: list[tuple[Any, ...]] = []
    sums = []
    for case, steps in zip(cases, call("the_ring", "schedule", cases), strict=True):
        _, ranks, length, _ = case
        values = [[draw.randint(1, 999) for _ in range(length)] for _ in range(ranks)]
        sums.append([[sum(column) for column in zip(*values, strict=True)]] * ranks)
        asked += [(steps, values, len(steps)), (steps, values, max(len(steps) - 1, 0))]
    played = call("the_ring", "play", asked)
    assert played[::2] == sums
    early = [now == wanted for now, wanted in zip(played[1::2], sums, strict=True)]
    assert early == [not steps for steps, _, _ in asked[::2]]


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_the_bytes_per_link_are_those_counted_between_real_processes(ranks) -> None:
    for way in WAYS if ranks == 8 else list(WAYS)[:3]:
        [steps] = call("the_ring", "schedule", [(way, ranks, sent_bytes.ELEMENTS, 4)])
        [links] = call("the_ring", "sent", [(steps, ranks, len(steps))])
        counted = sent_bytes.count_sent(ranks, WAYS[way])
        for rank, to in enumerate(counted):
            found = {peer: n / sent_bytes.ELEMENTS for peer, n in enumerate(links[rank]) if n}
            assert found == {peer: amount for peer, amount in to.items() if amount}
        [most] = call("the_ring", "busiest", [(links,)])
        assert most / sent_bytes.ELEMENTS == sent_bytes.busiest(counted)
        if ranks == 8:
            [out] = call("the_ring", "leaving", [(links, 4)])
            wanted = sent_bytes.leaving(counted, lambda rank: rank // 4)
            assert [n / sent_bytes.ELEMENTS for n in out] == wanted
