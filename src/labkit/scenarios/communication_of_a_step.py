"""How many all-reduces a step makes, and how many of them start before backward has ended."""

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from labkit.testing.compare import gradients

WorkingFix = Literal["all-reduce", "wrapper", "prepared"]


class Communication(NamedTuple):
    """The all-reduces of one step, those before its last gradient, its forwards, its gradients."""

    all_reduces: int
    during_backward: int
    forwards: int
    gradients: list[Tensor]


def four_layers() -> nn.Module:
    """Four `Linear(32, 32)`, with the same weights at each call."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))


def one_step(rank: int, x: Tensor, y: Tensor, fix: WorkingFix) -> Communication:
    """One rank's second step on 8 rows of x and y, each (8 W, 32). For `run_ranks`.

    fix: "all-reduce" after backward; the loss through the "wrapper"; "prepared", a call of
    the wrapper that only prepares its reducer, and the loss on the module.
    """
    module = four_layers()
    # Small buckets, so that a small model has several: about one per layer.
    wrapper = DistributedDataParallel(module, bucket_cap_mb=0.004)
    events: list[str] = []

    def noted_all_reduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        events.append("all-reduce")
        return allreduce_hook(state, bucket)

    wrapper.register_comm_hook(None, noted_all_reduce)
    module.register_forward_hook(lambda *_: events.append("forward"))
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))

    mine = slice(rank * 8, rank * 8 + 8)
    for _ in range(2):  # DDP rebuilds its buckets after the first step
        module.zero_grad()
        events.clear()
        if fix == "prepared":
            wrapper(x[mine])
        forward = wrapper if fix == "wrapper" else module
        F.mse_loss(forward(x[mine]), y[mine]).backward()
        if fix == "all-reduce":
            for parameter in module.parameters():
                events.append("all-reduce")
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    after = events[::-1].index("gradient")
    all_reduces = events.count("all-reduce")
    return Communication(
        all_reduces, all_reduces - after, events.count("forward"), gradients(module)
    )
