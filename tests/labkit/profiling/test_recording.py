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

import labkit.profiling.recording
from labkit.launch.ranks import run_ranks
from labkit.profiling.recording import (
    Collective,
    Gradient,
    OrderEntry,
    RankRecording,
    Recorder,
    merge,
)
from labkit.testing.watch import RecordedCollectives
from miniddp.ladder import (
    Bucketed,
    BucketedOverlapped,
    Flat,
    OverlappedPerParameter,
    PerParameter,
)
from miniddp.torch_drop_in import DistributedDataParallel as DropIn

LAYERS = 5  # of 353 KiB, so that the first bucket of torch's, of 1 MiB, holds three of them
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
COLLECTIVES = {
    "per parameter": PARAMETERS + 1,
    "flat": 1,
    "overlapped per parameter": PARAMETERS + 1,
    "bucketed": 2,
    "bucketed, overlapped": 2,
    "DropIn": 2,
    "torch": 2,
}
OVERLAP = {"overlapped per parameter", "bucketed, overlapped", "DropIn", "torch"}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(300, 300) for _ in range(LAYERS)))


def step(averager, module, rank) -> list[torch.Tensor]:
    module.zero_grad()
    inputs = torch.randn(4, 300, generator=torch.Generator().manual_seed(rank))
    averager(inputs).square().sum().backward()
    if hasattr(averager, "finish"):
        averager.finish()
    return [parameter.grad.clone() for parameter in module.parameters()]


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


@pytest.fixture(scope="module", params=[2, 3])
def recorded(request):
    return run_ranks(record_all, request.param, timeout=120, device="cpu")


def merged(recorded, name: str, number: int):
    return merge(results[name][0][number] for results in recorded)


@pytest.mark.parametrize("name", AVERAGERS)
def test_it_sees_every_collective_in_one_order_on_all_ranks(recorded, name):
    recording = merged(recorded, name, -1)
    assert recording.same_order()
    assert all(order == recording.order()[0] for order in recording.order())
    for one, results in zip(recording.ranks, recorded, strict=True):
        assert len(one.collectives) == len(one.buckets()) == COLLECTIVES[name]
        assert [launch.bytes for launch in one.order()] == results[name][1], "the watch differs"
        assert [c.bucket for c in one.buckets()] == list(range(COLLECTIVES[name]))
        assert {launch.op for launch in one.order()} == {"all_reduce"}
        flags = sum(launch.bytes for launch in one.order()) - BYTES
        assert 0 <= flags <= 4 * PARAMETERS  # what a rung tells about which gradients exist


@pytest.mark.parametrize("name", AVERAGERS)
def test_the_first_launch_is_before_the_last_gradient_for_those_that_overlap(recorded, name):
    recording = merged(recorded, name, -1)
    assert recording.overlaps() == (name in OVERLAP)
    for one in recording.ranks:
        last_gradient = one.gradients[-1].ready
        assert (one.collectives[0].launched < last_gradient) == (name in OVERLAP)


@pytest.mark.parametrize("name", AVERAGERS)
def test_its_order_is_the_same_in_the_next_step_and_gradients_stay_the_same(recorded, name):
    assert merged(recorded, name, -1).order() == merged(recorded, name, -2).order()
    assert all(results[name][2] for results in recorded)


@pytest.mark.parametrize("name", AVERAGERS)
def test_every_gradient_is_recorded_once_and_times_are_in_order(recorded, name):
    names = {parameter for parameter, _ in model().named_parameters()}
    for one in merged(recorded, name, -1).ranks:
        assert {gradient.parameter for gradient in one.gradients} == names
        assert len(one.gradients) == PARAMETERS
        assert sum(gradient.bytes for gradient in one.gradients) == BYTES
        ready = [gradient.ready for gradient in one.gradients]
        assert ready == sorted(ready)
        ((begin, end),) = one.forwards
        assert 0 <= one.begin <= begin < end < ready[0]
        assert one.compute_end() == ready[-1] <= one.end
        for collective in one.collectives:
            assert ready[collective.after - 1] <= collective.launched < collective.done <= one.end
            if collective.after < PARAMETERS:
                assert collective.launched < ready[collective.after]


def test_no_rank_is_done_with_an_all_reduce_before_every_rank_has_launched_it(recorded):
    """So the ranks' clocks are one clock."""
    for name in AVERAGERS:
        ranks = merged(recorded, name, -1).ranks
        for alike in zip(*(one.collectives for one in ranks), strict=True):
            assert min(c.done for c in alike) > max(c.launched for c in alike)


def test_torch_and_mini_ddp_go_the_same_way_and_neither_overlaps_in_its_first_step(recorded):
    for number in range(4):
        ours, torchs = (merged(recorded, name, number).order() for name in ("DropIn", "torch"))
        buckets = [[x for x in order if x.op == "all_reduce"] for order in ours + torchs]
        assert all(bucket == buckets[0] for bucket in buckets)
    assert merged(recorded, "torch", 0).order()[0] == [OrderEntry("all_reduce", BYTES, PARAMETERS)]
    assert not merged(recorded, "torch", 0).overlaps()
    assert not merged(recorded, "DropIn", 0).overlaps()


def test_what_a_forward_broadcasts_is_no_bucket_and_frozen_parameters_have_no_gradient():
    def work(rank):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        module[0].bias.requires_grad_(False)
        recorder = Recorder(module)
        averager = DistributedDataParallel(module, process_group=recorder)
        for _ in range(3):
            with recorder:
                inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))
                averager(inputs).square().sum().backward()
        before = recorder.recorded
        recorder.close()
        with recorder:
            averager(inputs).square().sum().backward()
        return before, recorder.recorded

    for before, after in run_ranks(work, 2, device="cpu"):
        assert {one.op for one in before.collectives if one.bucket is None} == {"broadcast"}
        assert [one.op for one in before.buckets()] == ["all_reduce"]
        assert "0.bias" not in {gradient.parameter for gradient in before.gradients}
        assert len(before.gradients) == 3
        assert not before.overlaps()
        assert after.gradients == after.forwards == ()


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


def test_where_nothing_was_recorded_it_says_so():
    def work(rank):
        recorder = Recorder(nn.Linear(2, 2))
        with pytest.raises(RuntimeError, match="nothing has been recorded"):
            _ = recorder.recorded
        with pytest.raises(KeyError), recorder:
            raise KeyError(rank)
        with pytest.raises(RuntimeError, match="nothing has been recorded"):
            recorder.gather()
        with pytest.raises(NotImplementedError, match="asked to receive"):
            dist.recv(torch.ones(1), group=recorder)

    run_ranks(work, 1, device="cpu")


def synthetic(rank: int, collectives: list[tuple[float, float]], last_gradient: float = 5.0):
    launched = [
        Collective("all_reduce", 8, 1, number, begin, end)
        for number, (begin, end) in enumerate(sorted(collectives))
    ]
    gradients = (Gradient("w", 8, last_gradient),)
    return RankRecording(rank, 0.0, 30.0, ((0.0, 1.0),), gradients, tuple(launched))


def test_ranks_are_merged_in_order_and_a_missing_one_is_named():
    recording = merge([synthetic(1, [(7.0, 9.0)]), synthetic(0, [(6.0, 9.0)])])
    assert [one.rank for one in recording.ranks] == [0, 1]
    with pytest.raises(ValueError, match=r"got those of \[0, 2\]"):
        merge([synthetic(2, []), synthetic(0, [])])
    with pytest.raises(ValueError, match=r"got those of \[\]"):
        merge([])


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
