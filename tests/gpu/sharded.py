"""`miniddp.sharded` on a GPU: FSDP2 beside `fully_shard`, in bits, memory, and streams; ZeRO.

Two ranks have the same bits, because a sum of two numbers does not depend on their order. Four
ranks replicate over two pairs (HSDP), where it does not, either.
"""

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from miniddp import MiniDDP
from miniddp.sharded import Zero2, Zero2Optimizer, ZeroRedundancyOptimizer, fully_shard
from tests.ddp_models import MODELS, POLICIES, loss_of, whole

from .equality import distance
from .machine import CannotProveError, Evidence, Group, Machine, deterministic
from .streams import wrong_steps

STEPS = 3
SHARED = ("mlp", "frozen parameters", "dense embedding", "batch norm", "transformer", "recurrent")
ONE_GROUP = {"transformer"}  # its weights are tied
WIDE, LAYERS = 1024, 24
Shard = Callable[..., Any]


# 1. FSDP2 beside ours -----------------------------------------------------------------------------


CASES: dict[str, dict[str, Any]] = {
    "fully_shard": {},
    "fully_shard, kept whole": {"reshard_after_forward": False},
    **{f"fully_shard, {name}": {"mp_policy": policy} for name, policy in POLICIES.items()},
}


def mesh_of(device: torch.device, shape: tuple[int, ...]) -> DeviceMesh:
    """A mesh on GPUs that several ranks may share."""
    torch.zeros(1, device=device)  # before CUDA has started, a mesh would choose this rank's GPU
    return init_device_mesh(
        device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
    )


def shard(module: nn.Module, name: str, how: Shard, **options: Any) -> Any:
    """Each child in a group of its own, and the rest in the root's."""
    for child in module.children() if name not in ONE_GROUP else ():
        if type(child).forward is not nn.Module.forward:
            how(child, **options)
    how(module, **options)
    if how is torchs_fully_shard and dist.get_backend() == "gloo":
        for part in module.modules():  # gloo has no average on a GPU
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
    return module


def train(model: Any, name: str, rank: int, device: torch.device) -> list[Any]:
    """Two micro-batches per step; whole gradients and parameters of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    seen: list[Any] = []
    for step in range(STEPS):
        torch.manual_seed(1000 * rank + step)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            loss_of(model(MODELS[name].batch(5).to(device))).backward()
        seen += [None if p.grad is None else whole(p.grad, p) for p in model.parameters()]
        optimizer.step()
        seen += [whole(parameter.detach(), parameter) for parameter in model.parameters()]
    return seen


def beside_fsdp2(
    rank: int, world_size: int, device: torch.device, hybrid: bool
) -> dict[str, dict[str, tuple[bool, float]]]:
    """On each rank: by case and model, whether all bits are torch's, and the distance."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    deterministic(device)
    mesh = mesh_of(device, (2, world_size // 2) if hybrid else (world_size,))
    cases = {"fully_shard, HSDP": {}} if hybrid else CASES
    found: dict[str, dict[str, tuple[bool, float]]] = {}
    for case, options in cases.items():
        for name in SHARED if not options else ("mlp", "transformer"):
            torch.manual_seed(7)
            module = MODELS[name].build().to(device)
            both = []
            for how in (fully_shard, torchs_fully_shard):
                model = shard(copy.deepcopy(module), name, how, mesh=mesh, **options)
                both.append(train(model, name, rank, device))
            found.setdefault(case, {})[name] = distance(*both)
    return found


# 2. ZeRO beside MiniDDP ---------------------------------------------------------------------------


def beside_ddp(rank: int, device: torch.device) -> dict[str, tuple[bool, float]]:
    """On each rank, by way: the distance of the parameters after STEPS steps of AdamW."""
    deterministic(device)
    found: dict[str, list[Tensor]] = {}
    for way in ("MiniDDP", "ZeRO-1", "ZeRO-2"):
        torch.manual_seed(7)
        module = MODELS["transformer"].build().to(device)
        model = Zero2(module) if way == "ZeRO-2" else MiniDDP(module)
        optimizer: Any
        if way == "MiniDDP":
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        elif way == "ZeRO-1":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        else:
            optimizer = Zero2Optimizer(model, torch.optim.AdamW, lr=0.01)
        for step in range(STEPS):
            torch.manual_seed(1000 * rank + step)
            model.zero_grad()
            loss_of(model(MODELS["transformer"].batch(5).to(device))).backward()
            optimizer.step()
        found[way] = [parameter.detach().clone() for parameter in module.parameters()]
    return {way: distance(found[way], found["MiniDDP"]) for way in ("ZeRO-1", "ZeRO-2")}


# 3. Memory and streams ----------------------------------------------------------------------------


def deep(how: Shard, device: torch.device, world_size: int) -> Any:
    """Linear layers without biases, each in a group of its own."""
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS)]).to(device)
    return shard(module, "", how, mesh=mesh_of(device, (world_size,)))


def memory(rank: int, world_size: int, device: torch.device) -> dict[str, tuple[float, float]]:
    """On each rank: by implementation, (held after a step, the peak above it) in layers' bytes."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    found = {}
    layer = 4 * WIDE * WIDE
    x = torch.randn(1, WIDE, generator=torch.Generator().manual_seed(rank)).to(device)
    nn.Linear(WIDE, WIDE, device=device)(x).sum().backward()  # cuBLAS takes its workspaces
    for name, how in (("torch's", torchs_fully_shard), ("ours", fully_shard)):
        before = torch.cuda.memory_allocated(device)
        model = deep(how, device, world_size)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            model(x).square().mean().backward()
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_allocated(device)
            optimizer.step()
        torch.cuda.synchronize(device)
        held = torch.cuda.memory_allocated(device) - before
        found[name] = (held / layer, (peak - before - held) / layer)
        del model, optimizer
        gc.collect()
        torch.cuda.empty_cache()
    return found


def on_a_side_stream(rank: int, world_size: int, device: torch.device) -> int:
    """On each rank: how often gradients, read on the stream of the step, had other bits."""
    deterministic(device)
    model = deep(fully_shard, device, world_size)
    x = torch.randn(64, WIDE, generator=torch.Generator().manual_seed(rank)).to(device)

    def step() -> list[Tensor]:
        for parameter in model.parameters():
            parameter.grad = None
        model(x).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    return wrong_steps(step, device)


# What it proves -----------------------------------------------------------------------------------


def find(machine: Machine) -> Iterator[Evidence]:
    for group in (machine.pair(), *[g for g in machine.groups() if g.ranks == 1]):
        yield from equal(group, partial(beside_fsdp2, hybrid=False))
    for way, of_ranks in by_name(machine.pair().run(beside_ddp)).items():
        same = all(one.bitwise for one in of_ranks)
        yield Evidence(f"{way} beside MiniDDP", machine.pair().label, same, f"bitwise: {same}")
    yield from equal(machine.group(4), partial(beside_fsdp2, hybrid=True))
    if machine.kind == "cpu":
        raise CannotProveError("memory and streams of shards need a GPU")
    yield from find_streams_and_memory(machine.pair())


def by_name(of_ranks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The ranks' values, by name."""
    return {name: [of_rank[name] for of_rank in of_ranks] for name in of_ranks[0]}


def equal(group: Group, compare: Callable[..., Any]) -> Iterator[Evidence]:
    """Each case's models, which have to be equal to torch's bit for bit."""
    for case, of_ranks in by_name(group.run(compare)).items():
        models = by_name(of_ranks)
        differing = [n for n, ones in models.items() if not all(one.bitwise for one in ones)]
        worst = max(one.relative for ones in models.values() for one in ones)
        said = f"{len(models) - len(differing)} of {len(models)} models bitwise torch's"
        said += f"; not: {', '.join(differing)}, by {worst:.0e}" if differing else ""
        yield Evidence(case, group.label, not differing, said)


def find_streams_and_memory(group: Group) -> Iterator[Evidence]:
    wrong = sum(group.run(on_a_side_stream))
    what = "fully_shard on a side stream"
    yield Evidence(what, group.label, wrong == 0, f"{wrong} steps with wrong gradients")
    of_ranks = by_name(group.run(memory))
    ours, torchs = (
        [max(of_rank[at] for of_rank in of_ranks[whose]) for at in (0, 1)]
        for whose in ("ours", "torch's")
    )
    said = f"layers of {LAYERS}, ours/torch's: held {ours[0]:.1f}/{torchs[0]:.1f}"
    said += f", a step adds {ours[1]:.1f}/{torchs[1]:.1f}"
    holds = ours[0] <= 1.02 * torchs[0] and ours[1] < LAYERS / 2
    yield Evidence("memory of fully_shard with Adam", group.label, holds, said)
