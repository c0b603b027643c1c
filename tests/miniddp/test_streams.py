"""Which CUDA stream waits for which, by a simulation of streams on the CPU."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from labkit.launch.ranks import run_ranks
from miniddp.bucket import Bucket
from miniddp.ddp import MiniDDP
from tests.gpu.simulated_streams import OnStream, RaceError, SimulatedStreams, Stream, backward

WIDTH = 6
WAITS = ("wait_for_streams", "wait_for_default_stream")


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)


def a_step(rank: int, views: bool, removed: str | None, caller_on_default: bool) -> list:
    """Each branch's gradients come on a stream of its own, and the caller may be on another one."""
    if removed is not None:
        setattr(Bucket, removed, lambda bucket: None)
    torch.manual_seed(0)
    wrapped = MiniDDP(TwoBranches(), gradient_as_bucket_view=views, init_sync=False)
    module, reducer = wrapped.module, wrapped.reducer
    reducer.on_cuda = True
    streams = SimulatedStreams()
    branches = [Stream("first"), Stream("second")]
    module.forward = lambda x: (
        OnStream.apply(module.first(x), branches[0], streams),
        OnStream.apply(module.second(x), branches[1], streams),
    )
    caller = streams.default if caller_on_default else Stream("caller")
    caught = None
    found = []
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
    with streams.in_place_of_cuda(), streams.on(caller):
        caller.wait_stream(streams.default)
        try:
            for _ in range(3):
                wrapped.zero_grad()
                backward(sum(output.sum() for output in wrapped(x)), streams, branches)
                found.append([parameter.grad.clone() for parameter in module.parameters()])
        except RaceError as race:
            caught = str(race)
    return [caught, found, x.sum(0)]


@pytest.mark.parametrize("caller_on_default", [True, False])
@pytest.mark.parametrize("views", [False, True])
def test_no_gradient_is_sent_or_handed_out_before_the_stream_that_computes_it_is_done(
    views, caller_on_default
):
    of_ranks = run_ranks(a_step, 2, views, None, caller_on_default)
    mean = sum(local for _, _, local in of_ranks) / 2
    for caught, found, _ in of_ranks:
        assert caught is None
        assert len(found) == 3
        for gradients in found:
            for gradient in gradients:
                wanted = (
                    mean.expand(WIDTH, WIDTH) if gradient.ndim == 2 else torch.full((WIDTH,), 4.0)
                )
                torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize(
    ("removed", "said"),
    [
        (WAITS[0], "does not wait for aten.* on stream second"),
        (WAITS[1], "on stream caller does not wait for c10d.allreduce_"),
    ],
)
@pytest.mark.parametrize("views", [False, True])
def test_without_either_wait_the_simulation_finds_a_race(views, removed, said):
    for caught, _, _ in run_ranks(a_step, 2, views, removed, False):
        assert caught is not None
        assert re.search(said, caught)


def refusing_the_cpu(device: torch.device | None = None) -> Stream:
    """As torch.cuda.current_stream does."""
    if device is not None and device.type == "cpu":
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return Stream("current")


def test_a_sparse_bucket_without_a_gradient_yet_knows_its_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", refusing_the_cpu)
    bucket = Bucket([0], [nn.Parameter(torch.empty(5, 3, device="meta"))], sparse=True)
    bucket.note_stream()
    bucket.wait_for_streams()


def test_a_sparse_gradient_from_another_stream_is_recorded_by_its_parts(monkeypatch):
    recorded = []
    record = lambda tensor, stream: recorded.append(tensor.layout)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current"))
    parameter = nn.Parameter(torch.zeros(5, 3))
    parameter.grad = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 3), (5, 3))
    bucket = Bucket([0], [parameter], sparse=True)
    bucket.streams.add(Stream("side"))
    bucket.wait_for_streams()
    assert recorded == [torch.strided, torch.strided]
