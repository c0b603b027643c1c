"""Is communication hidden behind backward? One step of three wrappers, by the GPU's own clock.

A gradient is ready when the stream comes to an event that its hook records: when the kernels end
that were launched before. An all-reduce over NCCL has ended when its stream comes to an event after
its kernel; one over gloo when the host says so. On a CPU, all times are the host's. An all-reduce
that has ended before the last gradient is ready was hidden. The control is a rung of the ladder
that communicates after backward: none of its all-reduces may be hidden.

Of several steps, which the wrappers take in turns, the one of median length is kept, and the report
stores those of MiniDDP and torch's DDP.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.profiling.recording import Collective, Gradient, RankRecording, Recording, merge
from labkit.profiling.wrapped_group import WrappedGroup, bytes_of, future_of
from miniddp import MiniDDP
from miniddp.ladder import Bucketed

from . import Evidence, Machine

TURNS, WARM_UP = 5, 3
WRAPPERS: dict[str, Callable[..., Any]] = {
    "MiniDDP": MiniDDP,
    "torch DDP": DistributedDataParallel,
    "Bucketed": Bucketed,
}


class Clock:
    """Moments in seconds of the host's clock: on a GPU, when a stream came to a mark."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            torch.cuda.synchronize(device)
        self.begin, self.zero = time.perf_counter(), self.mark()

    def mark(self) -> Any:
        """This moment of the current stream; `seconds` tells it once the stream has come by."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Any) -> float:
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        return self.begin + self.zero.elapsed_time(mark) / 1e3


class Timed(WrappedGroup):
    """A process group, and what it saw of a step of the `module` whose gradients it averages."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.device, self.clock = device, Clock(device)
        self.by_nccl = dist.get_backend() == "nccl"
        self.gradients: list[tuple[str, int, Any]] = []
        self.sent: list[tuple[str, int, float, list[Any], threading.Event]] = []
        for name, parameter in module.named_parameters():

            def ready(parameter: Tensor, name: str = name) -> None:
                self.gradients.append((name, parameter.nbytes, self.clock.mark()))

            parameter.register_post_accumulate_grad_hook(ready)

    def pass_on(self, op: str, tensors: Sequence[Tensor], launch: Callable[[], dist.Work]) -> Any:
        done, ended = list[Any](), threading.Event()
        self.sent.append((op, bytes_of(tensors), time.perf_counter(), done, ended))

        def end(_: Any) -> None:  # on a stream that waits for NCCL's kernel
            done.append(self.clock.mark() if self.by_nccl else time.perf_counter())
            ended.set()

        work = launch()
        future_of(work).add_done_callback(end)
        return work

    def step(self, wrapped: Any, x: Tensor, rank: int) -> RankRecording:
        """Run one step, and say what happened when."""
        wrapped.module.zero_grad()
        dist.barrier()
        self.gradients.clear()
        self.sent.clear()
        clock = self.clock = Clock(self.device)
        loss = wrapped(x).square().mean()
        forward = clock.mark()
        loss.backward()
        if hasattr(wrapped, "finish"):
            wrapped.finish()
        end = clock.mark()
        of_time = sorted((clock.seconds(mark), name, size) for name, size, mark in self.gradients)
        gradients = tuple(Gradient(name, size, ready) for ready, name, size in of_time)
        collectives = []
        for number, (op, size, launched, done, ended) in enumerate(self.sent):
            ended.wait(60)
            after = sum(gradient.ready <= launched for gradient in gradients)
            collectives.append(
                Collective(op, size, after, number, launched, clock.seconds(done[0]))
            )
        last = max(clock.seconds(end), gradients[-1].ready, *(one.done for one in collectives))
        span = (clock.begin, clock.seconds(forward))
        return RankRecording(rank, clock.begin, last, (span,), gradients, tuple(collectives))


def recorded(rank: int, device: torch.device) -> dict[str, RankRecording]:
    """On each rank: by wrapper, its step of median length on rank 0."""
    # One bucket per layer, and comparable times of computation and communication.
    width, rows, cap = (2048, 32768, 16.0) if device.type == "cuda" else (256, 256, 0.25)
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rank)).to(device)
    ways = {}
    for name, wrap in WRAPPERS.items():
        torch.manual_seed(0)
        module = nn.Sequential(*[nn.Linear(width, width) for _ in range(6)]).to(device)
        group = Timed(module, device)  # before the wrapper's hooks
        place = {"group" if wrap is Bucketed else "process_group": group}
        ways[name] = (group, wrap(module, bucket_cap_mb=cap, **place))
    seen: dict[str, list[RankRecording]] = {name: [] for name in ways}
    for _ in range(WARM_UP + TURNS):
        for name, (group, wrapped) in ways.items():
            seen[name].append(group.step(wrapped, x, rank))
    steps = {name: of_way[WARM_UP:] for name, of_way in seen.items()}
    lengths = [{name: [one.end - one.begin for one in ones] for name, ones in steps.items()}]
    dist.broadcast_object_list(lengths)
    middle = {name: sorted(times)[TURNS // 2] for name, times in lengths[0].items()}
    return {name: ones[lengths[0][name].index(middle[name])] for name, ones in steps.items()}


def hidden(recording: RankRecording) -> int:
    """How many all-reduces had ended before the last gradient was ready."""
    return sum(one.done < recording.compute_end() for one in recording.collectives)


def find(machine: Machine) -> Iterator[Evidence]:
    of_ranks = machine.run(2, recorded)
    for name in WRAPPERS:
        both: Recording = merge([of_rank[name] for of_rank in of_ranks])
        first, control = both.ranks[0], name == "Bucketed"
        if not control:
            machine.timelines[name] = both
        counts = [hidden(one) for one in both.ranks]
        holds = max(counts) == 0 if control else min(counts) > 0
        said = f"hidden on each rank: {counts} of {len(first.collectives)}; rank 0: "
        said += f"{1e3 * (first.end - first.begin):.1f} ms, "
        said += f"of it exposed {1e3 * first.exposed_seconds():.1f}"
        what = f"{name} (the control: none may be)" if control else name
        # On a CPU, other processes decide what ends first.
        yield Evidence(what, machine.on(2), holds or machine.kind == "cpu", said)
