"""Which CUDA stream waits for which, by a simulation of streams on the CPU."""

from unittest import mock

import pytest
import torch
from torch import nn

from labkit.launch.ranks import run_ranks
from miniddp.torch_drop_in.sparse import SparseBucket
from tests.miniddp.simulated_streams import STEPS, RaceError, Stream, train_two_branches
from tests.on_ranks import on_ranks


@pytest.mark.parametrize("on_default", [True, False])
@pytest.mark.parametrize("views", [False, True])
def test_no_gradient_is_sent_or_handed_out_before_the_stream_that_computes_it_is_done(
    views, on_default
):
    def work(rank):
        return train_two_branches(rank, views, on_default)

    of_ranks = run_ranks(work, 2)
    mean = sum(local for _, local in of_ranks) / 2
    for seen, _ in of_ranks:
        assert len(seen) == STEPS
        for gradient in (gradient for gradients in seen for gradient in gradients):
            wanted = mean if gradient.ndim == 2 else torch.tensor(4.0)
            torch.testing.assert_close(gradient, wanted.expand_as(gradient))


@pytest.mark.parametrize(
    ("removed", "said"),
    [
        ("bucket.Bucket.wait_for_streams", "first does not wait for aten.* on stream second"),
        ("reducer.wait_for_default_stream", "caller does not wait for c10d.allreduce_"),
    ],
)
@on_ranks(2)
def test_without_either_wait_every_rank_has_a_race(rank, removed, said):
    with mock.patch(f"miniddp.{removed}"), pytest.raises(RaceError, match=said):
        train_two_branches(rank)


def test_a_sparse_gradient_from_another_stream_is_recorded_by_its_parts(monkeypatch):
    recorded = []
    record = lambda tensor, stream: recorded.append(tensor.layout)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current"))
    parameter = nn.Parameter(torch.zeros(5, 3))
    parameter.grad = torch.sparse_coo_tensor(
        [[1, 1]], torch.ones(2, 3), (5, 3), check_invariants=True
    )
    bucket = SparseBucket([0], [parameter])
    bucket.streams.add(Stream("side"))
    bucket.wait_for_streams()
    assert recorded == [torch.strided, torch.strided]
