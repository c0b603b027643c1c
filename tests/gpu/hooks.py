"""The comm hooks on a GPU: what they do under torch's DDP, and what they promise."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from labkit.book.tables import bound
from miniddp.extras import comm_hooks
from miniddp.torch_drop_in import DistributedDataParallel as DropIn

from .machine import Group, Machine, deterministic
from .proofs import Evidence
from .training import Distance, distance, full_batch, model, train

NAME = "transformer"


class Promise(NamedTuple):
    """A hook, how its state is made, and how far from the true average it may be."""

    hook: Callable[..., Future[Tensor]]
    state: Callable[[], Any]
    within: float
    times: Callable[[int], int] = lambda world_size: 1


def _nothing() -> None:
    return None


PROMISES = {
    "average": Promise(comm_hooks.average, _nothing, 1e-5),
    "total": Promise(comm_hooks.total, _nothing, 1e-5, lambda world_size: world_size),
    "fp16_compress": Promise(comm_hooks.fp16_compress, _nothing, 2e-3),
    "bf16_compress": Promise(comm_hooks.bf16_compress, _nothing, 1e-2),
    # Exact for two steps, approximate in the third, which is compared between the wrappers only.
    "power_sgd": Promise(comm_hooks.power_sgd, comm_hooks.PowerSGDState, 1e-5),
}


def compare(rank: int, world_size: int, device: torch.device, name: str) -> tuple[Distance, float]:
    """On each rank: our training beside torch's DDP's, and its first gradients' distance."""
    deterministic(device)
    promise = PROMISES[name]
    module = model(NAME, device)
    seen = []
    for wrap in (DropIn, DistributedDataParallel):
        wrapped = wrap(copy.deepcopy(module), bucket_cap_mb=0.002)
        wrapped.register_comm_hook(promise.state(), promise.hook)
        seen.append(train(wrapped, NAME, rank, device, 1))
    ours, theirs = seen
    wanted = [
        gradient if gradient is None else gradient * promise.times(world_size)
        for gradient in full_batch(NAME, world_size, device, 1)
    ]
    whole = distance([t for part in ours for t in part], [t for part in theirs for t in part])
    return whole, distance(ours[0], wanted).relative


def refuses(device: torch.device) -> bool:
    """Whether the hierarchical average, which is for the CPU, refuses a bucket on this device."""
    wrapped = DropIn(model("mlp", device))
    state = comm_hooks.HierarchicalState(ranks_per_node=dist.get_world_size())
    wrapped.register_comm_hook(state, comm_hooks.hierarchical_average)
    try:
        wrapped(torch.randn(3, 12, device=device)).sum().backward()
    except NotImplementedError as error:
        return "comm_hooks.average" in str(error)
    finally:
        state.close()
    return False


def find(machine: Machine) -> Iterator[Evidence]:
    for group in machine.groups():
        for name, promise in PROMISES.items():
            yield judge(name, promise, group, group.run(compare, name))
    if machine.kind == "cuda":
        group = machine.pair()
        refused = all(group.run(refuses))
        yield Evidence("hierarchical_average refuses a GPU", group.label, refused, "")


def judge(
    name: str, promise: Promise, group: Group, of_ranks: list[tuple[Distance, float]]
) -> Evidence:
    """All ranks' distances as one line."""
    bitwise = all(whole.bitwise for whole, _ in of_ranks)
    to_torch = max(whole.relative for whole, _ in of_ranks)
    to_one = max(relative for _, relative in of_ranks)
    right = to_one <= promise.within and to_torch <= 1e-5
    same = "bitwise torch's" if bitwise else f"torch's: {bound(to_torch)}"
    return Evidence(name, group.label, right, f"{same}; one process: {bound(to_one)}")
