"""One step of the user's functions in a rank, or in one process: its gradients, compared."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from ddp_doctor.certificate.measure import TOLERANCE, Comparison, compare
from ddp_doctor.inputs import Inputs, Rows

Batches = list[Any]  # one per rank
Gradient = dict[str, Tensor]


@dataclass(frozen=True)
class Backward:
    """The short form: back-propagate what `loss(model, batch)` returns."""

    loss: Callable[[Any, Any], Any]

    def __call__(self, model: Any, batch: Any) -> None:
        self.loss(model, batch).backward()


@dataclass
class Measured:
    """What one process found. `problem`: a premise that is violated, as a sentence."""

    problem: str = ""
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    rows: Rows = field(default_factory=dict)


class UnjoinableError(ValueError):
    """The default `join` or `deal` does not know what a sample is."""


def join_rows(batches: Batches) -> Any:
    """One batch of all rows: tensors are concatenated along dimension 0."""
    flat = [tree_flatten(batch) for batch in batches]
    parts = zip(*(leaves for leaves, _ in flat), strict=True)
    try:
        joined = [torch.cat(part) if _is_rows(part[0]) else part[0] for part in parts]
    except RuntimeError as error:
        raise UnjoinableError(
            f"the ranks' batches have different shapes ({error}); pad them to one length on all "
            "ranks, or pass join and deal"
        ) from None
    return tree_unflatten(joined, flat[0][1])


def deal_rows(batches: Batches) -> Batches:
    """The same rows in another order, in as many per rank as before."""
    sizes = [_rows_of(batch) for batch in batches]
    seeded = torch.Generator().manual_seed(1)
    order = torch.randperm(sum(sizes), generator=seeded)
    leaves, spec = tree_flatten(join_rows(batches))
    return [
        tree_unflatten([leaf[part] if _is_rows(leaf) else leaf for leaf in leaves], spec)
        for part in order.split(sizes)
    ]


def _is_rows(leaf: Any) -> bool:
    return torch.is_tensor(leaf) and leaf.dim() > 0


def _rows_of(batch: Any) -> int:
    counts = {len(leaf) for leaf in tree_flatten(batch)[0] if _is_rows(leaf)}
    if len(counts) != 1:
        found = f"tensors of {sorted(counts)} rows" if counts else "no tensor"
        raise UnjoinableError(
            f"a batch of type {type(batch).__name__} holds {found}, so it is unknown what a sample "
            "is; pass join and deal"
        )
    return counts.pop()


@dataclass(frozen=True)
class Functions:
    """What the user gives. `wrap`: the model is wrapped with DDP unless it is wrapped already."""

    make_model: Callable[[], nn.Module]
    backward: Callable[[Any, Any], Any]
    batches: Callable[[int, int], Iterable[Any]]
    join: Callable[[Batches], Any] = join_rows
    deal: Callable[[Batches], Batches] = deal_rows
    wrap: bool = False
    tolerance: float = TOLERANCE


class Process:
    """The model in this process; `step` runs the user's `backward` once, from the same weights."""

    def __init__(self, functions: Functions) -> None:
        self.functions = functions
        torch.manual_seed(0)
        model = functions.make_model()
        wrapped = isinstance(model, FSDPModule) or hasattr(model, "module")
        self.model = DistributedDataParallel(model) if functions.wrap and not wrapped else model
        self.weights = self.state()

    def _named(self) -> dict[str, Tensor]:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name.removeprefix("module."): tensor.detach() for name, tensor in named}

    def state(self) -> Gradient:
        """A copy of all parameters and buffers, whole."""
        return {name: _whole(tensor).clone() for name, tensor in self._named().items()}

    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Set parameters and buffers. Raises KeyError for other names."""
        for name, tensor in self._named().items():
            given = weights[name]
            if isinstance(tensor, DTensor):
                given = distribute_tensor(given, tensor.device_mesh, tensor.placements)
            tensor.copy_(given)

    def step(self, batch: Any, seed: int = 0) -> tuple[Gradient, Gradient | None, Rows]:
        """What `.grad` holds, what autograd computed here, and the rows that the model got.

        The second is None where autograd's gradients cannot be seen: those of sharded parameters.
        """
        self.restore(self.weights)
        trained = {
            name.removeprefix("module."): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        own = {
            name: torch.zeros_like(parameter, dtype=torch.float64)
            for name, parameter in trained.items()
            if not isinstance(parameter, DTensor)
        }
        hooks = [trained[name].register_hook(_adder(total)) for name, total in own.items()]
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        with Inputs() as inputs:
            self.functions.backward(self.model, batch)
        for hook in hooks:
            hook.remove()
        held = {
            name: torch.zeros_like(_whole(parameter.detach()))
            if parameter.grad is None
            else _whole(parameter.grad).detach().clone()
            for name, parameter in trained.items()
        }
        return held, own if len(own) == len(trained) else None, inputs.take()


def _adder(total: Tensor) -> Callable[[Tensor], None]:
    def add(gradient: Tensor) -> None:
        total.add_(gradient.detach())

    return add


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def measure_ranks(functions: Functions, folder: Path) -> Measured:
    """In each of W ranks: P0, P2, the repeated step, and rank 0's gradient in every rank.

    Rank 0 leaves its weights and gradient, and all batches, for `measure_one`.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    process = Process(functions)
    every: Batches = [None] * world
    dist.all_gather_object(every, next(iter(functions.batches(rank, world))))
    held, own, rows = process.step(every[rank])
    kept = process.state()
    again, _, _ = process.step(every[rank], seed=1 + rank)
    dealt, _, _ = process.step(functions.deal(every)[rank])
    problem = _changed(process.weights, kept) or _unusable(held) or _other_weights(process.weights)
    pairs = {
        "replicas": (held, _of_rank_0(held)),
        "repeat": (again, held),
        "P2": (dealt, held),
    }
    if own is not None:
        for total in own.values():
            dist.all_reduce(total)
        pairs["P0"] = held, {name: total / world for name, total in own.items()}
    if rank == 0:
        torch.save((process.weights, held, every), folder / "rank0")
    dist.barrier()
    return Measured(problem, _compared(functions, pairs), rows)


def measure_one(functions: Functions, folder: Path) -> Measured:
    """In one process: P1, the samples in another order, and every sample twice."""
    process = Process(functions)
    weights, ranks, every = torch.load(folder / "rank0", weights_only=False)  # from mkdtemp
    process.weights = weights
    held, _, rows = process.step(functions.join(every))
    ordered, _, _ = process.step(functions.join(functions.deal(every)))
    twice, _, _ = process.step(functions.join([*every, *every]))
    pairs = {"P1": (ranks, held), "order": (ordered, held), "twice": (twice, held)}
    return Measured(_unusable(held), _compared(functions, pairs), rows)


def _compared(
    functions: Functions, pairs: Mapping[str, tuple[Gradient, Gradient]]
) -> dict[str, Comparison]:
    if not all(_finite(gradient) for pair in pairs.values() for gradient in pair):
        return {}
    return {name: compare(*pair, {}, functions.tolerance) for name, pair in pairs.items()}


def _finite(gradient: Gradient) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in gradient.values())


def _unusable(held: Gradient) -> str:
    """Why a gradient cannot be compared with another."""
    for name, tensor in held.items():
        if not tensor.isfinite().all():
            return f"the gradient of {name} holds NaN or infinity"
    if not any(bool(tensor.any()) for tensor in held.values()):
        return "the gradient is zero everywhere, so comparing it shows nothing"
    return ""


def _changed(before: Gradient, after: Gradient) -> str:
    parameters = [name for name in before if not _is_equal(before[name], after[name])]
    moved = [name for name in parameters if "running_" not in name and "num_batches" not in name]
    if not moved:
        return ""
    return f"backward changed {moved[0]}: it must leave the weights to a later optimizer.step()"


def _is_equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.allclose(first, second, 0, 0, equal_nan=True)


def _other_weights(weights: Gradient) -> str:
    """Whether this rank's weights are those of rank 0. Every rank calls it."""
    first = _of_rank_0(weights)
    other = [name for name in weights if not _is_equal(weights[name], first[name])]
    if not other:
        return ""
    return (
        f"rank {dist.get_rank()} starts with another {other[0]} than rank 0: let make_model give "
        "every rank the same weights"
    )


def _of_rank_0(tensors: Gradient) -> Gradient:
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    for copy in copies.values():
        dist.broadcast(copy, 0)
    return copies


def environment(rank: int, world: int) -> None:
    """What torchrun tells a rank, except for an address: the group has a file."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in local.items()})
