"""The recorder, on the rungs, the drop-in and torch's DDP: how many, in which order, when first."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from wide_layers import LAYERS, model, step

import labkit.profiling.recording
from labkit.launch.ranks import run_ranks
from labkit.profiling.recording import (
    Collective,
    Gradient,
    RankRecording,
    Recorder,
    merge,
)
from labkit.profiling.slow_link import SlowLink
from labkit.testing.watch import RecordedCollectives
from miniddp.ladder import (
    Bucketed,
    BucketedOverlapped,
    Flat,
    OverlappedPerParameter,
    PerParameter,
)
from miniddp.torch_drop_in import DistributedDataParallel as DropIn

PARAMETERS = 2 * LAYERS
BYTES = LAYERS * (300 * 300 + 300) * 4
AVERAGERS = {
    "per parameter": PerParameter,
    "flat": Flat,
    "overlapped per parameter": OverlappedPerParameter,
    "bucketed": Bucketed,
    "bucketed, overlapped": BucketedOverlapped,
    "DropIn": lambda module, group: DropIn(module, process_group=group),
    "torch": lambda module, group: DistributedDataParallel(module, process_group=group),
}
COLLECTIVES = dict.fromkeys(AVERAGERS, 2) | {
    "per parameter": PARAMETERS + 1,
    "overlapped per parameter": PARAMETERS + 1,
    "flat": 1,
}
OVERLAP = {"overlapped per parameter", "bucketed, overlapped", "DropIn", "torch"}


def record_all(rank):
    """For each averager: four steps' recordings, what the watch saw in the last, the gradients."""
    results = {}
    for name, make in AVERAGERS.items():
        plain = model()
        alone = make(plain, dist.group.WORLD)
        expected = [step(alone, plain, rank) for _ in range(4)][-1]
        module = model()
        recorder = Recorder(module)
        averager = make(module, recorder)
        recordings = []
        for _ in range(4):
            with RecordedCollectives() as watch, recorder:
                gradients = step(averager, module, rank)
            recordings.append(recorder.recorded)
        unchanged = all(map(torch.equal, gradients, expected))
        assert recorder.gather().ranks[rank].order() == recorder.recorded.order()
        results[name] = recordings, [launch.bytes for launch in watch.launched], unchanged
    return results


@pytest.fixture(scope="module")
def recorded():
    return run_ranks(record_all, 3, timeout=300, device="cpu")


def merged(recorded, name: str, number: int = -1):
    return merge(results[name][0][number] for results in recorded)


@pytest.mark.parametrize("name", AVERAGERS)
def test_it_sees_every_collective_in_one_order_on_all_ranks_and_changes_no_gradient(recorded, name):
    recording = merged(recorded, name)
    assert all(order == recording.order()[0] for order in recording.order())
    assert recording.order() == merged(recorded, name, -2).order(), "the same in the next step"
    assert recording.overlaps() == (name in OVERLAP)
    for one, results in zip(recording.ranks, recorded, strict=True):
        assert len(one.collectives) == len(one.buckets()) == COLLECTIVES[name]
        assert [launch.bytes for launch in one.order()] == results[name][1], "the watch differs"
        assert [c.bucket for c in one.buckets()] == list(range(COLLECTIVES[name]))
        flags = sum(launch.bytes for launch in one.order()) - BYTES
        assert 0 <= flags <= 4 * PARAMETERS  # what a rung tells about which gradients exist
        assert (one.collectives[0].launched < one.gradients[-1].ready) == (name in OVERLAP)
        assert results[name][2]


def test_times_are_in_order_and_the_ranks_clocks_are_one_clock(recorded):
    for name in AVERAGERS:
        ranks = merged(recorded, name).ranks
        for one in ranks:
            ready = [gradient.ready for gradient in one.gradients]
            ((begin, end),) = one.forwards
            assert 0 <= one.begin <= begin < end < ready[0]
            assert ready == sorted(ready)
            assert one.compute_end() == ready[-1] <= one.end
            for c in one.collectives:
                assert ready[c.after - 1] <= c.launched < c.done <= one.end
                assert c.after == PARAMETERS or c.launched < ready[c.after]
        for alike in zip(*(one.collectives for one in ranks), strict=True):
            assert min(c.done for c in alike) > max(c.launched for c in alike)


def test_what_a_forward_broadcasts_is_no_bucket_and_frozen_parameters_have_no_gradient():
    def work(rank):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        module[0].bias.requires_grad_(False)
        recorder = Recorder(module)
        averager = DistributedDataParallel(module, process_group=recorder)

        def recorded() -> RankRecording:
            with recorder:
                inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))
                averager(inputs).square().sum().backward()
            return recorder.recorded

        before = [recorded() for _ in range(3)][-1]
        assert {one.op for one in before.collectives if one.bucket is None} == {"broadcast"}
        assert [one.op for one in before.buckets()] == ["all_reduce"]
        assert {one.parameter for one in before.gradients} == {"0.weight", "1.weight", "1.bias"}
        assert not before.overlaps()
        recorder.close()
        assert recorded().gradients == recorded().forwards == ()

    run_ranks(work, 2, device="cpu")


def test_a_collective_that_nobody_waited_for_is_reported_not_waited_for_without_end(tmp_path):
    def work(rank, flag):
        module = nn.Linear(2, 2)
        recorder = Recorder(module)
        labkit.profiling.recording._PATIENCE = 0.2
        x, message = torch.full((3,), float(rank)), None
        if rank == 0:
            try:
                with recorder:
                    handle = dist.all_reduce(x, group=recorder, async_op=True)
            except TimeoutError as error:
                message = str(error)
            open(flag, "w").close()
            handle.wait()
        else:
            while not os.path.exists(flag):
                time.sleep(0.01)
            dist.all_reduce(x)
        return message, x.tolist()

    (message, x), (_, y) = run_ranks(work, 2, str(tmp_path / "flag"), device="cpu")
    assert "all_reduce of 12 bytes is still under way" in message
    assert x == y == [1.0] * 3


def synthetic(rank: int, collectives: list[tuple[float, float]], last_gradient: float = 5.0):
    launched = [
        Collective("all_reduce", 8, 1, number, begin, end)
        for number, (begin, end) in enumerate(sorted(collectives))
    ]
    gradients = (Gradient("w", 8, last_gradient),)
    return RankRecording(rank, 0.0, 30.0, ((0.0, 1.0),), gradients, tuple(launched))


spans = st.lists(st.tuples(st.integers(0, 15), st.integers(1, 10)), max_size=6)


@given(spans, st.integers(0, 20))
def test_exposed_is_the_time_after_backward_in_which_any_collective_is_under_way(spans, last):
    collectives = [(float(begin), float(begin + length)) for begin, length in spans]
    one = synthetic(0, collectives, float(last))
    moments = [moment + 0.5 for moment in range(30)]
    under_way = [
        moment
        for moment in moments
        if moment > last and any(begin < moment < end for begin, end in collectives)
    ]
    assert one.exposed_seconds() == len(under_way)
    assert [m for m in moments if any(b < m < e for b, e in one.exposed())] == under_way


def test_what_is_missing_or_not_supported_is_named():
    recording = merge([synthetic(1, [(7.0, 9.0)]), synthetic(0, [(6.0, 9.0)])])
    assert [one.rank for one in recording.ranks] == [0, 1]
    with pytest.raises(ValueError, match=r"got those of \[0, 2\]"):
        merge([synthetic(2, []), synthetic(0, [])])

    def work(rank):
        recorder = Recorder(nn.Linear(2, 2))
        with pytest.raises(KeyError), recorder:
            raise KeyError(rank)
        with pytest.raises(RuntimeError, match="nothing has been recorded"):
            recorder.gather()
        with pytest.raises(NotImplementedError, match="asked to receive"):
            dist.recv(torch.ones(1), group=recorder)
        with pytest.raises(ValueError, match=r"gbit_per_s=0, .* needs a positive rate"):
            SlowLink(0)
        link = SlowLink(gbit_per_s=1)
        with pytest.raises(NotImplementedError, match="no cost for scatter; it knows all_reduce"):
            dist.scatter(torch.ones(1), [torch.ones(1)], group=link)
        with pytest.raises(NotImplementedError, match=r'one on meta.*device="cpu"'):
            dist.all_reduce(torch.ones(1, device="meta"), group=link)
        link.close()
        with pytest.raises(RuntimeError, match="link is closed"):
            dist.all_reduce(torch.ones(1), group=link)

    run_ranks(work, 1, device="cpu")
