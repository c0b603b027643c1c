"""MiniDDP on a GPU: in every step the gradients and parameters of torch's DDP."""

import inspect
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.book.tables import bound
from miniddp import MiniDDP
from miniddp.torch_drop_in import DistributedDataParallel as DropIn
from miniddp.training import MiniDataParallel
from tests.ddp_models import MODELS, loss_of

from .machine import Group, Machine, deterministic
from .proofs import Evidence
from .training import Distance, batches, both, close, distance, gradients, model

BY_IDS = "inputs moved by device_ids"
MODES: dict[str, dict[str, object]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "accumulation of 4": {},
    "unused parameters": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "small buckets": {"bucket_cap_mb": 0.001},
    BY_IDS: {},
}
FEW = ("mlp", "sparse embedding", "transformer", "batch norm")


WRAPPERS: dict[str, type[nn.Module]] = {"MiniDDP": MiniDDP, "drop-in": DropIn}


def modes(wrapper: str) -> list[str]:
    """The modes that a wrapper has: rare keywords are the drop-in's."""
    known = inspect.signature(WRAPPERS[wrapper]).parameters
    return [
        mode
        for mode, options in MODES.items()
        if known.keys() >= options.keys() and (mode != BY_IDS or "device_ids" in known)
    ]


def applies(wrapper: str, name: str, mode: str) -> bool:
    """Which cases exist at all: torch itself refuses, or raises in, the others."""
    if name == "sparse embedding" and wrapper == "MiniDDP":
        return False
    if name == "branches":
        return mode.startswith("unused")
    if name == "checkpointed, reentrant":
        return not mode.startswith("unused")
    if name == "nested outputs":
        return not mode.startswith("static graph")
    return True


def compare(
    rank: int, world_size: int, device: torch.device, wrapper: str, mode: str, names: list[str]
) -> dict[str, tuple[Distance, Distance]]:
    """On each rank: by model, how far we are from torch's DDP, and from one process."""
    deterministic(device)
    options, where = dict(MODES[mode]), device
    if mode == BY_IDS and device.type == "cuda":
        options["device_ids"], where = [device.index], torch.device("cpu")
    return {
        name: both(
            lambda module: WRAPPERS[wrapper](module, **options),
            lambda module: DistributedDataParallel(module, **options),
            name,
            (rank, world_size, device),
            where,
            4 if mode.startswith("accumulation") else 1,
        )
        for name in names
    }


def judge(
    what: str, group: Group, of_ranks: list[dict[str, tuple[Distance, Distance]]]
) -> Evidence:
    """All ranks' distances as one line."""
    differing = {name for found in of_ranks for name in found if not found[name][0].bitwise}
    wrong = {
        name
        for found in of_ranks
        for name, (to_torch, to_one) in found.items()
        if not (close(name, to_torch) and close(name, to_one))
    } | (differing if group.exact else set())
    worst = max(to_one.relative for found in of_ranks for _, to_one in found.values())
    count = len(of_ranks[0])
    same = f"{count - len(differing)} of {count} models bitwise torch's"
    failing = f"; not equal: {', '.join(sorted(wrong))}" if wrong else ""
    detail = f"{same}; one process: {bound(worst)}{failing}"
    return Evidence(what, group.label, not wrong, detail)


def find(machine: Machine) -> Iterator[Evidence]:
    for group in machine.groups():
        for wrapper in WRAPPERS:
            for mode in modes(wrapper):
                chosen = list(MODELS) if machine.kind == "cuda" else FEW
                # NCCL has no all-reduce of sparse tensors; torch's DDP fails there as well.
                no_sparse = "NCCL" in group.label
                names = [
                    name
                    for name in chosen
                    if applies(wrapper, name, mode)
                    and not (no_sparse and name == "sparse embedding")
                ]
                of_ranks = group.run(compare, wrapper, mode, names)
                yield judge(f"{wrapper}, {mode}", group, of_ranks)


def data_parallel(rank: int, device: torch.device) -> dict[str, tuple[Distance, Distance]]:
    """Two replicas on this device, which sum: beside one process with the whole batch."""
    deterministic(device)
    found = {}
    for name in ("mlp", "convolution"):
        batch = next(batches(name, rank, 0, 1)).to(device)
        module, alone = model(name, device), model(name, device)
        loss_of(MiniDataParallel(module, [device, device])(batch)).backward()
        loss_of(alone(batch)).backward()
        apart = distance(gradients(module), gradients(alone))
        found[name] = (apart, apart)
    return found


def find_data_parallel(machine: Machine) -> Iterator[Evidence]:
    group = Group("2 replicas on one device", 1, machine.kind, exact=False)
    of_ranks = group.run(data_parallel)
    worst = max(apart.relative for found in of_ranks for apart, _ in found.values())
    right = all(close(name, apart) for found in of_ranks for name, (apart, _) in found.items())
    yield Evidence("MiniDataParallel sums", group.label, right, f"one process: {bound(worst)}")
