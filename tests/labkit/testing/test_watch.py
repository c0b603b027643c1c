"""The watch over collectives: what it sees, and that ranks which differ raise, not hang."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from labkit.testing.watch import CollectiveMismatchError, RecordedCollectives, SameCollectives
from tests.on_ranks import on_ranks


@on_ranks(2, device="cpu")
def test_it_records_what_python_and_what_the_cpp_reducer_of_ddp_launch_in_order(rank):
    with RecordedCollectives() as python:
        dist.broadcast(torch.full((2, 3), float(rank)), 0)
        dist.all_reduce(torch.ones(5, dtype=torch.float64) * rank)
        dist.barrier()
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    with RecordedCollectives() as cpp:
        ddp(torch.full((1, 3), float(rank))).sum().backward()
    assert [launch.op for launch in python.launched] == ["broadcast_", "allreduce_", "barrier"]
    assert python.launched[0].shapes == ((2, 3),)
    assert (python.launched[1].dtype, python.launched[1].bytes) == ("float64", 40)
    assert [(launch.op, launch.shapes, launch.bytes) for launch in cpp.launched] == [
        ("allreduce_", ((8,),), 32)
    ]


def test_point_to_point_messages_are_not_collectives():
    def work(rank, world_size):
        with SameCollectives() as watch:
            if rank == 0:
                dist.send(torch.ones(3), 1)
            elif rank == 1:
                dist.recv(torch.empty(3), 0)
        return watch.launched

    assert run_ranks(work, 3, device="cpu") == [[], [], []]


def differ_in_number(rank: int) -> None:
    for _ in range(2 + (rank == 1)):
        dist.all_reduce(torch.full((3,), float(rank)))


def differ_in_kind(rank: int) -> None:
    x = torch.full((3,), float(rank))
    dist.broadcast(x, 0) if rank == 1 else dist.all_reduce(x)


def differ_in_shape(rank: int) -> None:
    dist.all_reduce(torch.full((3 + (rank == 1),), float(rank)))


def differ_in_dtype(rank: int) -> None:
    dist.all_reduce(torch.full((3,), rank, dtype=torch.int64 if rank == 1 else torch.float32))


def differ_asynchronously(rank: int) -> None:
    works = [
        dist.all_reduce(torch.ones(size), async_op=True)
        for size in ([2, 3] if rank == 1 else [3, 2])
    ]
    for work in works:
        work.wait()


def one_raises(rank: int) -> None:
    if rank == 1:
        raise KeyError("this rank's own mistake")
    dist.all_reduce(torch.ones(3))


WAYS = {
    differ_in_number: ["number 3", "rank 0: has come to the end"],
    differ_in_kind: [],
    differ_in_shape: ["allreduce_ of float32 [4]"],
    differ_in_dtype: ["int64"],
    differ_asynchronously: [],
    one_raises: ["rank 1: raised KeyError"],
}


# Much less than the watch's own timeout: it knows, and waits for none.
@on_ranks(3, timeout=200, device="cpu")
def test_ranks_that_differ_raise_on_every_rank_at_once_and_say_where(rank, world_size):
    for way, said in WAYS.items():
        own = way is one_raises and rank == 1
        with (
            pytest.raises(KeyError if own else CollectiveMismatchError) as caught,
            SameCollectives(timeout=600),
        ):
            way(rank)
        words = ["this rank's own mistake"] if own else ["rank 0:", "rank 1:", *said]
        assert all(word in str(caught.value) for word in words), way.__name__
    after = torch.tensor([float(rank)])
    dist.all_reduce(after)  # the ranks can still communicate
    assert after.item() == 0 + 1 + 2


@on_ranks(2, device="cpu", stuck_after=20)
def test_a_rank_that_never_comes_is_reported_within_the_timeout(rank):
    watch = SameCollectives(timeout=2)
    if rank == 0:
        with pytest.raises(CollectiveMismatchError, match=r"has not answered for 2 s"), watch:
            dist.all_reduce(torch.ones(2))
    dist.barrier()
