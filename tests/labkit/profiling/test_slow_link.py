"""The slow link: as slow as its model says, in nothing else different, and in nobody's way."""

import gc
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from wide_layers import model, step

from labkit.launch.ranks import run_ranks
from labkit.launch.supervisor import SECONDARY_ERROR
from labkit.profiling.cost_model import Link
from labkit.profiling.recording import Recorder, merge
from labkit.profiling.slow_link import SlowLink, link_seconds
from miniddp.torch_drop_in import DistributedDataParallel as DropIn

MB = 1_000_000


def test_other_collectives_cost_what_they_cost_on_a_ring():
    gbit, link = 125 * MB, Link.of(gbit_per_s=1, latency_us=1000)
    costs = [link_seconds(op, gbit, 4, link) for op in ("broadcast", "all_gather")]
    assert costs == pytest.approx([1.003, 3.003])
    assert link_seconds("barrier", 0, 3, link) == pytest.approx(0.004)
    assert link_seconds("broadcast", gbit, 1, link) == 0


def timed(rank, world_size, repeats):
    """For each repeat, when each of two all-reduces of 0.2 MB was launched and done; rank 1 late.

    The link takes so much longer than gloo that a busy machine hardly counts.
    """
    link = SlowLink(gbit_per_s=0.0032, latency_us=1000)  # 0.4 MB/s
    seconds = link_seconds("all_reduce", MB // 5, world_size, link.link)
    times = []
    for _ in range(repeats):
        x, y = torch.full((MB // 20,), float(rank)), torch.full((MB // 20,), rank + 1.0)
        dist.barrier()
        time.sleep(0.1 * rank)
        handles, launched, done = [], [], []
        for tensor in (x, y):
            launched.append(time.perf_counter())
            handles.append(dist.all_reduce(tensor, group=link, async_op=True))
        for handle in handles:
            handle.wait()
            done.append(time.perf_counter())
        assert (x == sum(range(world_size))).all()
        assert (y == sum(range(1, world_size + 1))).all()
        times.append((launched, done))
    return seconds, times


def test_an_all_reduce_takes_what_the_model_says_and_two_take_twice():
    results = run_ranks(timed, 3, 2, device="cpu")
    seconds = results[0][0]
    assert seconds == pytest.approx(2 * 2 * (0.001 + 0.2 / 3 / 0.4))
    first, second = [], []
    for repeat in zip(*(times for _, times in results), strict=True):
        last_launch = max(launched[0] for launched, _ in repeat)
        for _, done in repeat:
            assert done[0] - last_launch >= seconds  # exactly: the link is never faster
            assert done[1] - last_launch >= 2 * seconds
            first.append(done[0] - last_launch)
            second.append(done[1] - last_launch)
    # A busy machine may wake a rank late, but hardly each of them, each time.
    assert min(first) < 1.8 * seconds
    assert min(second) < 2.8 * seconds


def test_other_collectives_give_what_they_give_without_it():
    def work(rank, world_size):
        recorder, results = Recorder(nn.Linear(2, 2), SlowLink(10, latency_us=10)), []
        for group in (dist.group.WORLD, recorder):
            with recorder:
                x = torch.arange(world_size, dtype=torch.float64) + 10 * rank
                gathered = [torch.empty_like(x) for _ in range(world_size)]
                dist.all_gather(gathered, x, group=group)
                one, shard, swapped = torch.empty(world_size**2).double(), x[:1].clone(), x.clone()
                dist.all_gather_single(one, x, group=group)
                dist.reduce_scatter_single(shard, x, group=group)
                dist.all_to_all_single(swapped, x, group=group)
                everywhere = [None] * world_size
                dist.all_gather_object(everywhere, f"rank {rank}", group=group)
                largest = x.clone()
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
                dist.reduce(x, 0, group=group)
                dist.broadcast(x, 1, group=group)
                dist.barrier(group)
                tensors = [*gathered, one, shard, swapped, largest, x]
            results.append(([tensor.tolist() for tensor in tensors], everywhere))
        assert results[0] == results[1]
        order = recorder.recorded.order()
        ops = ["all_gather", "all_gather", "reduce_scatter", "all_to_all", "all_gather"]
        ops += ["all_gather", "all_reduce", "reduce", "broadcast", "barrier"]
        assert [launch.op for launch in order] == ops
        assert [launch.bytes for launch in order[:4]] == [24] * 4

    run_ranks(work, 3, device="cpu")


def test_backward_goes_on_while_the_link_is_busy():
    def work(rank):
        recorded = []
        for wrap in (DropIn, DistributedDataParallel):
            module, link = model(), SlowLink(gbit_per_s=100)
            recorder = Recorder(module, link)
            averager = wrap(module, process_group=recorder)
            step(averager, module, rank)  # with buckets of its own
            link.link = Link.of(gbit_per_s=0.01, latency_us=0)  # the first bucket takes 0.8 s
            with recorder:
                step(averager, module, rank)
            recorded.append(recorder.recorded)
        return recorded

    for ranks in zip(*run_ranks(work, 2, device="cpu"), strict=True):
        recording = merge(ranks)
        assert recording.overlaps()
        for one in recording.ranks:
            first, last = one.buckets()
            assert last.launched < first.done, "backward waited for the first bucket"
            assert one.compute_end() < first.done
            wire = 0.01e9 / 8
            assert last.done - one.begin > (first.bytes + last.bytes) / wire
            assert one.exposed_seconds() > last.bytes / wire


def test_an_error_of_the_collective_comes_out_of_the_handle_and_of_backward():
    def work(rank):
        groups = [dist.new_group() for _ in range(3)]
        links = [SlowLink(1, group=group) for group in groups]
        torchs = DistributedDataParallel(model(), process_group=links[1])
        ours = DropIn(model(), process_group=links[2])
        dist.barrier()
        if rank == 1:  # it does not come, and closes its connections
            for group in groups:
                dist.destroy_process_group(group)
            return
        handle = dist.all_reduce(torch.ones(3), group=links[0], async_op=True)
        for attempt in (
            handle.wait,
            lambda: torchs(torch.ones(2, 300)).sum().backward(),
            lambda: ours(torch.ones(2, 300)).sum().backward(),
        ):
            with pytest.raises(RuntimeError, match=SECONDARY_ERROR):
                attempt()

    run_ranks(work, 2, device="cpu")


def test_nothing_is_left_behind(tmp_path):
    def work(rank):
        def open_now():
            return psutil.Process().num_fds(), threading.active_count()

        files, threads = open_now()
        kept = SlowLink(gbit_per_s=10)
        x = torch.full((4,), float(rank))
        dist.all_reduce(x, group=kept)
        assert x.tolist() == [1.0] * 4
        assert open_now() == (files + 3, threads + 1)
        del kept
        gc.collect()
        SlowLink(gbit_per_s=10).close()
        assert open_now() == (files, threads)

    run_ranks(work, 2, env={"TMPDIR": str(tmp_path)}, device="cpu")
    assert list(Path(tmp_path).iterdir()) == []
