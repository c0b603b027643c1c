"""A fault of one rank is raised on every rank, at once: none is left waiting for the others."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.testing.compare import gradients, largest_difference
from miniddp import MiniDDP
from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from tests.ddp_models import linear
from tests.ddp_models import rows as inputs
from tests.on_ranks import on_ranks

NO_HANG = 120  # seconds, of which ranks that agree need one


def error_of(act: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011, its text is what the test looks at
        act()
    return f"{type(caught.value).__name__}: {caught.value}"


def on_devices(*devices: str) -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2, device=device) for device in devices))


LOCAL_FAULTS: dict[str, tuple[Callable[[], MiniDDP], str]] = {
    "nothing trainable": (
        lambda: DropIn(linear().requires_grad_(False)),
        "RuntimeError: DistributedDataParallel is not needed",
    ),
    "uninitialized": (
        lambda: DropIn(nn.Sequential(linear(), nn.LazyLinear(2))),
        "RuntimeError: Modules with uninitialized parameters can't be used",
    ),
    "two kinds of devices": (
        lambda: DropIn(on_devices("cpu", "meta")),
        "ValueError: MiniDDP's input module must be on the same type of devices",
    ),
    "a cap that is negative": (
        lambda: DropIn(linear(), bucket_cap_mb=-1),
        "ValueError: bucket caps are sizes in MiB, as numbers: at least one, none of them negative",
    ),
    "a cap that is negative, on a device without a backend": (
        lambda: DropIn(nn.Linear(2, 2, device="meta"), bucket_cap_mb=-1),
        "ValueError: bucket caps are sizes in MiB, as numbers: at least one, none of them negative",
    ),
    "no module": (lambda: MiniDDP(3), "TypeError: MiniDDP wraps an nn.Module, but got 3, of type"),
    "a wrapper": (
        lambda: MiniDDP(MiniDDP(linear(), init_sync=False)),
        "TypeError: This module is a MiniDDP, which averages its gradients already",
    ),
    "torch's SyncBatchNorm on a CPU": (
        lambda: DropIn(nn.Sequential(linear(), nn.SyncBatchNorm(2))),
        "ValueError: SyncBatchNorm layers only work with GPU modules, but 1 is on the CPU",
    ),
    "half of a pair of keywords": (
        lambda: DropIn(linear(), delay_all_reduce_named_params=[("bias", None)]),
        "ValueError: delay_all_reduce_named_params and param_to_hook_all_reduce need to be set",
    ),
}


@on_ranks(3, timeout=NO_HANG)
def test_what_keeps_one_rank_from_taking_part_is_raised_on_every_rank_and_names_it(rank):
    for name, (make, said) in LOCAL_FAULTS.items():
        error = error_of(make if rank == 1 else lambda: DropIn(linear()))
        if rank == 1:
            assert error.startswith(said), name
        else:
            assert f"every rank raises. rank 1: {said}" in error, name


@on_ranks(2, timeout=NO_HANG)
def test_a_rank_that_cannot_take_part_says_so_where_the_other_ranks_tensors_are(rank):
    # As of a group whose tensors may be on the CPU or on a GPU; here, no tensor is on a GPU.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda group=None: "cpu:gloo,cuda:nccl")
        for wrap in (MiniDDP, DropIn):
            error = error_of(lambda wrap=wrap: wrap(linear().requires_grad_(rank == 0)))
            assert ("rank 1: RuntimeError: Distri", "not needed")[rank] in error


class Precisions(NamedTuple):
    buffer_dtype: torch.dtype | None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


# The value of rank 0 and of the others, and what the error says of both.
SETTINGS = {
    "find_unused_parameters": (True, False, "find_unused_parameters: True on rank 0; False on"),
    "static_graph": (True, False, "static_graph: True on rank 0; False on"),
    "strict": (False, True, "strict: False on rank 0; True on"),
    "bucket_cap_mb": (None, 25, "bucket caps in bytes: (1048576, 26214400) on rank 0; (26214400,)"),
    "bucket_cap_mb_list": ([1, 2], [2, 1], "caps in bytes: (1048576, 2097152) on rank 0; (2097152"),
    "skip_all_reduce_unused_params": (True, False, "skip_all_reduce_unused_params: True on rank 0"),
    "forward_sync_buffers": (True, False, "broadcast_buffers (or forward_sync_buffers): True on"),
    "mixed_precision": (
        Precisions(None),
        Precisions(torch.float64),
        "mixed_precision.buffer_dtype: None on rank 0; torch.float64 on",
    ),
}


@on_ranks(3, timeout=NO_HANG)
def test_a_setting_that_differs_is_named_with_its_values_and_ranks_on_every_rank(rank):
    for name, (of_rank_0, of_others, said) in SETTINGS.items():
        keywords = {name: of_others if rank else of_rank_0}
        error = error_of(lambda keywords=keywords: DropIn(linear(), **keywords))
        assert "expects same settings across all ranks" in error
        assert said in error
        assert "on rank 1, 2" in error
        assert f"Reported on rank {rank}" in error


def layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(count)))


# What a rank wraps that is on rank 1 or not, what every rank says of it, and what none says.
DIFFERENCES: dict[str, tuple[Callable[[bool], nn.Module], list[str], str]] = {
    "shape": (
        lambda odd: DropIn(nn.Linear(4, 5 if odd else 3)),
        ["weight: shape (3, 4)", "on rank 0, 2; shape (5, 4)", "on rank 1"],
        "absent",
    ),
    "count": (
        lambda odd: DropIn(layers(1 + odd)),
        ["1.weight: absent on rank 0, 2; shape (3, 3)"],
        "0.weight",
    ),
    "dtype": (
        lambda odd: DropIn(nn.Linear(4, 3, dtype=torch.float64 if odd else torch.float32)),
        ["torch.float32, trainable on rank 0, 2; ", "torch.float64, trainable on rank 1"],
        "absent",
    ),
    "parts that share a device": (
        lambda odd: MiniDDP(on_devices("cpu", "meta" if odd else "cpu")),
        [
            "1.weight: shape (2, 2), strides (2, 1), torch.float32, trainable on rank 0, 2; ",
            "trainable, on its device 1 on rank 1",
        ],
        "0.weight",
    ),
    "broadcast_buffers": (
        lambda odd: MiniDDP(nn.BatchNorm1d(3), broadcast_buffers=not odd),
        ["  broadcast_buffers: True on rank 0, 2; False on"],
        "running_mean",
    ),
    "broadcast_buffers of the drop-in": (
        lambda odd: DropIn(nn.BatchNorm1d(3), broadcast_buffers=not odd),
        ["  broadcast_buffers (or forward_sync_buffers): True on rank 0, 2; False on"],
        "running_mean",
    ),
    "a lazy layer": (
        lambda odd: MiniDDP(nn.Sequential(linear(), nn.LazyLinear(2) if odd else linear())),
        ["uninitialized parameter"],
        "absent",
    ),
    "a sparse embedding": (
        lambda odd: DropIn(nn.ModuleDict({"words": nn.Embedding(5, 3, sparse=odd)})),
        ["sparse gradients: [] on rank 0, 2; ['words.weight'] on rank 1"],
        "same model",
    ),
}


@on_ranks(3, timeout=NO_HANG)
def test_what_differs_on_one_rank_is_named_on_every_rank_and_nothing_else_is(rank):
    for make, said, unsaid in DIFFERENCES.values():
        error = error_of(lambda make=make: make(rank == 1))
        assert all(text in error for text in said), error
        assert unsaid not in error


@on_ranks(2, timeout=NO_HANG)
def test_strict_says_a_backward_past_the_wrapper_of_one_rank_on_every_rank_and_then_goes_on(rank):
    ddp, plain = DropIn(linear(), strict=True), DropIn(linear())
    ddp(inputs(rank)).sum().backward()
    if rank == 1:
        ddp.module(inputs(rank)).sum().backward()
    ddp.zero_grad()
    error = error_of(lambda: ddp(inputs(rank, 1)).square().mean().backward())
    assert error.startswith("RuntimeError: On rank 1 a backward ran")
    ddp.zero_grad()
    for each in (ddp, plain):
        each(inputs(rank, 2)).square().mean().backward()
    assert largest_difference(gradients(ddp), gradients(plain)) == 0


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        return self.left(x), self.right(x)


@on_ranks(2, timeout=NO_HANG)
def test_a_static_graph_refuses_a_part_that_its_first_iteration_did_not_have(rank):
    ddp = DropIn(TwoHeads(), static_graph=True)
    for step in range(2):
        ddp.zero_grad()
        left, right = ddp(inputs(rank, step))
        left.sum().backward()
    error = error_of(right.sum().backward)
    assert "Your training graph has changed in this iteration" in error
    assert "The parameter is right." in error


@on_ranks(2, timeout=NO_HANG)
def test_an_interrupted_first_backward_teaches_a_static_graph_nothing(rank):
    def interrupt(gradient):
        raise ValueError("interrupted")

    ddp, plain = DropIn(TwoHeads(), static_graph=True), DropIn(TwoHeads())
    left, right = ddp(inputs(rank))
    left.register_hook(interrupt)  # backward has come by the other, younger head before
    assert "interrupted" in error_of((left.sum() + right.sum()).backward)
    heads = ddp.module
    assert (heads.right.weight.grad is None, heads.left.weight.grad) == (False, None)
    for wrapped, steps in ((ddp, range(3)), (plain, [2])):
        for step in steps:
            wrapped.zero_grad()
            sum(output.square().sum() for output in wrapped(inputs(rank, step))).backward()
    assert largest_difference(gradients(ddp), gradients(plain)) == 0


@on_ranks(2, timeout=NO_HANG)
def test_a_pass_of_autograd_grad_is_no_training_backward(rank):
    settings = ({}, {"strict": True}, {"static_graph": True})
    wrapped = [DropIn(linear(), **keywords) for keywords in settings]
    for step in range(3):
        for each in wrapped:
            each.zero_grad()
            x = inputs(rank, step).requires_grad_()
            output = each(x).square().sum()
            (slope,) = torch.autograd.grad(output, x, create_graph=True)
            (output + slope.square().sum()).backward()
        plain, *others = map(gradients, wrapped)
        assert [largest_difference(other, plain) for other in others] == [0, 0]
