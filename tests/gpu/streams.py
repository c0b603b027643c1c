"""Streams and memory on a GPU: no gradient is sent, or handed out, before it is computed.

*Order.* Two layers, and each has its gradient accumulated on a stream of its own; one stream first
sleeps for about a tenth of a second. The other gradient fills the bucket at once. Whatever is sent
without a wait for the sleeping stream is not the gradient. The test is then run again with
`torch.cuda.Stream.wait_stream` without effect during backward: it has to find wrong gradients, or
it shows nothing.

*Side stream.* Forward, backward and what reads the gradients run on a stream other than the
default one, while that one is kept busy.

*Memory.* The allocator's bytes after a step and its peaks, beside torch's wrappers.

On a CPU, `tests/miniddp/test_streams.py` finds a missing wait on simulated streams.
"""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.nn.parallel import DistributedDataParallel

from miniddp import MiniDDP
from miniddp.extras.comm_hooks import average
from miniddp.sharded import fully_shard
from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from tests.miniddp.beside_torch import mesh_of, shard

from . import CannotProveError, Evidence, Machine, deterministic

WIDTH, WIDE, LAYERS, STEPS = 64, 1024, 24, 4
CYCLES = 200_000_000
CONTROL = ": without the wait, some have to be wrong"


class Slow(torch.autograd.Function):
    """The identity, whose backward first keeps its stream busy for CYCLES."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        torch.cuda._sleep(CYCLES)  # there is no public kernel that only takes time
        return gradient.clone()


class TwoStreams(nn.Module):
    """Two layers without bias; the second one runs, and has its gradient, on another stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False, device=device)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False, device=device)
        self.side = torch.cuda.Stream(device)
        with torch.cuda.stream(self.side):
            # A gradient is accumulated on the stream on which its accumulator was made. Kept here,
            # it is the one that a wrapper finds; otherwise the wrapper makes all on one stream.
            self.accumulator = get_gradient_edge(self.second.weight).node

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        main = torch.cuda.current_stream(x.device)
        first = self.first(x)
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            second = Slow.apply(self.second(x))
        main.wait_stream(self.side)
        return first, second


def drawn(rank: int, rows: int, width: int, device: torch.device, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(rows, width, generator=generator).to(device)


def average_of(x: Tensor) -> Tensor:
    """What both weights' gradients have to be, on every rank, for the sum of all outputs."""
    total = x.sum(0)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).expand(WIDTH, WIDTH)


def wrong_gradients(rank: int, device: torch.device, views: bool, waits: bool) -> int:
    """On each rank: how many of 2 * STEPS gradients are wrong; without `waits`, if none is made."""
    torch.manual_seed(0)
    wrapped = DropIn(TwoStreams(device), gradient_as_bucket_view=views)
    no_wait = mock.patch.object(torch.cuda.Stream, "wait_stream")
    wrong = 0
    for step in range(STEPS):
        x = drawn(rank, 8, WIDTH, device, step)
        wanted = average_of(x)
        wrapped.zero_grad()
        torch.cuda.synchronize(device)
        first, second = wrapped(x)
        with nullcontext() if waits else no_wait:
            (first.sum() + second.sum()).backward()
        torch.cuda.synchronize(device)
        for parameter in wrapped.parameters():
            wrong += not torch.allclose(parameter.grad, wanted, rtol=1e-4, atol=1e-4)
    return wrong


def wrong_steps(model: nn.Module, x: Tensor) -> int:
    """How many of STEPS steps on a side stream return other bits than one on the default stream."""

    def step() -> list[Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    step()  # from the second on, buckets are packed anew and gathers are prefetched
    wanted = step()
    torch.cuda.synchronize(x.device)
    side, wrong = torch.cuda.Stream(x.device), 0
    for _ in range(STEPS):
        side.wait_stream(torch.cuda.current_stream(x.device))
        torch.cuda._sleep(CYCLES)
        with torch.cuda.stream(side):
            found = step()
        torch.cuda.synchronize(x.device)
        wrong += not all(map(torch.equal, found, wanted))
    return wrong


def layers(count: int, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(count)]).to(device)


def sharded(how: Callable[..., Any], module: nn.Module) -> nn.Module:
    """Each layer in a group of its own."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    mesh = mesh_of(next(module.parameters()).device, dist.get_world_size())
    return shard(module, "", how, mesh=mesh)


def in_order(rank: int, world_size: int, device: torch.device) -> dict[str, int]:
    """On each rank, by case: wrong gradients of *order*, and wrong steps of *side stream*."""
    deterministic(device)
    found, x = {}, drawn(rank, 32, WIDE, device)
    for views in (False, True):
        name = "stream order" + (", views" if views else "")
        found[name] = wrong_gradients(rank, device, views, waits=True)
        if world_size > 1:
            found[name + CONTROL] = wrong_gradients(rank, device, views, waits=False)
    for hooked in (False, True):
        wrapped = DropIn(layers(6, device), bucket_cap_mb=WIDE * WIDE * 4 / 2**20)
        if hooked:
            wrapped.register_comm_hook(None, average)
        name = "a step on a side stream" + (", comm hook" if hooked else "")
        found[name] = wrong_steps(wrapped, x)
    if world_size == 2:
        found["fully_shard on a side stream"] = wrong_steps(
            sharded(fully_shard, layers(6, device)), x
        )
    return found


def find(machine: Machine) -> Iterator[Evidence]:
    if machine.kind == "cpu":
        raise CannotProveError("a CPU has no streams")
    for ranks in machine.worlds():
        of_ranks = machine.run(ranks, in_order)
        for name in of_ranks[0]:
            wrong = sum(found[name] for found in of_ranks)
            holds = wrong > 0 if name.endswith(CONTROL) else wrong == 0
            yield Evidence(name, machine.on(ranks), holds, f"{wrong} wrong")


# Memory -------------------------------------------------------------------------------------------

WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "MiniDDP": (MiniDDP, DistributedDataParallel),
    "MiniDDP, views": tuple(
        partial(wrap, gradient_as_bucket_view=True) for wrap in (MiniDDP, DistributedDataParallel)
    ),
    "fully_shard": tuple(partial(sharded, how) for how in (fully_shard, torchs_fully_shard)),
}
"""Ours, and torch's."""


def memory(rank: int, device: torch.device, make: Callable[..., Any]) -> list[float]:
    """On each rank: bytes of the allocator, divided by those of all parameters.

    After a step; the peak of the step that rebuilds the buckets; that of a later step. All that the
    wrapper, its module, and Adam hold is counted.
    """
    x = drawn(rank, 1, WIDE, device)
    layers(1, device)(x).sum().backward()  # cuBLAS takes its workspace at the first product
    gc.collect()
    before, peaks = torch.cuda.memory_allocated(device), []
    wrapped = make(layers(LAYERS, device))
    optimizer = torch.optim.Adam(wrapped.parameters(), foreach=False)
    for _ in range(4):
        optimizer.zero_grad()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        wrapped(x).square().mean().backward()
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated(device))
        optimizer.step()
    moments = (torch.cuda.memory_allocated(device), peaks[1], peaks[-1])
    return [(moment - before) / (4 * WIDE * WIDE * LAYERS) for moment in moments]


def find_memory(machine: Machine) -> Iterator[Evidence]:
    if machine.kind == "cpu":
        raise CannotProveError("a CPU has no allocator that counts")
    for ranks in machine.worlds():
        for name, ways in WAYS.items():
            # Of each moment, the rank that holds the most.
            ours, torchs = (
                list(map(max, zip(*machine.run(ranks, memory, way), strict=True))) for way in ways
            )
            # The allocator rounds up; a layer is 0.04 of the parameters.
            holds = all(a <= b + 0.04 for a, b in zip(ours, torchs, strict=True))
            numbers = " ".join(f"{a:.2f}/{b:.2f}" for a, b in zip(ours, torchs, strict=True))
            said = f"after a step, rebuild's peak, later peak, ours/torch's: {numbers} × parameters"
            yield Evidence(f"memory of {name}", machine.on(ranks), holds, said)
