"""On a GPU, our ways of training give the gradients and weights of torch's, or of one process.

Most comparisons are those of `tests/miniddp/beside_torch.py`, which the tests run on CPUs. On two
ranks all bits have to be the same, because a sum of two numbers does not depend on their order.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision  # by this name only

from labkit.tables import bound
from miniddp.data_parallel import MiniDataParallel
from miniddp.ladder import RUNGS
from miniddp.sync_batch_norm import SyncBatchNorm
from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from tests.ddp_models import MODELS, POLICIES, dense_gradients, loss_of
from tests.miniddp import beside_torch
from tests.miniddp.beside_torch import MODES, Distance, Distances, distance, seeded, train_wrapped

from . import Evidence, Machine, deterministic

ROUNDING = 1e-4
"""Of a tensor's largest value: how far numbers may be apart that are the same but for rounding."""
REHEARSED = ("mlp", "sparse embedding", "transformer", "branches")
"""The models that a CPU trains beside torch's DDP."""


class Comparison(NamedTuple):
    """What each rank compares, and what has to hold.

    `within` bounds all distances. `bitwise`: they are 0 where the order of a sum has no effect.
    Without `ranks` it is compared on as many as there are GPUs, on two, and on one.
    """

    compare: Callable[..., Distances]
    within: float = ROUNDING
    bitwise: bool = True
    ranks: tuple[int, ...] = ()


def find(machine: Machine, name: str) -> Iterator[Evidence]:
    """Run one of `COMPARISONS` on its numbers of ranks: one line per case, for all ranks."""
    compare, within, bitwise, worlds = COMPARISONS[name]
    for ranks in worlds or machine.worlds():
        of_ranks = machine.run(ranks, on_each_rank, compare)
        exact = bitwise and (ranks <= 2 or ranks in worlds)
        for case in of_ranks[0]:
            holds, said = judged([found[case] for found in of_ranks], within, exact)
            yield Evidence(case, machine.on(ranks), holds, said)


def on_each_rank(rank: int, device: torch.device, compare: Callable[..., Distances]) -> Distances:
    deterministic(device)
    return compare(rank, device)


def judged(of_ranks: list[dict[str, Distance]], within: float, bitwise: bool) -> tuple[bool, str]:
    pairs = [pair for found in of_ranks for pair in found.items()]
    differing = {name for name, apart in pairs if not apart.bitwise}
    wrong = {name for name, apart in pairs if apart.largest > within}
    wrong |= differing if bitwise else set()
    count, worst = len(of_ranks[0]), max(apart.largest for _, apart in pairs)
    said = f"{count - len(differing)} of {count} bitwise; apart by {bound(worst)}"
    return not wrong, said + (f"; not equal: {', '.join(sorted(wrong))}" if wrong else "")


# 1. Beside torch's DDP ----------------------------------------------------------------------------


def wrappers(rank: int, device: torch.device) -> Distances:
    """The inputs that `device_ids` moves are on the CPU, so it needs a GPU."""
    if device.type == "cpu":
        return beside_torch.wrappers(rank, device, MODES, REHEARSED)
    return beside_torch.wrappers(rank, device, [*MODES, "device_ids"], MODELS)


def precision(rank: int, device: torch.device) -> Distances:
    """torch's own mixed precision needs a GPU; autocast with a GradScaler does not."""
    cases: dict[str, dict[str, Any]] = {
        "autocast and GradScaler": {"gradient_as_bucket_view": True}
    }
    for dtype in (torch.float16, torch.bfloat16) if device.type == "cuda" else ():
        narrow = _MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)
        cases[f"mixed_precision, {dtype}"] = {"mixed_precision": narrow}
    found: Distances = {}
    for case, options in cases.items():
        ours, theirs = (
            train_wrapped(
                wrap(seeded("mlp", device), **options),
                *("mlp", rank, device),
                autocast="mixed_precision" not in options,
            )
            for wrap in (DropIn, DistributedDataParallel)
        )
        found[case] = {"mlp": distance(ours, theirs)}
        exact = "autocast" in case and dist.get_world_size() <= 2
        assert found[case]["mlp"].bitwise or not exact, f"{case}: not torch's bits"
    return found


def rungs(rank: int, device: torch.device) -> Distances:
    found: Distances = {rung.__name__: {} for rung in RUNGS}
    for name in ("mlp", "transformer", "branches"):
        unused = name == "branches"
        theirs = DistributedDataParallel(seeded(name, device), find_unused_parameters=unused)
        wanted = train_wrapped(theirs, name, rank, device, 2)
        for rung in RUNGS:
            ours = train_wrapped(rung(seeded(name, device)), name, rank, device, 2)
            found[rung.__name__][name] = distance(ours, wanted)
    return found


# 2. Shards ----------------------------------------------------------------------------------------

SOME = ["mlp", "transformer"]
SHARDED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "fully_shard": ({}, [*SOME, "frozen parameters", "dense embedding", "batch norm", "recurrent"]),
    "fully_shard, kept whole": ({"reshard_after_forward": False}, SOME),
    **{f"fully_shard, {name}": ({"mp_policy": POLICIES[name]}, SOME) for name in POLICIES},
}


def sharded(rank: int, device: torch.device) -> Distances:
    """Beside FSDP2; on four ranks, with two replicas of two ranks each (HSDP)."""
    if (ranks := dist.get_world_size()) < 4:
        return beside_torch.beside_fsdp2(rank, device, (ranks,), SHARDED)
    hybrid = {"fully_shard, HSDP": SHARDED["fully_shard"]}
    return beside_torch.beside_fsdp2(rank, device, (2, 2), hybrid)


def zero(rank: int, device: torch.device) -> Distances:
    return beside_torch.beside_ddp(rank, device, ["mlp", "transformer"])


def muon(rank: int, device: torch.device) -> Distances:
    """Beside one process. With each shard alone, the cosine is below 0.98: 0.2 apart."""
    ways = beside_torch.muon(rank, dist.get_world_size(), device, ["gather", "owner"])
    apart = {way: (ratio - 1) ** 2 + 2 * abs(1 - cos) for way, (ratio, cos, _) in ways.items()}
    return {f"Muon, {way}": {"torch's": Distance(False, apart[way] ** 0.5)} for way in apart}


# 3. What else combines ranks, or replicas ---------------------------------------------------------


def local_updates(rank: int, device: torch.device) -> Distances:
    """torch's PostLocalSGDOptimizer; and DDP, which averages in another order."""
    every_third = (beside_torch.with_local_updates(rank, device, w, 3) for w in ("local", "torch"))
    every = (beside_torch.with_local_updates(rank, device, way, 1) for way in ("plain", "ddp"))
    found = distance(*every_third)
    assert found.bitwise, f"local SGD is apart from torch's by {found.largest}"
    return {"local SGD": {"torch's": found}, "DiLoCo at every step": {"DDP": distance(*every)}}


def meshes(rank: int, device: torch.device) -> Distances:
    wrong = beside_torch.wrong_on_a_mesh(rank, device)
    assert not wrong, wrong[0]
    return {"sum, gather, and their gradients": {"a closed formula": Distance(True, 0.0)}}


def batch_norm(rank: int, device: torch.device) -> Distances:
    """Outputs, gradients of inputs, and running statistics; torch's layer needs a GPU."""
    draw = torch.Generator().manual_seed(0)
    rows = [4 + one for one in range(dist.get_world_size())]
    x, factor = (torch.randn(sum(rows), 8, 5, 5, generator=draw).to(device) for _ in range(2))
    mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))

    def run(layer: nn.Module, own: slice) -> list[Tensor]:
        inputs = x[own].clone().requires_grad_()
        outputs = layer.to(device)(inputs)
        (outputs * factor[own]).sum().backward()
        return [outputs.detach(), inputs.grad, layer.running_mean, layer.running_var]

    ours = run(SyncBatchNorm(8), mine)
    outputs, gradients, *running = run(nn.BatchNorm2d(8), slice(None))
    found = {"one batch": distance(ours, [outputs[mine], gradients[mine], *running])}
    if device.type == "cuda":
        found["torch's"] = distance(ours, run(nn.SyncBatchNorm(8), mine))
    return {"SyncBatchNorm": found}


def replicas(rank: int, device: torch.device, devices: int = 1) -> Distances:
    """Two replicas on one device, or on two devices and then beside torch's DataParallel, too."""
    places = [f"cuda:{i % devices}" if device.type == "cuda" else "cpu" for i in range(2)]
    found: dict[str, Distance] = {}
    for name in ("mlp", "convolution", "dense embedding"):
        torch.manual_seed(1)
        batch, of_ways = MODELS[name].batch(5).to(device), []
        for wrap in (None, MiniDataParallel, *[nn.DataParallel] * (devices > 1)):
            module = seeded(name, device)
            loss_of((wrap(module, places) if wrap else module)(batch)).backward()
            of_ways.append(dense_gradients(module))
        alone, ours, *torchs = of_ways
        found[f"{name}, no replicas"] = distance(ours, alone)
        if torchs:
            found[f"{name}, torch's"] = distance(ours, torchs[0])
    return {f"MiniDataParallel on {devices} device(s)": found}


COMPARISONS = {
    "wrappers": Comparison(wrappers),
    "rungs": Comparison(rungs),
    "hooks": Comparison(beside_torch.hooks),
    "precision": Comparison(precision, 5e-2, bitwise=False),
    "sharded": Comparison(sharded, ranks=(2, 1, 4)),
    "zero": Comparison(zero, ranks=(2,)),
    "muon": Comparison(muon, 5e-2, bitwise=False, ranks=(2,)),  # it computes in bfloat16
    "local": Comparison(local_updates, bitwise=False, ranks=(2,)),
    "meshes": Comparison(meshes, ranks=(4,)),
    "batch-norm": Comparison(batch_norm, bitwise=False, ranks=(2,)),
    "replicas": Comparison(replicas, bitwise=False, ranks=(1,)),
    "data-parallel": Comparison(partial(replicas, devices=2), bitwise=False, ranks=(1,)),
}
