"""On a GPU, our wrappers, rungs, and hooks train as torch's DDP does, and as one process does.

A `Case` names a way to train by ours and by torch's DDP. Both train the same models for three steps
on batches that differ between ranks. The gradients and the state of each step are compared with
torch's, and the gradients of the first step with those of one process that has all batches.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision  # by this name only

from labkit.tables import bound
from miniddp import MiniDDP
from miniddp.data_parallel import MiniDataParallel
from miniddp.extras import comm_hooks
from miniddp.ladder import RUNGS, Rung
from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from tests.ddp_models import MODELS, dense_gradients, loss_of, torchs_ddp_takes

from .machine import CannotProveError, Evidence, Group, Machine, deterministic

STEPS = 3
ROUNDING = 1e-5
"""Of a norm: how far float32 gradients may be apart that are the same but for rounding."""
COARSE = {"mixed dtypes": 2e-2}
"""By model; one of its layers computes in bfloat16."""

REHEARSED = ("mlp", "sparse embedding", "transformer", "branches")
"""The models that a CPU trains."""

Tensors = list[Tensor | None]
Wrap = Callable[[nn.Module], Any]


class Case(NamedTuple):
    """A way to train, by ours and by torch's DDP.

    `within` bounds the distance of the first gradients to one process's, and `to_torch` that of
    all steps to torch's. `bitwise`: these also have torch's bits, where the order of a sum has no
    effect.
    """

    ours: Wrap
    theirs: Wrap
    models: tuple[str, ...]
    within: float = ROUNDING
    to_torch: float = ROUNDING
    bitwise: bool = True
    micro_batches: int = 1
    autocast: bool = False
    sums: bool = False
    moves_inputs: bool = False
    theirs_on_cpu: bool = True


class Distance(NamedTuple):
    """How far two lists of tensors are apart: in bits, and as a part of the second one's norm."""

    bitwise: bool
    relative: float


def distance(ours: Tensors, theirs: Tensors) -> Distance:
    """The distance of two lists; infinite where one has a tensor and the other None, or a NaN."""
    bitwise, squares, norm = True, 0.0, 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a is None or b is None:
            if a is not b:
                return Distance(False, float("inf"))
            continue
        bitwise &= torch.equal(a, b)
        wide = torch.complex128 if a.is_complex() else torch.float64
        squares += (a.to(wide) - b.to(wide)).abs().pow(2).sum().item()
        norm += b.to(wide).abs().pow(2).sum().item()
    relative = (squares / norm) ** 0.5 if norm else float(squares > 0)
    return Distance(bitwise, relative if relative == relative else float("inf"))


def model(name: str, device: torch.device) -> nn.Module:
    """One of `MODELS`, the same on every rank and on every device."""
    torch.manual_seed(7)
    return MODELS[name].build().to(device)


def batches(name: str, rank: int, step: int, micro_batches: int = 1) -> list[Tensor]:
    """A rank's micro-batches of one step, drawn on the CPU; their sizes differ."""
    torch.manual_seed(1000 * rank + step)
    return [MODELS[name].batch(5 + micro) for micro in range(micro_batches)]


def train(
    wrapped: Any, name: str, rank: int, inputs: torch.device, case: Case
) -> tuple[Tensors, Tensors]:
    """Train for STEPS steps. Returns the first gradients, and all gradients and states."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    kind = next(wrapped.parameters()).device.type
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**10, enabled=case.autocast)
    seen: Tensors = []
    first: Tensors = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        micro_batches = batches(name, rank, step, case.micro_batches)
        for number, batch in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            with nullcontext() if last else wrapped.no_sync():
                with torch.autocast(kind, torch.float16, enabled=case.autocast):
                    loss = loss_of(wrapped(batch.to(inputs)))
                scaler.scale(loss).backward()
        if isinstance(wrapped, Finishing):
            wrapped.rung.finish()
        scaler.unscale_(optimizer)
        first = first or dense_gradients(wrapped)
        seen += dense_gradients(wrapped)
        scaler.step(optimizer)
        scaler.update()
        seen += [tensor.detach().clone() for tensor in wrapped.state_dict().values()]
    return first, seen


def full_batch(name: str, world_size: int, device: torch.device, case: Case) -> Tensors:
    """One process with the batches of all ranks: the gradients of the first step."""
    module = model(name, device)
    divisor = 1 if case.sums else world_size
    for rank in range(world_size):
        for batch in batches(name, rank, 0, case.micro_batches):
            (loss_of(module(batch.to(device))) / divisor).backward()
    return dense_gradients(module)


def compare(
    rank: int,
    world_size: int,
    device: torch.device,
    kind: str,
    models_of: dict[str, tuple[str, ...]],
) -> dict[str, dict[str, tuple[Distance, Distance]]]:
    """On each rank: by case and model, the distances to torch's DDP and to one process."""
    deterministic(device)
    found: dict[str, dict[str, tuple[Distance, Distance]]] = {}
    for name, case in CASES[kind](device).items():
        found[name] = {}
        for one in models_of[name]:
            try:
                found[name][one] = distances(case, one, rank, world_size, device)
            except Exception as error:
                error.add_note(f"The case was: {name}, with the model: {one}")
                raise
    return found


def distances(
    case: Case, name: str, rank: int, world_size: int, device: torch.device
) -> tuple[Distance, Distance]:
    """How far one model's training by ours is from that by torch's DDP, and by one process."""
    inputs = torch.device("cpu") if case.moves_inputs else device
    module = model(name, device)
    first, ours = train(case.ours(copy.deepcopy(module)), name, rank, inputs, case)
    to_one = distance(first, full_batch(name, world_size, device, case))
    theirs = ours
    if case.theirs_on_cpu or device.type == "cuda":
        _, theirs = train(case.theirs(copy.deepcopy(module)), name, rank, inputs, case)
    return distance(ours, theirs), to_one


def find(machine: Machine, kind: str) -> Iterator[Evidence]:
    """All cases of one kind of `CASES`, on all groups of ranks."""
    for group in machine.groups():
        cases = CASES[kind](torch.device("cpu"))
        # NCCL has no all-reduce of sparse tensors; torch's DDP fails there as well.
        left_out = "sparse embedding" if "NCCL" in group.label else None
        kept = MODELS if machine.kind == "cuda" else REHEARSED
        models_of = {
            name: tuple(one for one in case.models if one in kept and one != left_out)
            for name, case in cases.items()
        }
        of_ranks = group.run(compare, kind, models_of)
        for name, case in cases.items():
            yield judge(name, group, case, [of_rank[name] for of_rank in of_ranks])


def judge(
    name: str, group: Group, case: Case, of_ranks: list[dict[str, tuple[Distance, Distance]]]
) -> Evidence:
    """All ranks' distances as one line."""
    differing = {one for found in of_ranks for one in found if not found[one][0].bitwise}
    wrong = {
        one
        for found in of_ranks
        for one, (to_torch, to_one) in found.items()
        if to_torch.relative > max(case.to_torch, COARSE.get(one, 0))
        or to_one.relative > max(case.within, COARSE.get(one, 0))
    }
    if group.exact and case.bitwise:
        wrong |= differing
    worst = max(to_one.relative for found in of_ranks for _, to_one in found.values())
    count = len(of_ranks[0])
    same = f"{count - len(differing)} of {count} models bitwise torch's"
    if not case.theirs_on_cpu and group.kind == "cpu":
        same = "torch's needs a GPU"
    failing = f"; not equal: {', '.join(sorted(wrong))}" if wrong else ""
    return Evidence(name, group.label, not wrong, f"{same}; one process: {bound(worst)}{failing}")


# 1. The wrappers in their modes -------------------------------------------------------------------


def applies(wrapper: str, name: str, mode: str) -> bool:
    """Whether both classes take the case."""
    core_refuses = name == "sparse embedding" and wrapper == "MiniDDP"
    return not core_refuses and torchs_ddp_takes(name, mode)


def wrapper_cases(device: torch.device) -> dict[str, Case]:
    by_ids, own = "inputs moved by device_ids", device if device.type == "cuda" else None
    modes: dict[str, dict[str, Any]] = {
        "plain": {},
        "views": {"gradient_as_bucket_view": True},
        "accumulation of 4": {},
        "unused parameters": {"find_unused_parameters": True},
        "static graph": {"static_graph": True},
        "small buckets": {"bucket_cap_mb": 0.001},
        by_ids: {"device_ids": own and [own], "output_device": own},
    }
    return {
        f"{wrapper}, {mode}": Case(
            partial(cls, **options),
            partial(DistributedDataParallel, **options),
            tuple(name for name in MODELS if applies(wrapper, name, mode)),
            micro_batches=4 if mode.startswith("accumulation") else 1,
            moves_inputs=mode == by_ids,
        )
        for wrapper, cls in (("MiniDDP", MiniDDP), ("drop-in", DropIn))
        for mode, options in modes.items()
        if signature(cls).parameters.keys() >= options.keys()
    }


# 2. The rungs of the ladder; the first two are the average by hand --------------------------------


class Finishing(nn.Module):
    """A rung, used like a wrapper; `train` calls its `finish` after the last micro-batch."""

    def __init__(self, rung: Rung) -> None:
        super().__init__()
        self.module, self.rung = rung.module, rung
        self.no_sync = rung.no_sync

    def forward(self, *inputs: Any) -> Any:
        return self.rung(*inputs)


def rung_cases(device: torch.device) -> dict[str, Case]:
    def theirs(module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, find_unused_parameters=hasattr(module, "never"))

    return {
        rung.__name__: Case(
            lambda module, rung=rung: Finishing(rung(module)),
            theirs,
            ("mlp", "transformer", "branches"),
            micro_batches=2,
        )
        for rung in RUNGS
    }


# 3. Comm hooks, and half precision ----------------------------------------------------------------


def hook_cases(device: torch.device) -> dict[str, Case]:
    def wrap(cls: type, hook: str, module: nn.Module) -> nn.Module:
        wrapped = cls(module, bucket_cap_mb=0.002)
        wrapped.register_comm_hook(None, getattr(comm_hooks, hook))
        return wrapped

    # How far the first gradients may be from the true average.
    within = {"fp16_compress": 2e-3, "bf16_compress": 1e-2}
    return {
        hook: Case(
            partial(wrap, DropIn, hook),
            partial(wrap, DistributedDataParallel, hook),
            ("transformer",),
            within.get(hook, ROUNDING),
            bitwise=False,
            sums=hook == "total",
        )
        for hook in ("average", "total", *within)
    }


def precision_cases(device: torch.device) -> dict[str, Case]:
    found = {}
    for dtype, within in ((torch.float16, 1e-2), (torch.bfloat16, 5e-2)):
        narrow = _MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)
        ours, theirs = (
            partial(cls, mixed_precision=narrow) for cls in (DropIn, DistributedDataParallel)
        )
        found[f"mixed_precision, {dtype}"] = Case(
            ours, theirs, ("mlp",), within, to_torch=within, bitwise=False, theirs_on_cpu=False
        )
    ours, theirs = (
        partial(cls, gradient_as_bucket_view=True) for cls in (DropIn, DistributedDataParallel)
    )
    found["autocast and GradScaler"] = Case(ours, theirs, ("mlp",), within=1e-2, autocast=True)
    return found


CASES: dict[str, Callable[[torch.device], dict[str, Case]]] = {
    "wrappers": wrapper_cases,
    "rungs": rung_cases,
    "hooks": hook_cases,
    "precision": precision_cases,
}


# 4. One process with several replicas -------------------------------------------------------------


def data_parallel(rank: int, device: torch.device, devices: list[str]) -> dict[str, Distance]:
    """By model and way: the distance of a step on several replicas to one without replicas."""
    deterministic(device)
    found = {}
    ways = [MiniDataParallel] + [nn.DataParallel] * (len(set(devices)) > 1)
    for name in ("mlp", "convolution", "dense embedding"):
        [batch] = batches(name, rank, 0)
        of_ways = []
        for wrap in (None, *ways):
            module = model(name, device)
            loss_of((wrap(module, devices) if wrap else module)(batch.to(device))).backward()
            of_ways.append(dense_gradients(module))
        alone, *several = of_ways
        for wrap, ours in zip(ways, several, strict=True):
            found[f"{name}, {wrap.__name__}"] = distance(ours, alone)
        if len(several) > 1 and not distance(*several).bitwise:
            raise AssertionError(f"{name}: MiniDataParallel and DataParallel differ in their bits")
    return found


def find_replicas(machine: Machine, devices: int) -> Iterator[Evidence]:
    """Two replicas on one device, or on two devices and then beside torch's DataParallel."""
    if devices > 1 and machine.kind == "cpu":
        raise CannotProveError("a CPU is one device: it has no second one")
    places = [f"cuda:{i % devices}" if machine.kind == "cuda" else "cpu" for i in range(2)]
    label = "2 replicas on " + ("one device" if devices == 1 else "2 GPUs")
    [found] = machine.group(1).run(data_parallel, places)
    worst = max(apart.relative for apart in found.values())
    said = f"{', '.join(found)}; no replicas: {bound(worst)}"
    yield Evidence("MiniDataParallel sums", label, worst <= ROUNDING, said)
