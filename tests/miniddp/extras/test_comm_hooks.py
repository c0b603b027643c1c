"""Comm hooks: ours against torch's stock ones, each of them on both wrappers, bitwise."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from miniddp.extras import comm_hooks
from miniddp.torch_drop_in import DistributedDataParallel as DropIn

WRAPPERS = {"mini": DropIn, "torch": DistributedDataParallel}


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 5)
    )


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 20, generator=torch.Generator().manual_seed(100 * rank + step))


def gradients_of(wrap, rank, hook, make_state, steps=4, **settings) -> list[torch.Tensor]:
    """All gradients of each of a few steps of SGD, under `hook`."""
    wrapped = wrap(model(), bucket_cap_mb=0.005, **settings)
    if hook is not None:
        wrapped.register_comm_hook(make_state(), hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        wrapped(batch(rank, step)).pow(2).mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in wrapped.parameters()]))
        optimizer.step()
    return found


def nothing():
    return None


PAIRS = {
    "average": (comm_hooks.average, default_hooks.allreduce_hook),
    "fp16": (comm_hooks.fp16_compress, default_hooks.fp16_compress_hook),
}


def run_pairs(rank, world_size):
    found = {}
    for name, hooks in PAIRS.items():
        for views in (False, True):
            for wrapper in WRAPPERS:
                found[name, views, wrapper] = [
                    gradients_of(
                        WRAPPERS[wrapper], rank, hook, nothing, gradient_as_bucket_view=views
                    )
                    for hook in hooks
                ]
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_our_hooks_are_bitwise_equal_to_torchs_on_both_wrappers(world_size):
    for found in run_ranks(run_pairs, world_size):
        for name in PAIRS:
            (reference, _), *others = (
                found[name, views, wrapper] for views in (False, True) for wrapper in WRAPPERS
            )
            for ours, theirs in others:
                for step, expected in enumerate(reference):
                    assert torch.equal(ours[step], expected), name
                    assert torch.equal(theirs[step], expected), name


def run_bf16(rank, world_size):
    return [
        gradients_of(DropIn, rank, hook, nothing)
        for hook in (comm_hooks.bf16_compress, default_hooks.bf16_compress_hook, None)
    ]


def test_bf16_compression_equals_torchs_hook_and_stays_within_its_rounding():
    for ours, theirs, exact in run_ranks(run_bf16, 2):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        error = (ours[0] - exact[0]).norm() / exact[0].norm()
        assert 0 < error < 2**-8


class Weighted(nn.Module):
    """One complex weight; its gradient is the conjugate of what it is multiplied by."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 12, dtype=torch.complex64))

    def forward(self, factors):
        return (self.weight * factors).sum().real


def run_complex_compression(rank):
    for hook in (comm_hooks.fp16_compress, comm_hooks.bf16_compress):
        wrapped = DropIn(Weighted())
        wrapped.register_comm_hook(None, hook)
        said = "bucket 0 holds torch.complex64 gradients.*use the hook `average`"
        with pytest.raises(TypeError, match=said):
            wrapped(torch.randn(16, 12, dtype=torch.complex64)).backward()
    return "refused"


def test_compression_refuses_complex_gradients_on_every_rank():
    assert run_ranks(run_complex_compression, 2) == ["refused"] * 2


def refused(rank, world_size):
    def without_bucket(state, gradients): ...

    def with_wrong_bucket(state, bucket: int): ...

    def with_wrong_result(state, bucket) -> int: ...

    wrapped = DropIn(copy.deepcopy(model()))
    said = []
    for hook in (3, without_bucket, with_wrong_bucket, with_wrong_result):
        try:
            wrapped.register_comm_hook(None, hook)
        except (TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    wrapped.register_comm_hook(None, comm_hooks.average)
    try:
        wrapped.register_comm_hook(None, comm_hooks.average)
    except RuntimeError as error:
        said.append(str(error))
    return said


def test_what_cannot_be_a_hook_is_refused_and_so_is_a_second_one():
    for said in run_ranks(refused, 2):
        expected = [
            "must be callable",
            "must be named bucket",
            "bucket annotation",
            "return annotation",
            "only be called once",
        ]
        assert len(said) == len(expected)
        assert all(words in text for words, text in zip(expected, said, strict=True))
