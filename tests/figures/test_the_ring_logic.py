"""The schedule of the figure of the ring is the one that `miniddp.collectives` sends."""

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from figures.node import call
from torch import Tensor

from labkit.profiling import sent_bytes
from miniddp.collectives import (
    Nodes,
    all_reduce,
    hierarchical_all_reduce,
    naive_all_reduce,
    recursive_doubling_all_reduce,
    ring_all_reduce,
)

FLAT = {
    "naive": naive_all_reduce,
    "ring": ring_all_reduce,
    "doubling": recursive_doubling_all_reduce,
}


class Case(NamedTuple):
    way: str
    world_size: int
    length: int
    per_node: int


class Group(NamedTuple):
    """Ranks that communicate; a stand-in for a process group."""

    ranks: tuple[int, ...]

    def size(self) -> int:
        return len(self.ranks)


class Ranks:
    """What all_reduce.py uses of torch.distributed, for ranks that are threads of this process.

    `steps[rank]` lists that rank's steps in order: the messages it sent, and the elements it
    received into, or None where they went into a separate buffer to be added.
    `seen[rank]` are its tensor's elements when each step began.
    """

    ReduceOp, isend, irecv = dist.ReduceOp, "send", "receive"

    def __init__(self, world_size: int) -> None:
        self.world = Group(tuple(range(world_size)))
        self.me = threading.local()
        self.arrived = threading.Condition()
        self.mail: dict[tuple[int, int], list[Tensor]] = {}
        self.steps: list[list[tuple[list[Any], list[Any]]]] = [[] for _ in range(world_size)]
        self.seen: list[list[list[float]]] = [[] for _ in range(world_size)]

    def run(self, work: Callable[[Tensor], object], tensors: list[Tensor]) -> None:
        failed: list[BaseException] = []

        def of_rank(rank: int) -> None:
            self.me.rank, self.me.tensor = rank, tensors[rank]
            try:
                work(tensors[rank])
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=of_rank, args=(r,), daemon=True) for r in self.world[0]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not failed, failed
        assert not any(thread.is_alive() for thread in threads), "a rank waits for a message"

    def get_rank(self, group: Group | None = None) -> int:
        return (group or self.world).ranks.index(self.me.rank)

    def get_world_size(self, group: Group | None = None) -> int:
        return (group or self.world).size()

    def P2POp(  # noqa: N802 - torch's name
        self, op: str, tensor: Tensor, group: Group | None = None, group_peer: int = -1
    ) -> SimpleNamespace:
        return SimpleNamespace(op=op, tensor=tensor, peer=(group or self.world).ranks[group_peer])

    def batch_isend_irecv(self, messages: list[SimpleNamespace]) -> list[SimpleNamespace]:
        rank = self.me.rank
        self.seen[rank].append(self.me.tensor.tolist())
        sent, received = [], []
        for one in messages:
            if one.op == self.isend:
                sent.append((one.peer, *self.place(one.tensor)))
                with self.arrived:
                    self.mail.setdefault((rank, one.peer), []).append(one.tensor.clone())
                    self.arrived.notify_all()
        for one in messages:
            if one.op == self.irecv:
                received.append((one.peer, one.tensor.numel(), self.place(one.tensor)))
                with self.arrived:
                    key = (one.peer, rank)
                    assert self.arrived.wait_for(lambda key=key: self.mail.get(key), timeout=20)
                    one.tensor.copy_(self.mail[key].pop(0))
        self.steps[rank].append((sent, received))
        return [SimpleNamespace(wait=lambda: None)] * len(messages)

    def place(self, part: Tensor) -> tuple[int, int] | None:
        """Which elements of this rank's own tensor `part` is; None for another buffer."""
        whole = self.me.tensor
        begin = (part.data_ptr() - whole.data_ptr()) // whole.element_size()
        inside = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        return (begin, begin + part.numel()) if inside else None


def really_sent(case: Case, values: list[list[int]]) -> tuple[Ranks, list[Tensor]]:
    """Run the project's own function on threads; what each rank sent, and the results."""
    ranks = Ranks(case.world_size)
    tensors = [torch.tensor(row, dtype=torch.float64) for row in values]

    def work(tensor: Tensor) -> None:
        if case.way != "hierarchical":
            return FLAT[case.way](tensor)
        rank, size = ranks.get_rank(), case.per_node
        inside = Group(tuple(range(rank // size * size, rank // size * size + size)))
        across = Group(tuple(range(rank % size, case.world_size, size)))
        return hierarchical_all_reduce(tensor, nodes=Nodes(inside, across))  # type: ignore[arg-type]

    with mock.patch.object(all_reduce, "dist", ranks):
        ranks.run(work, tensors)
    return ranks, tensors


def some_case(draw: random.Random) -> Case:
    way = draw.choice([*FLAT, "hierarchical"])
    per_node = draw.randint(1, 4)
    nodes = draw.randint(1, 3)
    world_size = nodes * per_node if way == "hierarchical" else draw.randint(1, 9)
    # Also lengths below the number of ranks, which leave some chunks empty, and odd ones.
    return Case(way, world_size, draw.randint(1, 40), per_node)


def as_seen_by(rank: int, steps: list[list[dict[str, Any]]]) -> list[tuple[list[Any], list[Any]]]:
    """The figure's steps in which `rank` takes part, in the form in which `Ranks` records them."""
    own = []
    for step in steps:
        sent = [(m["to"], m["begin"], m["end"]) for m in step if m["from"] == rank]
        received = [
            (m["from"], m["end"] - m["begin"], None if m["adds"] else (m["begin"], m["end"]))
            for m in step
            if m["to"] == rank
        ]
        if sent or received:
            own.append((sent, received))
    return own


def without_places_of_nothing(steps: list[tuple[list[Any], list[Any]]]) -> list[Any]:
    """An empty tensor has no address, so only its size and its peer can be compared."""
    return [
        (
            [(peer, *((begin, end) if end > begin else ())) for peer, begin, end in sent],
            [(peer, size, place if size else None) for peer, size, place in received],
        )
        for sent, received in steps
    ]


def test_600_random_schedules_are_message_for_message_what_the_implementations_send() -> None:
    draw = random.Random(20)
    cases = [some_case(draw) for _ in range(600)]
    schedules = call("the_ring", "schedule", cases)
    values = [
        [[draw.randint(0, 999) for _ in range(c.length)] for _ in range(c.world_size)]
        for c in cases
    ]
    for case, steps, mine in zip(cases, schedules, values, strict=True):
        ranks, tensors = really_sent(case, mine)
        summed = [float(sum(column)) for column in zip(*mine, strict=True)]
        for rank in range(case.world_size):
            wanted = without_places_of_nothing(ranks.steps[rank])
            assert without_places_of_nothing(as_seen_by(rank, steps)) == wanted, (case, rank)
            assert tensors[rank].tolist() == summed, (case, rank)
    assert {case.way for case in cases} == {*FLAT, "hierarchical"}


def test_the_numbers_after_each_step_are_those_in_the_ranks_memory() -> None:
    draw = random.Random(21)
    cases = [some_case(draw) for _ in range(150)]
    values = [
        [[draw.randint(0, 999) for _ in range(c.length)] for _ in range(c.world_size)]
        for c in cases
    ]
    schedules = call("the_ring", "schedule", cases)
    asked, wanted = [], []
    for case, steps, mine in zip(cases, schedules, values, strict=True):
        ranks, tensors = really_sent(case, mine)
        for count in range(len(steps) + 1):
            asked.append((steps, mine, count))
            taken = [len(as_seen_by(rank, steps[:count])) for rank in range(case.world_size)]
            wanted.append(
                [
                    seen[done] if done < len(seen) else tensor.tolist()
                    for seen, done, tensor in zip(ranks.seen, taken, tensors, strict=True)
                ]
            )
    assert len(asked) > 500
    assert call("the_ring", "play", asked) == wanted


def test_the_bytes_per_link_are_those_counted_between_real_processes() -> None:
    length = sent_bytes.ELEMENTS
    for world_size in (2, 5, 8):
        ways: dict[str, Callable[[Tensor], object]] = dict(FLAT)
        if world_size == 8:
            ways["hierarchical"] = on_two_nodes_of_four
        for way, function in ways.items():
            steps = call("the_ring", "schedule", [(way, world_size, length, 4)])[0]
            links = call("the_ring", "sent", [(steps, world_size, len(steps))])[0]
            counted = sent_bytes.count_sent(world_size, function)
            for rank, to in enumerate(counted):
                found = {peer: n / length for peer, n in enumerate(links[rank]) if n}
                assert found == {peer: amount for peer, amount in to.items() if amount}
            assert call("the_ring", "busiest", [(links,)])[0] / length == sent_bytes.busiest(
                counted
            )
            if world_size == 8:
                out = call("the_ring", "leaving", [(links, 4)])[0]
                assert [n / length for n in out] == sent_bytes.leaving(counted, lambda r: r // 4)


def on_two_nodes_of_four(tensor: Tensor) -> None:
    hierarchical_all_reduce(tensor, nodes=Nodes.groups(4))
