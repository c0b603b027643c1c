"""Streams and threads on a GPU: no gradient is sent, or handed out, before it is computed.

*Order.* Two layers, and each has its gradient accumulated on a stream of its own; one stream first
sleeps for about a tenth of a second. The other gradient fills the bucket at once. Whatever is sent
without a wait for the sleeping stream is not the gradient. The test is then run again with
`torch.cuda.Stream.wait_stream` without effect during backward: it has to find wrong gradients, or
it shows nothing.

*Side stream.* Forward, backward and what reads the gradients run on a stream other than the
default one, while that one is kept busy.

*Thread.* Autograd calls hooks in a thread of its own for each GPU. The gradients have to be right
when `backward()` returns, also to a thread that is not the main one.

On a CPU, `tests/miniddp/test_streams.py` finds a missing wait on simulated streams.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from miniddp.extras.comm_hooks import average
from miniddp.torch_drop_in import DistributedDataParallel as DropIn

from .machine import Evidence, Machine

WIDTH, WIDE, STEPS = 64, 1024, 4
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


def average_of(x: Tensor) -> Tensor:
    """What both weights' gradients have to be, on every rank, for the sum of all outputs."""
    total = x.sum(0)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).expand(WIDTH, WIDTH)


def wrong_gradients(rank: int, device: torch.device, views: bool, waits: bool) -> int:
    """On each rank: how many of 2 * STEPS gradients are wrong; without `waits`, if none is made."""
    torch.manual_seed(0)
    wrapped = DropIn(TwoStreams(device), gradient_as_bucket_view=views)
    wrong = 0
    for step in range(STEPS):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        x = x.to(device)
        wanted = average_of(x)
        wrapped.zero_grad()
        torch.cuda.synchronize(device)
        first, second = wrapped(x)
        with ExitStack() as stack:
            if not waits:
                stack.enter_context(mock.patch.object(torch.cuda.Stream, "wait_stream"))
            (first.sum() + second.sum()).backward()
        torch.cuda.synchronize(device)
        for parameter in wrapped.parameters():
            wrong += not torch.allclose(parameter.grad, wanted, rtol=1e-4, atol=1e-4)
    return wrong


def on_a_side_stream(rank: int, device: torch.device, hooked: bool) -> int:
    """On each rank: how often gradients, read on the stream of the step, were not the average."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(6)]).to(device)
    wrapped = DropIn(layers, bucket_cap_mb=WIDE * WIDE * 4 / 2**20)
    if hooked:
        wrapped.register_comm_hook(None, average)
    x = torch.randn(32, WIDE, generator=torch.Generator().manual_seed(rank)).to(device)

    def step() -> list[Tensor]:
        wrapped.zero_grad()
        wrapped(x).sum().backward()
        return [parameter.grad.clone() for parameter in wrapped.parameters()]

    return wrong_steps(step, device)


def wrong_steps(step: Callable[[], list[Tensor]], device: torch.device) -> int:
    """How many of STEPS steps on a side stream return other bits than one on the default stream."""
    step()  # from the second on, buckets are packed anew and gathers are prefetched
    wanted = step()
    torch.cuda.synchronize(device)
    side, wrong = torch.cuda.Stream(device), 0
    for _ in range(STEPS):
        side.wait_stream(torch.cuda.current_stream(device))
        torch.cuda._sleep(CYCLES)
        with torch.cuda.stream(side):
            found = step()
        torch.cuda.synchronize(device)
        wrong += not all(map(torch.equal, found, wanted))
    return wrong


def in_a_thread(rank: int, device: torch.device) -> tuple[bool, bool]:
    """On each rank: whether hooks ran in another thread than backward; whether all was right."""
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH, bias=False).to(device)
    wrapped = DropIn(layer)
    threads: set[int] = set()
    layer.weight.register_post_accumulate_grad_hook(
        lambda parameter: threads.add(threading.get_native_id())
    )
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank)).to(device)
    wanted, right, callers = average_of(x), [], set()

    def steps() -> None:
        callers.add(threading.get_native_id())
        for _ in range(STEPS):
            wrapped.zero_grad()
            wrapped(x).sum().backward()
            right.append(torch.allclose(layer.weight.grad, wanted, rtol=1e-4, atol=1e-4))

    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
    steps()
    return not (threads & callers), all(right) and len(right) == 2 * STEPS


def in_order(rank: int, world_size: int, device: torch.device) -> dict[str, int]:
    """On each rank, by case: wrong gradients of *order*, and wrong steps of *side stream*."""
    found = {}
    for views in (False, True):
        name = "stream order" + (", views" if views else "")
        found[name] = wrong_gradients(rank, device, views, waits=True)
        if world_size > 1:
            found[name + CONTROL] = wrong_gradients(rank, device, views, waits=False)
    for hooked in (False, True):
        name = "a step on a side stream" + (", comm hook" if hooked else "")
        found[name] = on_a_side_stream(rank, device, hooked)
    return found


def find(machine: Machine) -> Iterator[Evidence]:
    for group in machine.groups():
        if machine.kind == "cuda":
            of_ranks = group.run(in_order)
            for name in of_ranks[0]:
                wrong = sum(found[name] for found in of_ranks)
                holds = wrong > 0 if name.endswith(CONTROL) else wrong == 0
                yield Evidence(name, group.label, holds, f"{wrong} wrong")
        of_ranks = group.run(in_a_thread)
        elsewhere = all(found[0] for found in of_ranks)
        right = all(found[1] for found in of_ranks)
        # Only a GPU has a thread of its own; a graph on the CPU runs in the caller's.
        holds = right and elsewhere == (machine.kind == "cuda")
        where = "in autograd's thread of the GPU" if elsewhere else "in the caller's thread"
        yield Evidence("backward in two threads", group.label, holds, f"hooks ran {where}")
