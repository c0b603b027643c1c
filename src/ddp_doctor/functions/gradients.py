"""One step of the user's functions in a rank, or in one process: its gradients, compared."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from ddp_doctor.certificate.measure import TOLERANCE, Comparison, compare, unusable
from ddp_doctor.certificate.record import assign, full_tensor
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


def join_rows(batches: Batches) -> Any:
    """One batch of all rows: tensors are concatenated along dimension 0."""
    flat = [tree_flatten(batch) for batch in batches]
    parts = zip(*(leaves for leaves, _ in flat), strict=True)
    try:
        joined = [torch.cat(part) if _is_rows(part[0]) else part[0] for part in parts]
    except RuntimeError as error:
        raise ValueError(
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
        raise ValueError(
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
        return {name: full_tensor(tensor).clone() for name, tensor in self._named().items()}

    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Set parameters and buffers. Raises KeyError for other names."""
        for name, tensor in self._named().items():
            assign(tensor, weights[name])

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
        hooks = [trained[name].register_hook(partial(_add, total)) for name, total in own.items()]
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        with Inputs() as inputs:
            self.functions.backward(self.model, batch)
        for hook in hooks:
            hook.remove()
        grads = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in trained.items()
        }
        held = {name: full_tensor(grad).clone() for name, grad in grads.items()}
        return held, own if len(own) == len(trained) else None, inputs.take()


def _add(total: Tensor, gradient: Tensor) -> None:
    total.add_(gradient.detach())


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
    problem = _changed(process.weights, kept) or unusable(held) or _other_weights(process.weights)
    pairs = {"replicas": (held, _of_rank_0(held)), "repeat": (again, held), "P2": (dealt, held)}
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
    return Measured(unusable(held), _compared(functions, pairs), rows)


def _compared(
    functions: Functions, pairs: Mapping[str, tuple[Gradient, Gradient]]
) -> dict[str, Comparison]:
    """Each pair that is of finite numbers."""
    found = {name: compare(*pair, {}, functions.tolerance) for name, pair in pairs.items()}
    return {name: compared for name, compared in found.items() if math.isfinite(compared.error)}


def _changed(before: Gradient, after: Gradient) -> str:
    for name in _other(before, after):
        if "running_" not in name and "num_batches" not in name:
            return f"backward changed {name}: it must leave the weights to a later optimizer.step()"
    return ""


def _other(first: Gradient, second: Gradient) -> list[str]:
    """The names of tensors that are not equal."""
    return [
        name
        for name, tensor in first.items()
        if tensor.shape != second[name].shape
        or not torch.allclose(tensor, second[name], 0, 0, equal_nan=True)
    ]


def _other_weights(weights: Gradient) -> str:
    """Whether this rank's weights are those of rank 0. Every rank calls it."""
    for name in _other(weights, _of_rank_0(weights)):
        start = f"rank {dist.get_rank()} starts with another {name} than rank 0"
        return f"{start}: let make_model give every rank the same weights"
    return ""


def _of_rank_0(tensors: Gradient) -> Gradient:
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    for copy in copies.values():
        dist.broadcast(copy, 0)
    return copies
