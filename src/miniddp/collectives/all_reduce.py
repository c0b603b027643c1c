"""All-reduce, built from `send` and `recv`: four ways, one result.

Every rank passes a tensor of the same shape and dtype, and every rank receives the sum (or the
average) of all of them. The first three functions take all arguments of
`torch.distributed.all_reduce` except `async_op`, and work in place. They differ in cost. A
message of n bytes takes α + n·β seconds: α is the latency of the link, 1/β its bandwidth. With W
ranks (a step is a message that the next message has to wait for):

==================  =============  ===========================  =================================
algorithm           steps          bytes sent by the busiest    time
==================  =============  ===========================  =================================
naive               2(W−1)         (W−1)·n                      2(W−1)·α + 2(W−1)·n·β
ring                2(W−1)         2(W−1)/W·n                   2(W−1)·α + 2(W−1)/W·n·β
recursive doubling  log₂W          log₂W·n                      log₂W·α + log₂W·n·β
==================  =============  ===========================  =================================

(for W not a power of two, recursive doubling takes ⌊log₂W⌋ + 2 steps and ⌊log₂W⌋ + 1 times n).
In any all-reduce the busiest rank sends at least 2(W−1)/W·n bytes, unless the network itself adds
(SHARP). The ring reaches this bound and suits long tensors (gradients). Recursive doubling suits
short tensors, where only the number of steps counts. The naive algorithm is for reading.

These counts assume one kind of link. Links between the nodes of a cluster are often slower than
links inside a node, and the ranks of a node may share one. There, use `hierarchical_all_reduce`:
its busiest node sends the least possible.

**The same bits on every rank.** A floating-point sum depends on the order of its additions, and
replicas of one model must stay equal. So each docstring says why all ranks get the same bits.
Different functions add in different orders, so their last bits may differ.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005); Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of
Workstations" (2009), for the lower bound.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

Op = dist.ReduceOp.RedOpType
Group = dist.ProcessGroup | None
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def naive_all_reduce(tensor: Tensor, op: Op = SUM, group: Group = None) -> None:
    """All-reduce in place: every rank sends to rank 0, which adds and sends the result back.

    Steps: 2(W−1) on rank 0, one after another; 2 on each of the others. Bytes sent: (W−1)·n by
    rank 0, n by each of the others: rank 0's link is the bottleneck and grows with W.
    Same bits: only rank 0 adds, in rank order, and the others get copies.

    `tensor`, `op` and `group`, and what is raised: see `ring_all_reduce`.
    """
    flat, rank, world_size = _start(tensor, op, group)
    if rank == 0:
        received = torch.empty_like(flat)
        for peer in range(1, world_size):
            _step(group, receive=received, source=peer)
            flat += received
        for peer in range(1, world_size):
            _step(group, send=flat, destination=peer)
    else:
        _step(group, send=flat, destination=0)
        _step(group, receive=flat, source=0)
    _finish(tensor, flat)


def ring_all_reduce(tensor: Tensor, op: Op = SUM, group: Group = None) -> None:
    """All-reduce in place, in chunks around a ring: a reduce-scatter, then an all-gather.

    The tensor is cut into W chunks. In step s of the reduce-scatter, rank r sends chunk r − s to
    rank r + 1, and adds the chunk it receives to its own chunk r − s − 1. After W−1 steps rank r
    holds the finished chunk r + 1. In another W−1 steps the finished chunks go around the ring.
    (Chunk and rank numbers are modulo W.)

    Steps: 2(W−1). Bytes sent by each rank: all chunks but one, twice: 2(W−1)/W·n. If W does not
    divide the length, chunks differ by one element, so ranks may send different amounts: rank r
    sends 2n minus chunks r + 1 and r + 2. With fewer elements than ranks, some messages are empty.
    Same bits: chunk c is added up once, along one path (ranks c, c + 1, …, c − 1), and then copied.

    Args:
        tensor: same shape and dtype on every rank (as in `dist.all_reduce`, not verified). Any
            shape, dtype, and strides work, even views that torch's gloo all-reduce silently
            reduces wrongly; but an expanded tensor cannot take the result.
        op: `ReduceOp.SUM` or `ReduceOp.AVG` (each rank divides by W *before* adding, so that
            float16 does not overflow on the way to an average that it could hold).
        group: the process group; by default the whole world.

    Raises:
        ValueError: another `op`, or this rank is not in `group`.
        TypeError: the tensor is sparse; or the average of integers, which is not an integer.
    """
    flat, rank, world_size = _start(tensor, op, group)
    chunks = flat.tensor_split(world_size)
    _reduce_scatter(chunks, rank, group)
    _all_gather(chunks, rank, group)
    _finish(tensor, flat)


def _reduce_scatter(chunks: Sequence[Tensor], rank: int, group: Group) -> Tensor:
    """The first half of the ring; returns the chunk that this rank has finished: rank + 1."""
    size = len(chunks)
    received = torch.empty_like(chunks[0])  # the first chunk is never shorter than another
    for step in range(size - 1):
        mine = chunks[(rank - step - 1) % size]
        theirs = received[: len(mine)]
        _step(group, chunks[(rank - step) % size], (rank + 1) % size, theirs, (rank - 1) % size)
        mine += theirs
    return chunks[(rank + 1) % size]


def _all_gather(chunks: Sequence[Tensor], rank: int, group: Group) -> None:
    """The second half of the ring: send the finished chunks around."""
    size = len(chunks)
    for step in range(size - 1):
        finished, next_one = chunks[(rank - step + 1) % size], chunks[(rank - step) % size]
        _step(group, finished, (rank + 1) % size, next_one, (rank - 1) % size)


def recursive_doubling_all_reduce(tensor: Tensor, op: Op = SUM, group: Group = None) -> None:
    """All-reduce in place: pairs exchange and add, then pairs of pairs, and so on.

    Before step s each block of 2ˢ ranks holds the sum of its own tensors. Each rank exchanges with
    the rank whose number differs in bit s, and then each block of 2ˢ⁺¹ ranks holds its sum. If W is
    not a power of two, let P be the largest one below W. Each rank r ≥ P first sends its tensor to
    rank r − P, waits during the doubling, and receives the result from there.

    Steps: log₂W, or log₂P + 2. Bytes sent by each rank: log₂P·n, plus n by each rank below W − P.
    The ranks from P on send only n.
    Same bits: of two partners, one computes a + b and the other b + a, which are bitwise equal. So
    a block agrees if its two halves do, and a block of one rank always does.

    `tensor`, `op` and `group`, and what is raised: see `ring_all_reduce`.
    """
    flat, rank, world_size = _start(tensor, op, group)
    power = 1 << (world_size.bit_length() - 1)  # P: the greatest power of two up to W
    received = torch.empty_like(flat)
    stands_in_for = rank + power

    if rank >= power:
        _step(group, send=flat, destination=rank - power)
        _step(group, receive=flat, source=rank - power)
    else:
        if stands_in_for < world_size:
            _step(group, receive=received, source=stands_in_for)
            flat += received
        for bit in range(power.bit_length() - 1):
            partner = rank ^ (1 << bit)
            _step(group, send=flat, destination=partner, receive=received, source=partner)
            flat += received
        if stands_in_for < world_size:
            _step(group, send=flat, destination=stands_in_for)
    _finish(tensor, flat)


class Nodes(NamedTuple):
    """The two groups of a rank on a cluster of nodes with L ranks each.

    `inside`: the L ranks of its own node. `across`: one rank per node, the ranks with the same
    local rank. `groups` creates both.
    """

    inside: dist.ProcessGroup
    across: dist.ProcessGroup

    @classmethod
    def groups(cls, ranks_per_node: int) -> Self:
        """The groups, for ranks that are numbered node by node, as torchrun numbers them.

        Every rank of the world has to call it. Raises ValueError, on every rank, if the world is
        not made of whole nodes.
        """
        world_size = dist.get_world_size()
        if ranks_per_node < 1 or world_size % ranks_per_node:
            raise ValueError(
                f"{world_size} ranks do not divide evenly into nodes of {ranks_per_node}: "
                "start as many on every node (torchrun sets LOCAL_WORLD_SIZE to it)"
            )
        nodes = torch.arange(world_size).view(-1, ranks_per_node)
        inside, _ = dist.new_subgroups_by_enumeration(nodes.tolist())
        across, _ = dist.new_subgroups_by_enumeration(nodes.T.tolist())
        return cls(inside, across)


def hierarchical_all_reduce(tensor: Tensor, op: Op = SUM, *, nodes: Nodes) -> None:
    """All-reduce in place over M nodes of L ranks: reduce-scatter, all-reduce, all-gather.

    1. The ranks of a node reduce-scatter: each ends with 1/L of the node's sum.
    2. Each rank all-reduces its part, by a ring, with the ranks that hold it on the other nodes.
    3. The ranks of a node all-gather the parts.

    Steps: 2(L−1) inside and 2(M−1) across; the flat ring has 2(LM−1). Bytes sent by each rank:
    2(L−1)/L·n inside and 2(M−1)/M·n/L across. All ranks of a node together send 2(M−1)/M·n, the
    least possible for the busiest node without adding in the network. A flat ring in rank order
    sends 2(LM−1)/(LM)·n out of each node: for 2 nodes of 4 ranks, 1.75 times as much.
    Same bits: a part is added up along one path inside each node, then along one path across, and
    then copied.

    `tensor` and `op`, and what is raised: see `ring_all_reduce`. `nodes`: see `Nodes.groups`.
    """
    ranks = nodes.inside.size() * nodes.across.size()
    flat, rank, ranks_per_node = _start(tensor, op, nodes.inside, divide_by=ranks)
    chunks = flat.tensor_split(ranks_per_node)
    part = _reduce_scatter(chunks, rank, nodes.inside)
    ring_all_reduce(part, group=nodes.across)
    _all_gather(chunks, rank, nodes.inside)
    _finish(tensor, flat)


def _step(
    group: Group,
    send: Tensor | None = None,
    destination: int = -1,
    receive: Tensor | None = None,
    source: int = -1,
) -> None:
    """Send, receive, or both at once, and wait. Ranks are those of the group.

    Both are posted before either is waited for: if all ranks of a ring first sent, and a send
    returned only once it had been received, none would ever get to its receive.
    """
    operations = []
    if send is not None:
        operations.append(dist.P2POp(dist.isend, send, group=group, group_peer=destination))
    if receive is not None:
        operations.append(dist.P2POp(dist.irecv, receive, group=group, group_peer=source))
    for request in dist.batch_isend_irecv(operations):
        request.wait()


def _start(
    tensor: Tensor, op: Op, group: Group, divide_by: int | None = None
) -> tuple[Tensor, int, int]:
    """The tensor as a flat contiguous buffer (its own memory where that can be), rank and W.

    For an average, divided already: by W, or by `divide_by` where more ranks than `group` add up.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group: call on its members only")
    if op not in (SUM, AVG):
        raise ValueError(f"op is {op}: use ReduceOp.SUM or ReduceOp.AVG")
    if tensor.layout != torch.strided:
        raise TypeError(f"the tensor's layout is {tensor.layout}: call to_dense() on it first")
    if op == AVG and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"an average of {tensor.dtype} needs fractions: sum, or cast first")

    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if op == AVG:
        flat /= divide_by or world_size
    return flat, rank, world_size


def _finish(tensor: Tensor, flat: Tensor) -> None:
    """Copy the buffer back if it is not the tensor's own memory."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
