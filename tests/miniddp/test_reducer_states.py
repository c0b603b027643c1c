"""The reducer's states: the documented table is the one in force, and it is followed."""

import gc
import itertools
import re
import sys
import threading
import weakref
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.launch import run_ranks
from miniddp import MiniDDP, reducer
from miniddp.reducer import FINALIZING, IDLE, LOCAL, READY, REDUCING, Reducer, ReducerState
from miniddp.torch_drop_in import DistributedDataParallel

TABLE = re.compile(r"^`([A-Z]+)` .*?  ([A-Z]+(?:, [A-Z]+)*)$", re.MULTILINE)


def test_the_table_in_the_docstring_is_the_one_that_the_code_follows():
    documented = {
        name: set(following.split(", ")) for name, following in TABLE.findall(reducer.__doc__)
    }
    in_force = {
        state.name: {n.name for n in following} for state, following in reducer._NEXT.items()
    }
    assert documented == in_force


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def every_transition(rank: int) -> list[tuple[str, str, bool]]:
    """Which transitions a reducer accepts."""
    averager = MiniDDP(model()).reducer
    accepted = []
    for before, after in itertools.product(ReducerState, repeat=2):
        averager.state = before
        legal = after in reducer._NEXT[before]
        expected = (
            nullcontext()
            if legal
            else pytest.raises(RuntimeError, match=f"{before.name}.*{after.name}")
        )
        with expected:
            averager.enter(after)
        accepted.append((before.name, after.name, averager.state is after and before is not after))
    return accepted


def test_any_other_transition_raises_and_names_both_states():
    for accepted in run_ranks(every_transition, 2):
        for before, after, changed in accepted:
            legal = ReducerState[after] in reducer._NEXT[ReducerState[before]]
            assert changed == (legal and before != after)


def states_of_a_window(rank: int) -> list[str]:
    wrapped = MiniDDP(model())
    seen = [wrapped.reducer.state]
    wrapped.module[0].weight.register_post_accumulate_grad_hook(
        lambda _: seen.append(wrapped.reducer.state)
    )
    torch.manual_seed(rank)
    with wrapped.no_sync():
        loss = wrapped(torch.randn(3, 6)).sum()
        seen.append(wrapped.reducer.state)
        loss.backward()
    loss = wrapped(torch.randn(3, 6)).sum()
    seen.append(wrapped.reducer.state)
    loss.backward()
    seen.append(wrapped.reducer.state)
    with torch.no_grad():
        wrapped(torch.randn(3, 6))
    seen.append(wrapped.reducer.state)
    wrapped.module(torch.randn(3, 6)).sum().backward()
    return [state.name for state in seen], wrapped.reducer.unsynchronized


def test_an_accumulation_window_walks_through_the_states():
    for seen, unsynchronized in run_ranks(states_of_a_window, 2):
        assert [ReducerState[name] for name in seen] == [
            IDLE,
            LOCAL,
            LOCAL,  # while the local backward runs
            READY,
            REDUCING,  # the last layer's gradients have come before the first layer's
            IDLE,
            IDLE,  # a forward without gradients announces nothing
            IDLE,  # nor does one through .module, whose gradients stay local
        ]
        assert unsynchronized
    assert FINALIZING in reducer._NEXT[REDUCING]


def an_exception_after_the_last_launch(rank: int) -> str:
    wrapped = MiniDDP(model())
    torch.manual_seed(rank)
    x = torch.randn(3, 6, requires_grad=True) * 2

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("of the user")

    x.register_hook(fail)
    with pytest.raises(ValueError, match="of the user"):
        wrapped(x).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction") as caught:
        wrapped(torch.randn(3, 6))
    return str(caught.value)


def test_a_backward_that_failed_after_its_last_gradient_is_not_blamed_on_unused_parameters():
    for said in run_ranks(an_exception_after_the_last_launch, 2):
        assert "That backward raised an exception after its last gradient." in said
        assert "not used in producing" not in said


class CountingLock:
    """A lock that counts how often it was taken, and knows whether it is held."""

    def __init__(self) -> None:
        self.taken = self.depth = 0

    def __enter__(self) -> None:
        self.taken, self.depth = self.taken + 1, self.depth + 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


def gradients_under_the_lock(rank: int, lock_free: bool) -> tuple[int, bool]:
    wrapped = MiniDDP(model(), bucket_cap_mb=0)
    averager = wrapped.reducer
    averager.lock_free = lock_free
    averager.lock = lock = CountingLock()
    always = []
    all_reduce = averager.all_reduce_bucket

    def launch(bucket: object) -> None:
        always.append(lock.depth > 0)
        all_reduce(bucket)

    averager.all_reduce_bucket = launch
    for step in range(2):
        torch.manual_seed(10 * rank + step)
        wrapped(torch.randn(3, 6)).sum().backward()
    return lock.taken, all(always)


def test_where_threads_may_meet_every_gradient_is_counted_and_launched_under_the_lock():
    # In each of two backwards: four gradients, and the end.
    assert run_ranks(gradients_under_the_lock, 2, False) == [(10, True)] * 2


def test_in_one_thread_only_the_first_gradient_and_the_end_take_the_lock():
    assert run_ranks(gradients_under_the_lock, 2, True) == [(4, False)] * 2


def who_takes_no_lock(rank: int) -> dict[str, bool]:
    elsewhere = [nn.Parameter(torch.empty(2, device="meta"))]
    of_rpc = DistributedDataParallel(model())
    with mock.patch.object(of_rpc.reducer, "_find_rpc_context", return_value=7):
        of_rpc(torch.randn(3, 6))
    in_rpc = of_rpc.reducer.lock_free
    of_rpc(torch.randn(3, 6))
    return {
        "CPU": MiniDDP(model()).reducer.lock_free,
        "another device": Reducer(elsewhere, ["p"], dist.group.WORLD, caps=(1,)).lock_free,
        "search": MiniDDP(model(), find_unused_parameters=True).reducer.lock_free,
        "static graph": DistributedDataParallel(model(), static_graph=True).reducer.lock_free,
        "distributed autograd": in_rpc,
        "drop-in": of_rpc.reducer.lock_free,
    }


def test_hooks_take_no_lock_only_where_one_thread_runs_them_all_and_nothing_else_is_to_do():
    for found in run_ranks(who_takes_no_lock, 2):
        assert [name for name, lock_free in found.items() if lock_free] == ["CPU", "drop-in"]


def two_threads_fill_two_buckets(rank: int, repeats: int) -> set[tuple[tuple[int, ...], int]]:
    """As on two devices: each thread counts the gradients of its own bucket, all at once."""
    wide = nn.ParameterList(nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(9))
    narrow = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(9))
    averager = MiniDDP(nn.ModuleList([wide, narrow]), init_sync=False).reducer
    averager.lock_free = False
    seen: set[tuple[tuple[int, ...], int]] = set()
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


def test_two_threads_launch_each_bucket_once_in_order_and_end_the_backward_once():
    for seen in run_ranks(two_threads_fill_two_buckets, 2, 200):
        assert seen == {((0, 1), 1)}


def hooks_after_the_wrapper_is_gone(rank: int) -> tuple[int, bool]:
    module = model()
    wrapped = DistributedDataParallel(
        module,
        delay_all_reduce_named_params=[("2.bias", module[2].bias)],
        param_to_hook_all_reduce=module[0].weight,
    )
    torch.manual_seed(rank)
    wrapped(torch.randn(3, 6)).sum().backward()
    seen = weakref.ref(wrapped)
    del wrapped
    gc.collect()
    return len(module[0].weight._backward_hooks or ()), seen() is None


def test_the_hook_of_delayed_parameters_goes_with_its_wrapper():
    assert run_ranks(hooks_after_the_wrapper_is_gone, 2) == [(0, True)] * 2


@pytest.mark.parametrize("wrapper", [MiniDDP, DistributedDataParallel])
def test_a_second_wrapper_takes_over_and_the_first_reduces_nothing_more(wrapper):
    def work(rank: int) -> tuple[str, torch.Tensor, torch.Tensor]:
        module = model()
        first = wrapper(module)
        torch.manual_seed(rank)
        x = torch.randn(3, 6)
        loss = first(x).sum()
        second = wrapper(module)
        loss.backward()  # announced to the first wrapper only
        state = first.reducer.state.name
        local = module[0].weight.grad.clone()
        module.zero_grad()
        second(x).sum().backward()
        return state, local, module[0].weight.grad

    results = run_ranks(work, 2)
    average = sum(local for _, local, _ in results) / 2
    for state, local, averaged in results:
        assert state == "IDLE"
        assert not torch.equal(local, average)
        torch.testing.assert_close(averaged, average)
