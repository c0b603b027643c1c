"""What goes wrong around a wrapper: errors on every rank, no hang, and the next step is right."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.compare import gradients, largest_difference
from labkit.ranks import run_ranks
from miniddp import MiniDDP
from miniddp.ladder import RUNGS, Flat
from miniddp.losses import global_mean
from miniddp.manual import average_gradients
from miniddp.sync_batch_norm import SyncBatchNorm


def linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(3, 2)


def inputs(rank: int) -> torch.Tensor:
    return torch.full((2, 3), float(rank + 1))


def test_a_rung_built_on_a_module_that_has_one_already_averages_alone():
    def work(rank):
        found = []
        for first in RUNGS:
            for second in RUNGS:
                module = linear()
                first(module).finish()
                rung = second(module)
                rung(inputs(rank)).sum().backward()
                rung.finish()
                found.append(gradients(module))
        return found

    results = run_ranks(work, 2)
    single = linear()
    single(torch.cat([inputs(0), inputs(1)])).sum().div(2).backward()
    for found in results:
        for g in found:
            assert largest_difference(g, gradients(single)) == 0


def test_a_backward_may_be_armed_after_its_forward_as_libraries_do_it():
    def work(rank):
        found = []
        for wrap in (MiniDDP, DistributedDataParallel):
            ddp = wrap(linear())
            for _ in range(3):
                ddp.zero_grad()
                with ddp.no_sync():
                    output = ddp(inputs(rank))
                ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
                ddp.reducer.prepare_for_forward()
                ddp.reducer.prepare_for_backward([])
                output.sum().backward()
            found.append(gradients(ddp))
        return found

    results = run_ranks(work, 2)
    for ours, torchs in results:
        assert largest_difference(ours, torchs) == 0
        assert largest_difference(ours, results[0][0]) == 0


def test_after_a_comm_hooks_future_has_failed_the_next_step_is_right():
    def work(rank):
        failing = [True]

        def hook(state, bucket):
            def then(future):
                if failing[0]:
                    raise ValueError("the hook's future fails")
                return future.value()[0]

            summed = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
            return summed.get_future().then(then)

        ddp = MiniDDP(linear())
        ddp.register_comm_hook(None, hook)
        with pytest.raises(Exception, match="the hook's future fails"):
            ddp(inputs(rank)).sum().backward()
        failing[0] = False
        ddp.zero_grad()
        ddp(inputs(rank)).sum().backward()
        reference = DistributedDataParallel(linear())
        reference(inputs(rank)).sum().backward()
        return largest_difference(gradients(ddp), gradients(reference))

    assert run_ranks(work, 2) == [0.0, 0.0]


def test_a_rank_outside_of_the_group_is_told_so_and_its_gradients_stay():
    def work(rank):
        group = dist.new_group([0])
        module = linear()
        module(inputs(rank)).sum().backward()
        before = gradients(module)
        calls = [
            lambda: average_gradients(module, group=group),
            lambda: average_gradients(module, flat=True, group=group),
            lambda: global_mean(module(inputs(rank)).sum(), 2, group),
            lambda: SyncBatchNorm(3, process_group=group)(inputs(rank)),
            lambda: Flat(module, group),
            lambda: MiniDDP(copy.deepcopy(module), process_group=group),
        ]
        said = []
        for call in calls:
            if rank == 0:
                call()
                said.append("")
            else:
                with pytest.raises(ValueError, match="not in the group: call on its members only"):
                    call()
                said.append("refused")
        return said, largest_difference(gradients(module), before)

    (_, unchanged), (said, untouched) = run_ranks(work, 2)
    assert said == ["refused"] * 6
    assert unchanged == untouched == 0


def test_an_expanded_buffer_is_refused_on_every_rank():
    def work(rank):
        module = linear()
        module.register_buffer("mask", torch.full((1, 3), float(rank)).expand(4, 3))
        with pytest.raises(ValueError, match=r"shape \(4, 3\) is expanded.*clone\(\)"):
            MiniDDP(module)
        return rank

    assert run_ranks(work, 2, timeout=20) == [0, 1]


def test_without_a_process_group_the_error_is_torchs():
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        MiniDDP(linear())
