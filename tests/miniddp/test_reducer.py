"""The reducer's order of events: launches in the plan's order, overlapped, once per backward."""

import gc
import sys
import threading
import warnings
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

from labkit.launch.ranks import run_ranks
from labkit.testing.compare import gradients
from miniddp import MiniDDP, reducer
from miniddp.extras import comm_hooks
from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from tests.on_ranks import on_ranks

BOTH = pytest.mark.parametrize("wrapper", [MiniDDP, DropIn])


class AnyOrder(nn.Module):
    """Four layers whose outputs are chained in the order that the caller wants."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, order):
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def events_of(rank: int, orders: list[list[int]], steps: int) -> list[list[tuple[str, int]]]:
    """For each step: ("gradient", parameter) and ("launch", bucket) as they happened."""
    wrapped = DropIn(AnyOrder(), bucket_cap_mb=280 / 2**20)  # a layer, 288 bytes, a bucket
    events: list[tuple[str, int]] = []

    def note_launch(state, bucket):
        events.append(("launch", bucket.index()))
        return comm_hooks.average(state, bucket)

    wrapped.register_comm_hook(None, note_launch)
    for number, parameter in enumerate(wrapped.parameters()):
        parameter.register_post_accumulate_grad_hook(
            lambda _, number=number: events.append(("gradient", number))
        )
    seen = []
    for step in range(steps):
        events.clear()
        wrapped.zero_grad()
        torch.manual_seed(10 * rank + step)
        wrapped(torch.randn(4, 8), orders[rank]).sum().backward()
        seen.append(list(events))
    return seen, torch.cat([p.grad.flatten() for p in wrapped.parameters()])


def test_after_the_first_backward_buckets_launch_in_one_order_however_gradients_arrive():
    orders = [[0, 1, 2, 3], [3, 1, 0, 2], [2, 0, 3, 1]]
    per_rank = run_ranks(events_of, 3, orders, 3)
    arrivals = []
    for (first, _, events), gradient in per_rank:
        assert [what for what, _ in first] == ["gradient"] * 8 + ["launch"]
        assert [number for what, number in events if what == "launch"] == [0, 1, 2, 3]
        arrivals.append([number for what, number in events if what == "gradient"])
        assert torch.equal(gradient, per_rank[0][1])
    assert arrivals[0] != arrivals[1] != arrivals[2]
    # Rank 0's order of arrival made the plan: there each bucket leaves as soon as it is full.
    (_, _, events), _ = per_rank[0]
    assert [what for what, _ in events] == ["gradient", "gradient", "launch"] * 4


@on_ranks(2)
def test_accumulation_communicates_in_the_last_micro_batch_only_and_views_stay_views(rank):
    warnings.simplefilter("error")  # a local backward is announced by no_sync()
    wrapped = DropIn(AnyOrder(), gradient_as_bucket_view=True)
    launches = []

    def count(state, bucket):
        launches.append(bucket.index())
        return comm_hooks.average(state, bucket)

    wrapped.register_comm_hook(None, count)
    torch.manual_seed(rank)
    for micro in range(8):
        launches.clear()
        wrapped.require_backward_grad_sync = micro % 4 == 3
        wrapped(torch.randn(4, 8), [0, 1, 2, 3]).sum().backward()
        assert len(launches) == (micro % 4 == 3)
    buffers = {b.buffer.untyped_storage().data_ptr() for b in wrapped.reducer.buckets}
    assert {p.grad.untyped_storage().data_ptr() for p in wrapped.parameters()} <= buffers


@BOTH
@on_ranks(2)
def test_a_nested_no_sync_leaves_the_outer_one_in_force_and_buffers_are_synchronized_if_asked_for(
    rank, wrapper
):
    module = nn.Linear(2, 2)
    module.register_buffer("offset", torch.zeros(2))
    wrapped = wrapper(module)
    x = torch.full((1, 2), 1.0 + rank)
    with wrapped.no_sync():
        with wrapped.no_sync():
            pass
        wrapped(x).sum().backward()
    assert torch.equal(module.weight.grad, torch.full((2, 2), 1.0 + rank))
    wrapped(x).sum().backward()
    module.offset = torch.full((2,), float(rank))
    wrapped(x)
    assert torch.equal(module.offset, torch.zeros(2))
    own = nn.BatchNorm1d(2, momentum=1.0)
    unsynced = wrapper(own, broadcast_buffers=False)
    for _ in range(2):
        unsynced(x.expand(2, 2)).sum().backward()
        seen = own.running_mean.clone()
    unsynced.eval()(x)
    assert torch.equal(own.running_mean, seen)


@BOTH
@on_ranks(1)
def test_a_wrapper_frees_its_buckets_at_once_without_waiting_for_the_garbage_collector(wrapper):
    wrapped = wrapper(AnyOrder(), find_unused_parameters=True)
    wrapped(torch.randn(4, 8), [0, 1]).sum().backward()
    buffers = [weakref.ref(bucket.buffer) for bucket in wrapped.reducer.buckets]
    references = [weakref.ref(wrapped.reducer), *buffers]
    gc.disable()
    del wrapped
    assert [reference() for reference in references] == [None] * len(references)


@on_ranks(2)
def test_the_old_buckets_are_freed_before_the_new_ones_are_made():
    wrapped = DropIn(AnyOrder())
    averager, make = wrapped.reducer, wrapped.reducer.make_bucket
    wrapped(torch.randn(4, 8), [0, 1, 2, 3]).sum().backward()
    old, made = weakref.ref(averager.buckets[0].buffer), []

    def make_bucket(indices):
        made.append(old())
        return make(indices)

    averager.make_bucket = make_bucket
    gc.disable()
    assert averager.rebuild_buckets()
    assert made[0] is None


@on_ranks(2)
def test_missing_gradients_are_named_in_the_order_of_the_parameters_after_a_rebuild_too(rank):
    names = ", ".join(
        f"layers.{layer}.{kind}" for layer in (0, 2, 3) for kind in ("weight", "bias")
    )
    wrapped = DropIn(AnyOrder())
    for order in ([0, 1, 2, 3], [0, 1, 2, 3], [1]):
        torch.manual_seed(rank)
        wrapped(torch.randn(4, 8), order).sum().backward()
    assert wrapped.reducer.buckets[0].indices[:2] == [7, 6]  # the buckets' order is another one
    with pytest.raises(RuntimeError, match=names):
        wrapped(torch.randn(4, 8), [0, 1, 2, 3])


@on_ranks(2)
def test_autograd_grad_returns_local_gradients_and_leaves_the_wrapper_usable(rank):
    wrapped, order = DropIn(AnyOrder()), [0, 1, 2, 3]
    xs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    local = [AnyOrder() for _ in xs]
    for module, x in zip(local, xs, strict=True):
        module(x, order).sum().backward()
    taken = torch.autograd.grad(wrapped(xs[rank], order).sum(), list(wrapped.parameters()))
    assert all(p.grad is None for p in wrapped.parameters())
    torch.testing.assert_close(list(taken), gradients(local[rank]))
    wrapped(xs[rank], order).sum().backward()  # the forward before never came back: no error
    averages = [(a + b) / 2 for a, b in zip(*map(gradients, local), strict=True)]
    torch.testing.assert_close(gradients(wrapped), averages)


@on_ranks(2)
def test_a_backward_that_failed_after_its_last_gradient_is_not_blamed_on_unused_parameters(rank):
    def fail(gradient):
        raise ValueError("of the user")

    wrapped = MiniDDP(AnyOrder())
    torch.manual_seed(rank)
    x = torch.randn(3, 8, requires_grad=True) * 2
    x.register_hook(fail)
    with pytest.raises(ValueError, match="of the user"):
        wrapped(x, [0, 1, 2, 3]).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction") as caught:
        wrapped(torch.randn(3, 8), [0, 1, 2, 3])
    assert "That backward raised an exception after its last gradient." in str(caught.value)
    assert "not used in producing" not in str(caught.value)


def two_threads_fill_two_buckets(rank: int, repeats: int, wrapper: type[MiniDDP]) -> set:
    """As on two devices: each thread counts the gradients of its own bucket, all at once."""
    wide = nn.ParameterList(nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(9))
    narrow = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(9))
    averager = wrapper(nn.ModuleList([wide, narrow]), init_sync=False).reducer
    averager.on_cpu = False
    seen = set()
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(repeats):
            launched: list[int] = []
            ended: list[object] = []
            averager.all_reduce_bucket = lambda _, launched=launched: launched.append(
                averager.next_bucket
            )
            averager.reset_state()
            averager.prepare_for_backward(())
            start = threading.Barrier(2)

            def count(indices: list[int], start: threading.Barrier = start) -> None:
                start.wait()
                for index in indices:
                    averager.autograd_hook(index)

            with mock.patch.object(reducer, "at_end_of_backward", ended.append):
                threads = [
                    threading.Thread(target=count, args=(bucket.indices,))
                    for bucket in averager.buckets
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            seen.add((tuple(launched), len(ended)))
    finally:
        sys.setswitchinterval(switch_interval)
    return seen


@BOTH
def test_two_threads_launch_each_bucket_once_in_order_and_end_the_backward_once(wrapper):
    for seen in run_ranks(two_threads_fill_two_buckets, 2, 200, wrapper):
        assert seen == {((0, 1), 1)}


@BOTH
def test_a_second_wrapper_takes_over_and_the_first_reduces_nothing_more(wrapper):
    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        module, order = AnyOrder(), [0, 1, 2, 3]
        first = wrapper(module)
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))
        loss = first(x, order).sum()
        second = wrapper(module)
        loss.backward()  # announced to the first wrapper only
        local = module.layers[0].weight.grad.clone()
        module.zero_grad()
        second(x, order).sum().backward()
        return local, module.layers[0].weight.grad

    results = run_ranks(work, 2)
    average = sum(local for local, _ in results) / 2
    for local, averaged in results:
        assert not torch.equal(local, average)
        torch.testing.assert_close(averaged, average)


@BOTH
@on_ranks(2)
def test_a_profile_shows_a_range_per_phase(rank, wrapper):
    wrapped = wrapper(AnyOrder(), bucket_cap_mb=280 / 2**20)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    with torch.profiler.profile() as profile:
        for _ in range(2):
            wrapped(x, [0, 1, 2, 3]).sum().backward()
    phases = {"copy_in", "launch", "wait", "copy_out", "rebuild"}
    names = {event.key for event in profile.key_averages()}
    assert {n for n in names if n.startswith("miniddp.")} == {f"miniddp.{p}" for p in phases}
