"""The figure of the ring: its schedules give the sum, and send what `miniddp.collectives` sends."""

import random
from collections.abc import Callable
from functools import partial
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

WAYS: dict[str, Callable[[int, Tensor], object]] = {
    "naive": lambda per_node, tensor: naive_all_reduce(tensor),
    "ring": lambda per_node, tensor: ring_all_reduce(tensor),
    "doubling": lambda per_node, tensor: recursive_doubling_all_reduce(tensor),
    "hierarchical": lambda per_node, tensor: hierarchical_all_reduce(
        tensor, nodes=Nodes.groups(per_node)
    ),
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


@pytest.mark.parametrize(
    ("way", "ranks", "per_node"),
    [
        *((way, ranks, 1) for way in ("naive", "ring", "doubling") for ranks in (2, 5)),
        *(("ring", 8, 4), ("doubling", 8, 4), ("hierarchical", 8, 4), ("hierarchical", 6, 2)),
    ],
)
def test_the_bytes_per_link_are_those_counted_between_real_processes(way, ranks, per_node) -> None:
    [steps] = call("the_ring", "schedule", [(way, ranks, sent_bytes.ELEMENTS, per_node)])
    [links] = call("the_ring", "sent", [(steps, ranks, len(steps))])
    counted = sent_bytes.count_sent(ranks, partial(WAYS[way], per_node))
    for rank, to in enumerate(counted):
        found = {peer: n / sent_bytes.ELEMENTS for peer, n in enumerate(links[rank]) if n}
        assert found == pytest.approx({peer: amount for peer, amount in to.items() if amount})
    [most] = call("the_ring", "busiest", [(links,)])
    assert most / sent_bytes.ELEMENTS == pytest.approx(sent_bytes.busiest(counted))
    [out] = call("the_ring", "leaving", [(links, per_node)])
    wanted = sent_bytes.leaving(counted, lambda rank: rank // per_node)
    assert [n / sent_bytes.ELEMENTS for n in out] == pytest.approx(wanted)
