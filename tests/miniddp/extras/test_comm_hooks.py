"""Comm hooks: ours against torch's stock ones, each of them on both wrappers, bitwise."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from labkit.testing.compare import gradients
from miniddp.extras import comm_hooks
from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from tests.ddp_models import MODELS
from tests.miniddp.beside_torch import CPU, hooks, seeded
from tests.on_ranks import on_ranks


def batch(rank: int) -> Tensor:
    torch.manual_seed(rank)
    return MODELS["mlp"].batch(5)


def test_our_hooks_are_bitwise_equal_to_torchs_on_both_wrappers():
    for found in run_ranks(hooks, 3, device="cpu"):
        for hook, distances in found.items():
            assert {way: d for way, d in distances.items() if not d.bitwise} == {}, hook


@on_ranks(2)
def test_bf16_compression_equals_torchs_hook_and_stays_within_its_rounding(rank):
    found = []
    exactly = comm_hooks.average
    for hook in (comm_hooks.bf16_compress, default_hooks.bf16_compress_hook, exactly):
        wrapped = DropIn(seeded("mlp", CPU))
        wrapped.register_comm_hook(None, hook)
        wrapped(batch(rank)).square().mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in wrapped.parameters()]))
    ours, theirs, exact = found
    assert torch.equal(ours, theirs)
    assert 0 < (ours - exact).norm() / exact.norm() < 2**-8


class Weighted(nn.Module):
    """One complex weight; its gradient is the conjugate of what it is multiplied by."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 12, dtype=torch.complex64))

    def forward(self, factors):
        return (self.weight * factors).sum().real


@on_ranks(2)
def test_compression_refuses_complex_gradients_on_every_rank():
    for hook in (comm_hooks.fp16_compress, comm_hooks.bf16_compress):
        wrapped = DropIn(Weighted())
        wrapped.register_comm_hook(None, hook)
        said = "bucket 0 holds torch.complex64 gradients.*use the hook `average`"
        with pytest.raises(TypeError, match=said):
            wrapped(torch.randn(16, 12, dtype=torch.complex64)).backward()


@on_ranks(2)
def test_what_cannot_be_a_hook_is_refused_and_so_is_a_second_one():
    def without_bucket(state, gradients): ...

    def with_wrong_bucket(state, bucket: int): ...

    def with_wrong_result(state, bucket) -> int: ...

    wrapped = DropIn(seeded("mlp", CPU))
    for hook, said in (
        (3, "must be callable"),
        (without_bucket, "must be named bucket"),
        (with_wrong_bucket, "bucket annotation"),
        (with_wrong_result, "return annotation"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            wrapped.register_comm_hook(None, hook)
    wrapped.register_comm_hook(None, comm_hooks.average)
    with pytest.raises(RuntimeError, match="only be called once"):
        wrapped.register_comm_hook(None, comm_hooks.average)


# The hook that reduces inside nodes and then across them ------------------------------------------


def hierarchically(rank: int, ranks_per_node: int) -> list[list[Tensor]]:
    """The first step's gradients by the hook under both wrappers, and by torch without a hook."""
    state = comm_hooks.HierarchicalState(ranks_per_node)
    found = []
    for wrap, hook in ((DropIn, True), (DistributedDataParallel, True), (DropIn, False)):
        wrapped = wrap(seeded("mlp", CPU), bucket_cap_mb=0.005)
        if hook:
            wrapped.register_comm_hook(state, comm_hooks.hierarchical_average)
        for _ in range(2):  # in the second step, of many buckets
            wrapped.zero_grad()
            wrapped(batch(rank)).pow(2).mean().backward()
        found.append(gradients(wrapped.module))
    state.close()
    return found


def test_it_averages_under_both_wrappers_as_one_process_with_the_full_batch():
    full = seeded("mlp", CPU)
    full(torch.cat([batch(rank) for rank in range(6)])).pow(2).mean().backward()
    of_rank = run_ranks(hierarchically, 6, 2)  # on three nodes of two ranks
    for ours, torchs, without in of_rank:
        assert all(map(torch.equal, ours, of_rank[0][0])), "the same bits on every rank"
        assert all(map(torch.equal, ours, torchs))
        torch.testing.assert_close(ours, gradients(full))
        torch.testing.assert_close(ours, without)


@on_ranks(2)
def test_what_fails_in_its_thread_is_raised_by_backward(rank):
    for wrap in (DropIn, DistributedDataParallel):
        state = comm_hooks.HierarchicalState(1)
        wrapped = wrap(seeded("mlp", CPU))
        wrapped.register_comm_hook(state, comm_hooks.hierarchical_average)
        broken = mock.Mock(side_effect=ValueError("the cable is unplugged"))
        with (
            mock.patch.object(comm_hooks, "hierarchical_all_reduce", broken),
            pytest.raises(Exception, match="the cable is unplugged"),
        ):
            wrapped(batch(rank)).sum().backward()
        state.close()


def test_a_bucket_that_is_not_on_the_cpu_is_refused():
    bucket = SimpleNamespace(buffer=lambda: torch.empty(3, device="meta"))
    with pytest.raises(NotImplementedError, match="NCCL picks the route itself"):
        comm_hooks.hierarchical_average(SimpleNamespace(), bucket)
