"""The bytes that each rank sends to each other rank, in one all-reduce built from send and recv."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.launch.ranks import run_ranks

ELEMENTS = 840  # float32; divided evenly by 2 to 8 ranks

# `[rank][receiver]`: in units of the tensor's own bytes.
Sent = list[dict[int, float]]


@contextmanager
def counted() -> Iterator[Counter[int]]:
    """Count the bytes that this rank passes to `torch.distributed.batch_isend_irecv`, by receiver.

    Messages of torch's own collectives are not seen.
    """
    pass_on = dist.batch_isend_irecv
    sent: Counter[int] = Counter()

    def count(messages: list[dist.P2POp]) -> list[dist.Work]:
        for message in messages:
            if message.op is dist.isend:
                sent[message.peer] += message.tensor.nbytes
        return pass_on(messages)

    with mock.patch.object(dist, "batch_isend_irecv", count):
        yield sent


def count_sent(world_size: int, all_reduce: Callable[[Tensor], object]) -> Sent:
    """What each of `world_size` ranks sends while it all-reduces one tensor of 840 float32.

    Counts what `counted` sees. Raises RuntimeError if the result is not the sum.
    """
    return run_ranks(_count, world_size, all_reduce, device="cpu")


def busiest(sent: Sent) -> float:
    """What the rank that sends most sends in all."""
    return max(sum(to.values()) for to in sent)


def leaving(sent: Sent, node_of: Callable[[int], int]) -> Sequence[float]:
    """What leaves each node for others, by node; `node_of(rank)` counts nodes from 0."""
    nodes = 1 + max(map(node_of, range(len(sent))))
    out = [0.0] * nodes
    for rank, to in enumerate(sent):
        for peer, amount in to.items():
            if node_of(peer) != node_of(rank):
                out[node_of(rank)] += amount
    return out


def _count(rank: int, world_size: int, all_reduce: Callable[[Tensor], object]) -> dict[int, float]:
    mine = torch.full((ELEMENTS,), float(rank + 1))
    with counted() as sent:
        all_reduce(mine)
    wanted = world_size * (world_size + 1) / 2
    if mine.unique().tolist() != [wanted]:
        raise RuntimeError(f"the all-reduce gave {mine.unique().tolist()}, and the sum is {wanted}")
    return {peer: nbytes / mine.nbytes for peer, nbytes in sent.items()}
