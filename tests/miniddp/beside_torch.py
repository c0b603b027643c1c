"""Our ways of training beside torch's, on ranks, and how far apart the two are.

Data differ between ranks and steps, and are drawn on the CPU. The tests start these functions on
CPUs, and `tests.gpu` on GPUs, so nothing here needs pytest.
"""

import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchsZero
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from labkit.testing import RecordedCollectives, ratio_and_cosine
from miniddp import MiniDDP
from miniddp.collectives.mesh import Mesh
from miniddp.extras import comm_hooks
from miniddp.extras.local_updates import DiLoCo, LocalSGD
from miniddp.sharded import Zero2, Zero2Optimizer, ZeroRedundancyOptimizer, fully_shard
from miniddp.sharded.muon import ShardedMuon
from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from tests.ddp_models import MODELS, dense_gradients, loss_of, torchs_ddp_takes, whole

CPU = torch.device("cpu")
Tensors = list[Tensor | None]
Distances = dict[str, dict[str, "Distance"]]
"""What a comparison returns on each rank: by case, and by model or way."""


class Distance(NamedTuple):
    """How far two lists of tensors are apart: in bits, and relative to each one's largest value."""

    bitwise: bool
    largest: float


def distance(ours: Tensors, theirs: Tensors) -> Distance:
    """The distance of two lists; infinite where one has a tensor and the other None, or a NaN."""
    bitwise, largest = True, 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a is None or b is None:
            if a is not b:
                return Distance(False, float("inf"))
            continue
        bitwise &= torch.equal(a, b)
        if a.numel():
            off, size = (a - b).abs().max().double(), b.abs().max().double()
            off = float(off / size.clamp(min=1e-3))
            largest = max(largest, off if off == off else float("inf"))
    return Distance(bitwise, largest)


def seeded(name: str, device: torch.device) -> nn.Module:
    """One of `MODELS`, the same on every rank and on every device."""
    torch.manual_seed(7)
    return MODELS[name].build().to(device)


# 1. The wrappers ----------------------------------------------------------------------------------

STEPS = 3
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "accumulation": {},
    "accumulation, views": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "unused parameters, views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "static graph, unused parameters, small buckets": {
        "static_graph": True,
        "find_unused_parameters": True,
        "bucket_cap_mb": 0.001,
    },
    "small buckets": {"bucket_cap_mb": 0.001},
    "a list of caps": {"bucket_cap_mb_list": [0.0005, 0.002]},
}


def train_wrapped(
    wrapped: Any,
    name: str,
    rank: int,
    device: torch.device,
    micro_batches: int = 1,
    autocast: bool = False,
) -> Tensors:
    """Train a wrapper or a rung around a model of `MODELS` for STEPS steps; inputs are on `device`.

    Returns the gradients after each step's last backward, and the state after each step.
    """
    module = wrapped.module
    kind = next(module.parameters()).device.type
    optimizer = SGD(module.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**10, enabled=autocast)
    seen: Tensors = []
    for step in range(STEPS):
        torch.manual_seed(1000 * rank + step)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for left in reversed(range(micro_batches)):
            with wrapped.no_sync() if left else nullcontext():
                with torch.autocast(kind, torch.float16, enabled=autocast):
                    loss = loss_of(wrapped(MODELS[name].batch(5 + left).to(device)))
                scaler.scale(loss).backward()
        if hasattr(wrapped, "finish"):
            wrapped.finish()
        scaler.unscale_(optimizer)
        seen += dense_gradients(module)
        scaler.step(optimizer)
        scaler.update()
        seen += [tensor.detach().clone() for tensor in module.state_dict().values()]
    return seen


def wrappers(
    rank: int, device: torch.device, modes: Collection[str], names: Collection[str]
) -> Distances:
    """Both wrappers beside torch's DDP, in each mode on each model that both classes take.

    In the mode "device_ids", the inputs are left to the wrapper to move.
    """
    found: Distances = {}
    for mode in modes:
        moved = {"device_ids": [device], "output_device": device}
        options = moved if mode == "device_ids" else MODES[mode]
        micro_batches = 2 if mode.startswith("accumulation") else 1
        inputs = CPU if mode == "device_ids" else device
        found[mode] = {}
        for name in names:
            sparse = name == "sparse embedding"  # which NCCL cannot sum, nor the core send
            if not torchs_ddp_takes(name, mode) or (sparse and dist.get_backend() == "nccl"):
                continue
            trained = {}
            for cls in (DistributedDataParallel, DropIn, MiniDDP):
                takes = options.keys() <= signature(cls).parameters.keys()
                if takes and not (sparse and cls is MiniDDP):
                    wrapped = cls(seeded(name, device), **options)
                    trained[cls] = train_wrapped(wrapped, name, rank, inputs, micro_batches)
            theirs = trained.pop(DistributedDataParallel)
            for cls, ours in trained.items():
                found[mode][f"{name}, {cls.__module__}"] = distance(ours, theirs)
    return found


HOOKS = {
    "average": (comm_hooks.average, default_hooks.allreduce_hook),
    "fp16_compress": (comm_hooks.fp16_compress, default_hooks.fp16_compress_hook),
}


def hooks(rank: int, device: torch.device) -> Distances:
    """Our comm hooks and torch's stock ones on both wrappers, beside torch's on torch's."""

    def trained(wrap: Callable[..., Any], hook: Callable[..., Any], views: bool) -> Tensors:
        wrapped = wrap(seeded("mlp", device), bucket_cap_mb=0.005, gradient_as_bucket_view=views)
        wrapped.register_comm_hook(None, hook)
        return train_wrapped(wrapped, "mlp", rank, device)

    found: Distances = {}
    for name, (ours, stock) in HOOKS.items():
        theirs = trained(DistributedDataParallel, stock, False)
        found[name] = {
            f"{wrap.__module__}, {hook.__name__}, {views=}": distance(
                trained(wrap, hook, views), theirs
            )
            for wrap in (DropIn, DistributedDataParallel)
            for hook in (ours, stock)
            for views in (False, True)
        }
    return found


# 2. Fully sharded ---------------------------------------------------------------------------------

# Tied weights belong to one group, as do modules that some ranks leave out.
ONE_GROUP = {"tied weights", "transformer", "branches"}


def mesh_of(device: torch.device, *shape: int) -> DeviceMesh:
    """A mesh on devices that several ranks may share."""
    torch.zeros(1, device=device)  # before CUDA has started, a mesh would choose this rank's GPU
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh(device.type, shape, mesh_dim_names=names)


def shard(module: nn.Module, name: str, how: Callable[..., Any], **options: Any) -> Any:
    """Each child in a group of its own, and the rest in the root's."""
    on_gpu = next(module.parameters()).is_cuda
    for child in module.children() if name not in ONE_GROUP else ():
        if type(child).forward is not nn.Module.forward:
            how(child, **options)
    how(module, **options)
    if how is torchs_fully_shard and on_gpu and dist.get_backend() == "gloo":
        for part in module.modules():  # gloo has no average there
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
    return module


def train_sharded(
    model: Any,
    draw: Callable[[int], Tensor],
    rank: int,
    device: torch.device,
    micro_batches: Sequence[int],
) -> Tensors:
    """Train for as many steps as `micro_batches` has: whole gradients and parameters of each."""
    # Adam would turn differences of rounding size in a gradient of zero into steps.
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    seen: Tensors = []
    for step, count in enumerate(micro_batches):
        torch.manual_seed(1000 * rank + step)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for left in reversed(range(count)):
            if isinstance(model, MiniDDP):
                model.require_backward_grad_sync = not left
            else:
                model.set_requires_gradient_sync(not left)
            loss_of(model(draw(4 + left).to(device))).backward()
        seen += [None if p.grad is None else whole(p.grad, p) for p in model.parameters()]
        optimizer.step()
        seen += [whole(parameter.detach(), parameter) for parameter in model.parameters()]
    return seen


def beside_fsdp2(
    rank: int, device: torch.device, mesh: tuple[int, ...], cases: dict[str, tuple[dict, list[str]]]
) -> Distances:
    """Three steps by ours and by torch's `fully_shard`. `cases`: options, models."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    found: Distances = {}
    for case, (options, names) in cases.items():
        found[case] = {}
        for name in names:
            both = (
                shard(seeded(name, device), name, how, mesh=mesh_of(device, *mesh), **options)
                for how in (fully_shard, torchs_fully_shard)
            )
            found[case][name] = distance(
                *(train_sharded(m, MODELS[name].batch, rank, device, (2, 1, 2)) for m in both)
            )
    return found


# 3. ZeRO ------------------------------------------------------------------------------------------


def zero(kind: str, module: nn.Module, unused: bool = False) -> tuple[Any, torch.optim.Optimizer]:
    """A wrapper and its optimizer of two groups. `kind` is zero1, zero2, torch, or ddp."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "lr": 0.02},
    ]
    options: dict[str, Any] = {"lr": 0.01, "eps": 1e-3}
    if kind == "zero2":
        model = Zero2(module, bucket_cap_mb=0.001, find_unused_parameters=unused)
        return model, Zero2Optimizer(model, torch.optim.AdamW, groups, **options)
    optimizers = {"zero1": ZeroRedundancyOptimizer, "torch": TorchsZero}
    model = MiniDDP(module, find_unused_parameters=unused)
    if kind in optimizers:
        return model, optimizers[kind](groups, torch.optim.AdamW, **options)
    return model, torch.optim.AdamW(groups, **options)


def train_with_zero(kind: str, name: str, rank: int, device: torch.device) -> Tensors:
    """The parameters after STEPS steps of two micro-batches."""
    model, optimizer = zero(kind, seeded(name, device), name == "branches")
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(STEPS):
        torch.manual_seed(1000 * rank + step)
        for micro in range(2):
            with model.no_sync() if micro == 0 else nullcontext():
                loss_of(model(MODELS[name].batch(4).to(device))).backward()
        optimizer.step()
        schedule.step()
        (model if step == 1 else optimizer).zero_grad()
        assert all(p.grad is None for p in model.parameters())
    return [p.detach().clone() for p in model.parameters()]


def beside_ddp(rank: int, device: torch.device, names: Collection[str]) -> Distances:
    """ZeRO-1 and ZeRO-2, ours and torch's, beside MiniDDP with the whole optimizer."""
    found: Distances = {"zero1": {}, "zero2": {}, "torch": {}}
    for name in names:
        wanted = train_with_zero("ddp", name, rank, device)
        for kind in found:
            if (kind, name) != ("torch", "mixed dtypes"):  # which torch's cannot take
                found[kind][name] = distance(train_with_zero(kind, name, rank, device), wanted)
    return found


# 4. Muon, local updates, and meshes ---------------------------------------------------------------

UPDATES = 6


def build(device: torch.device = CPU) -> nn.Module:
    """A model, the same on every rank."""
    torch.manual_seed(0)
    layers = (nn.Linear(6, 10, bias=False), nn.Tanh(), nn.Linear(10, 7, bias=False))
    return nn.Sequential(*layers).to(device)


def batch(rank: int, step: int) -> Tensor:
    """A rank's inputs of one step, drawn on the CPU."""
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, optimizer: Any, batches: list[Tensor], device: torch.device) -> None:
    """One step per batch."""
    for x in batches:
        optimizer.zero_grad()
        model(x.to(device)).pow(2).mean().backward()
        optimizer.step()


def muon(
    rank: int, world_size: int, device: torch.device, ways: list[str]
) -> dict[str, tuple[float, float, int]]:
    """On each rank, by way: the ratio and the cosine of the movement to that of torch's Muon.

    torch's runs in one process that has all batches. Then the bytes that `step` communicates.
    """
    start = [p.detach() for p in build(device).parameters()]
    alone = build(device)
    everything = [torch.cat([batch(r, s) for r in range(world_size)]) for s in range(UPDATES)]
    train(alone, torch.optim.Muon(alone.parameters(), lr=0.1), everything, device)
    wanted = [p.detach() - s for p, s in zip(alone.parameters(), start, strict=True)]
    found = {}
    for way in ways:
        model = fully_shard(build(device))
        optimizer = ShardedMuon(model.parameters(), lr=0.1, way=way)
        train(model, optimizer, [batch(rank, step) for step in range(UPDATES)], device)
        wholes = [p.sharding.gather(p.detach()) for p in model.parameters()]
        moved = [whole - s for whole, s in zip(wholes, start, strict=True)]
        with RecordedCollectives() as recorded:
            optimizer.step()
        sent = sum(collective.bytes for collective in recorded.launched)
        found[way] = (*ratio_and_cosine(moved, wanted), sent)
    return found


def with_local_updates(rank: int, device: torch.device, kind: str, every: int) -> list[Tensor]:
    """On each rank: the weights after training; `kind` is ddp, torch, local, diloco, or plain.

    plain: DiLoCo whose outer optimizer only takes the average over.
    """
    model = build(device)
    inner = SGD(model.parameters(), lr=0.1, momentum=0.5 if every > 1 else 0.0)
    optimizer: Any = inner
    if kind == "torch":
        averager = PeriodicModelAverager(period=every, warmup_steps=every - 1)
        optimizer = PostLocalSGDOptimizer(inner, averager)
    elif kind == "local":
        optimizer = LocalSGD(inner, every)
    elif kind == "diloco":
        optimizer = DiLoCo(inner, every, lr=0.7, momentum=0.9)
    elif kind == "plain":
        optimizer = DiLoCo(inner, every, lr=1.0, momentum=0.0)
    mine = [batch(rank, step) for step in range(UPDATES)]
    train(MiniDDP(model) if kind == "ddp" else model, optimizer, mine, device)
    return [parameter.detach() for parameter in model.parameters()]


def wrong_on_a_mesh(rank: int, device: torch.device) -> list[str]:
    """On each of 2 x 2 ranks: which collective, or gradient of one, has another value than it must.

    Each sums and gathers 1 + rank along a dimension; its loss weighs the sum by rank + 1.
    """
    mesh, wrong = Mesh(data=2, tensor=2), []
    row, column = divmod(rank, 2)
    weights = torch.tensor([1.0, 10.0], device=device)
    for dimension, members in (("data", (column, column + 2)), ("tensor", (2 * row, 2 * row + 1))):
        x = torch.tensor([1.0 + rank], device=device, requires_grad=True)
        total, everyone = mesh.sum(x, dimension), mesh.gather(x, dimension)
        (total * (rank + 1) + (everyone * weights).sum()).sum().backward()
        gradient = torch.tensor([float(rank)], device=device)
        mesh.add_up(gradient, [dimension])
        ones = [1.0 + member for member in members]
        # Both ranks' factors of the sum, and both ranks' weight of this rank's place.
        of_x = sum(ones) + 2 * weights[members.index(rank)].item()
        for what, value, right in (
            ("sum", total.tolist(), [sum(ones)]),
            ("gather", everyone.tolist(), ones),
            ("backward", x.grad.tolist(), [of_x]),
            ("add_up", gradient.tolist(), [sum(members)]),
        ):
            if value != right:
                wrong.append(f"{what} along {dimension}: {value}, and {right} is right")
    everything = torch.tensor([float(rank)], device=device)
    mesh.add_up(everything, ["data", "tensor", "a dimension of size 1"])
    if (mesh.index("data"), mesh.index("tensor"), everything.item()) != (row, column, 6):
        wrong.append("the place of this rank, or the sum over all ranks")
    return wrong
