"""Comm hooks: ours against torch's stock ones, each of them on both wrappers, bitwise."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from miniddp.extras import comm_hooks
from miniddp.torch_drop_in import DistributedDataParallel as DropIn


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


@pytest.mark.parametrize("world_size", [2, 3])
def test_our_hooks_are_bitwise_equal_to_torchs_on_both_wrappers(world_size):
    def work(rank):
        for hooks in PAIRS.values():
            reference = gradients_of(DistributedDataParallel, rank, hooks[1], nothing)
            for wrap, hook, views in product(
                (DropIn, DistributedDataParallel), hooks, (False, True)
            ):
                found = gradients_of(wrap, rank, hook, nothing, gradient_as_bucket_view=views)
                assert all(map(torch.equal, found, reference)), (wrap, hook, views)

    run_ranks(work, world_size)


def test_bf16_compression_equals_torchs_hook_and_stays_within_its_rounding():
    def work(rank):
        hooks = comm_hooks.bf16_compress, default_hooks.bf16_compress_hook, None
        ours, theirs, exact = (gradients_of(DropIn, rank, hook, nothing) for hook in hooks)
        assert all(map(torch.equal, ours, theirs))
        assert 0 < (ours[0] - exact[0]).norm() / exact[0].norm() < 2**-8

    run_ranks(work, 2)


class Weighted(nn.Module):
    """One complex weight; its gradient is the conjugate of what it is multiplied by."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 12, dtype=torch.complex64))

    def forward(self, factors):
        return (self.weight * factors).sum().real


def test_compression_refuses_complex_gradients_on_every_rank():
    def work():
        for hook in (comm_hooks.fp16_compress, comm_hooks.bf16_compress):
            wrapped = DropIn(Weighted())
            wrapped.register_comm_hook(None, hook)
            said = "bucket 0 holds torch.complex64 gradients.*use the hook `average`"
            with pytest.raises(TypeError, match=said):
                wrapped(torch.randn(16, 12, dtype=torch.complex64)).backward()

    run_ranks(work, 2)


def test_what_cannot_be_a_hook_is_refused_and_so_is_a_second_one():
    def without_bucket(state, gradients): ...

    def with_wrong_bucket(state, bucket: int): ...

    def with_wrong_result(state, bucket) -> int: ...

    def work():
        wrapped = DropIn(model())
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

    run_ranks(work, 2)
