"""Bytes kept and sent: against ZeRO's published numbers, and against what torch really holds."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from figures.node import call
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from labkit.profiling import sent_bytes
from labkit.profiling.step_cost import held
from miniddp.collectives import ring_all_reduce

JOB = {
    "parameters": 7_500_000_000,
    "ranks": 64,
    "precision": "bf16",
    "optimizer": "adam",
    "bucketViews": True,
    "freeWeights": True,
    "shardRanks": 1,
    "every": 1,
}
# Of the same job in gigabytes: the first figure of "ZeRO: Memory Optimizations Toward Training
# Trillion Parameter Models" (2020). Sent, in units of the weights: its section 7.
OF_THE_PAPER = {"ddp": (120, 2), "zero1": (31.4, 2), "zero2": (16.6, 2), "fsdp": (1.88, 3)}


def shown(strategy: str, **changed: object) -> tuple[dict[str, float], dict[str, float]]:
    """What the figure says that each rank keeps and sends per step, in bytes."""
    case = [({**JOB, **changed}, strategy)]
    return tuple(call("memory_and_traffic", name, case)[0] for name in ("memory", "traffic"))


@pytest.mark.parametrize("strategy", OF_THE_PAPER)
def test_memory_and_traffic_are_those_of_the_zero_paper(strategy):
    gigabytes, weights = OF_THE_PAPER[strategy]
    assert shown(strategy)[0]["total"] / 10**9 == pytest.approx(gigabytes, abs=0.05)
    _, sent = shown(strategy, ranks=10**6)
    assert sent["total"] / (2 * JOB["parameters"]) == pytest.approx(weights, rel=1e-5)


@pytest.mark.parametrize(("precision", "state"), [("bf16", 120), ("fp32", 120)])
def test_local_updates_keep_what_ddp_keeps_and_send_the_fp32_weights_in_every_nth_step(
    precision, state
):
    kept, sent = shown("local", precision=precision, every=16)
    assert kept["total"] == state * 10**9
    assert sent["total"] == pytest.approx(2 * 4 * JOB["parameters"] * 63 / 64 / 16)


# What torch holds and sends: 288 float32 parameters, which 2, 3, and 4 ranks share evenly.

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
}


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(11, 12), nn.Tanh(), nn.Linear(12, 12, bias=False))


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

    def hook(state, bucket):  # torch wants no annotations here, or its own
        buffers.append(bucket.buffer())
        ring_all_reduce(bucket.buffer().div_(world_size))
        done: Future[Tensor] = Future()
        done.set_result(bucket.buffer())
        return done

    wrapper.register_comm_hook(None, hook)
    inputs = torch.randn(5, 11, generator=torch.Generator().manual_seed(rank))
    with sent_bytes.counted() as sent:
        for _ in range(3):
            buffers.clear()
            sent.clear()
            optimizer.zero_grad()
            wrapper(inputs).square().mean().backward()
            optimizer.step()
    parameters = list(module.parameters())
    return {
        "parameters": sum(one.numel() for one in parameters),
        "weights": held(parameters),
        "gradients and buckets": held([*buffers, *(one.grad for one in parameters)]),
        "optimizer": held(state_of(optimizer)),
        "sent": sent.total(),
    }


@pytest.mark.parametrize(
    ("ranks", "optimizer", "views"),
    [(2, "adam", False), (3, "momentum", True), (4, "sgd", False)],
)
def test_the_row_of_ddp_is_what_torchs_ddp_keeps_and_sends(ranks, optimizer, views):
    for counted in run_ranks(ddp_bytes, ranks, optimizer, views, device="cpu"):
        job = {"parameters": counted["parameters"], "ranks": ranks, "optimizer": optimizer}
        kept, sent = shown("ddp", **job, precision="fp32", bucketViews=views)
        assert counted["weights"] == kept["weights"]
        assert counted["gradients and buckets"] == kept["gradients"] + kept["buckets"]
        assert counted["optimizer"] == kept["optimizer"]
        assert counted["sent"] == sent["total"]


def fsdp_bytes(rank: int, world_size: int, shard_ranks: int, free_weights: bool) -> dict[str, Any]:
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
            ranks = dist.get_world_size(group)
            sent[name] += (2 if name == "all_reduce" else 1) * whole * (ranks - 1) / ranks
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
        job = {"parameters": counted["parameters"], "ranks": 4, "shardRanks": shard_ranks}
        kept, sent = shown(strategy, **job, precision="fp32", freeWeights=free_weights)
        assert counted["weights"] == kept["weights"]
        assert counted["gradients"] == kept["gradients"]
        assert counted["optimizer"] == kept["optimizer"]
        assert counted["reduce_scatter_single"] == sent["gradients"]
        assert counted["all_gather_single"] == sent["weights"]
        assert counted.get("all_reduce", 0) == sent["across"]
