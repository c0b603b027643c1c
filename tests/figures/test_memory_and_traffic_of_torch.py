"""Bytes kept and sent: against ZeRO's published numbers, and against what torch really holds."""

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from figures.memory_and_traffic import (
    STRATEGIES,
    TrainingJob,
    memory,
    scattered_bytes,
    traffic,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from labkit.profiling.cost_model import least_bytes
from miniddp.collectives import ring_all_reduce

GB = 10**9
ZERO = TrainingJob(7_500_000_000, ranks=64, precision="bf16", optimizer="adam", bucket_views=True)


@pytest.mark.parametrize(
    ("strategy", "gigabytes"), [("ddp", 120), ("zero1", 31.4), ("zero2", 16.6), ("fsdp", 1.88)]
)
def test_memory_is_that_of_the_zero_papers_first_figure(strategy, gigabytes):
    assert memory(ZERO, strategy).total / GB == pytest.approx(gigabytes, abs=0.05)


def test_traffic_is_that_of_the_zero_papers_section_on_communication():
    # In units of the weights' bytes, and for many ranks: 2, 2, 2, and one and a half times as many.
    many = replace(ZERO, ranks=10**6)
    sent = [traffic(many, name).total / many.weights for name in STRATEGIES[:4]]
    assert sent == pytest.approx([2, 2, 2, 3], rel=1e-5)


JOBS = st.builds(
    lambda groups, shard_ranks, **given: TrainingJob(
        ranks=groups * shard_ranks, shard_ranks=shard_ranks, **given
    ),
    groups=st.integers(1, 64),
    shard_ranks=st.integers(1, 64),
    parameters=st.integers(1, 10**12),
    precision=st.sampled_from(["fp32", "bf16"]),
    optimizer=st.sampled_from(["sgd", "momentum", "adam"]),
    bucket_views=st.booleans(),
    free_weights=st.booleans(),
    every=st.integers(1, 500),
)


@given(JOBS)
def test_one_rank_sends_nothing_and_keeps_everything_once(job):
    alone = replace(job, ranks=1, shard_ranks=1, bucket_views=True, free_weights=True)
    whole = 2 * alone.weights + alone.master + alone.optimizer_state
    for strategy in STRATEGIES:
        assert traffic(alone, strategy).total == 0
        assert memory(alone, strategy).total == whole


@given(JOBS)
def test_each_stage_keeps_no_more_than_the_one_before_and_none_sends_less_than_ddp(job):
    job = replace(job, free_weights=True)
    kept = [memory(job, name).total for name in ("ddp", "zero1", "zero2", "fsdp")]
    assert kept == sorted(kept, reverse=True)
    least = least_bytes(job.ranks, job.weights)
    assert traffic(job, "ddp").total == pytest.approx(least)
    for strategy in ("zero1", "zero2", "fsdp"):
        assert traffic(job, strategy).total >= least * (1 - 1e-12)


@given(JOBS)
def test_one_shard_group_of_all_ranks_is_fsdp_and_groups_of_one_are_ddp(job):
    one_group = replace(job, shard_ranks=job.ranks)
    assert memory(one_group, "hsdp") == memory(job, "fsdp")
    assert traffic(one_group, "hsdp") == traffic(job, "fsdp")
    alone = replace(job, shard_ranks=1, bucket_views=True, free_weights=True)
    assert memory(alone, "hsdp") == memory(alone, "ddp")
    assert traffic(alone, "hsdp").across == pytest.approx(traffic(alone, "ddp").total)


@given(JOBS)
def test_local_updates_send_the_fp32_weights_once_in_so_many_steps(job):
    sent = traffic(job, "local").total * job.every
    assert sent == pytest.approx(least_bytes(job.ranks, 4 * job.parameters))
    assert memory(job, "local") == memory(replace(job, bucket_views=True), "ddp")


# What torch holds and sends: 288 float32 parameters, which 2, 3, and 4 ranks share evenly.

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
}


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(11, 12), nn.Tanh(), nn.Linear(12, 12, bias=False))


def held(tensors: list[Tensor]) -> int:
    """The bytes of all distinct storages; of a DTensor, of its local shard."""
    local = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Momentum or moments; Adam's step counters, a number per parameter, are left out."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, Tensor) and value.dim()]


def ddp_bytes(rank: int, world_size: int, name: str, views: bool) -> dict[str, int]:
    """What one rank keeps and sends in its third step under torch's DDP, over our ring."""
    module = small_model()
    wrapper = DistributedDataParallel(module, gradient_as_bucket_view=views)
    optimizer = OPTIMIZERS[name](module.parameters())
    buffers: list[Tensor] = []
    sent = 0
    pass_on = dist.batch_isend_irecv

    def count(messages: list[dist.P2POp]) -> list[dist.Work]:
        nonlocal sent
        sent += sum(one.tensor.nbytes for one in messages if one.op is dist.isend)
        return pass_on(messages)

    def hook(state, bucket):  # torch wants no annotations here, or its own
        buffers.append(bucket.buffer())
        ring_all_reduce(bucket.buffer().div_(world_size))
        done: Future[Tensor] = Future()
        done.set_result(bucket.buffer())
        return done

    wrapper.register_comm_hook(None, hook)
    inputs = torch.randn(5, 11, generator=torch.Generator().manual_seed(rank))
    with mock.patch.object(dist, "batch_isend_irecv", count):
        for _ in range(3):
            buffers.clear()
            sent = 0
            optimizer.zero_grad()
            wrapper(inputs).square().mean().backward()
            optimizer.step()
    parameters = list(module.parameters())
    return {
        "parameters": sum(one.numel() for one in parameters),
        "weights": held(parameters),
        "gradients and buckets": held([*buffers, *(one.grad for one in parameters)]),
        "optimizer": held(state_of(optimizer)),
        "sent": sent,
    }


@pytest.mark.parametrize(
    ("ranks", "optimizer", "views"),
    [(2, "adam", False), (3, "momentum", True), (4, "sgd", False)],
)
def test_the_row_of_ddp_is_what_torchs_ddp_keeps_and_sends(ranks, optimizer, views):
    for counted in run_ranks(ddp_bytes, ranks, optimizer, views, device="cpu"):
        job = TrainingJob(counted["parameters"], ranks, optimizer=optimizer, bucket_views=views)
        kept, sent = memory(job, "ddp"), traffic(job, "ddp")
        assert counted["weights"] == kept.weights
        assert counted["gradients and buckets"] == kept.gradients + kept.buckets
        assert counted["optimizer"] == kept.optimizer
        assert counted["sent"] == sent.total


def fsdp_bytes(
    rank: int, world_size: int, shard_ranks: int, free_weights: bool
) -> dict[str, float]:
    """What one rank keeps, and sends by its collectives, in a step of torch's `fully_shard`."""
    groups = world_size // shard_ranks
    shape = (world_size,) if groups == 1 else (groups, shard_ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    module = small_model()
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh, reshard_after_forward=free_weights)
    optimizer = OPTIMIZERS["adam"](module.parameters())
    sent: Counter[str] = Counter()

    def counting(name: str):
        launch = getattr(dist, name)

        def collective(*given: object, group: dist.ProcessGroup, **named: object) -> object:
            tensors = [one for one in (*given, *named.values()) if isinstance(one, Tensor)]
            whole = max(one.nbytes for one in tensors)
            passes = 2 if name == "all_reduce" else 1
            sent[name] += passes * scattered_bytes(whole, dist.get_world_size(group))
            return launch(*given, group=group, **named)

        return mock.patch.object(dist, name, collective)

    inputs = torch.randn(5, 11, generator=torch.Generator().manual_seed(rank))
    with (
        counting("all_gather_single"),
        counting("reduce_scatter_single"),
        counting("all_reduce"),
    ):
        loss = module(inputs).square().mean()
        # Counted now: the storages of gathered weights are emptied in backward.
        gathered = held([one for one in module.parameters() if not isinstance(one, DTensor)])
        loss.backward()
        optimizer.step()
    parameters = list(module.parameters())
    return {
        "parameters": sum(one.numel() for one in parameters),
        "weights": held(parameters) + gathered,
        "gradients": held([one.grad for one in parameters]),
        "optimizer": held(state_of(optimizer)),
        **sent,
    }


@pytest.mark.parametrize(
    ("strategy", "shard_ranks", "free_weights"),
    [("fsdp", 4, True), ("fsdp", 4, False), ("hsdp", 2, True)],
)
def test_the_rows_of_fsdp_are_what_torchs_fully_shard_keeps_and_sends(
    strategy, shard_ranks, free_weights
):
    for counted in run_ranks(fsdp_bytes, 4, shard_ranks, free_weights, device="cpu"):
        job = TrainingJob(
            int(counted["parameters"]), 4, free_weights=free_weights, shard_ranks=shard_ranks
        )
        kept, sent = memory(job, strategy), traffic(job, strategy)
        assert counted["weights"] == kept.weights
        assert counted["gradients"] == kept.gradients
        assert counted["optimizer"] == kept.optimizer
        assert counted["reduce_scatter_single"] == sent.gradients
        assert counted["all_gather_single"] == sent.weights
        assert counted.get("all_reduce", 0) == sent.across
