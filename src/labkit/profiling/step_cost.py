"""What one training step sends and what a rank holds after it: counted, not computed.

    cost = step_cost(model, optimizer, lambda model: model(batch).square().mean())

Works for torch's DDP, ZeRO optimizers, and sharded modules, torch's and miniddp's.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from labkit.testing.watch import LaunchedCollective, RecordedCollectives

_PASSES = 2  # of the ring, for an all-reduce; other collectives need one


class StepCost(NamedTuple):
    """Bytes that this rank sends in a step, and bytes that it holds between steps."""

    sent: float
    parameters: int
    gradients: int
    state: int

    @property
    def held(self) -> int:
        """All bytes between steps, before the gradients are cleared."""
        return self.parameters + self.gradients + self.state


def step_cost(
    model: nn.Module, optimizer: Optimizer, loss_of: Callable[[nn.Module], Tensor]
) -> StepCost:
    """Take two steps, and return the cost of the second; the first one may plan buckets.

    Every rank must call it. The optimizer's own copies of parameters are found in its attribute
    `inner`, or `optim` as in torch's `ZeroRedundancyOptimizer`. Collectives must be those of the
    default group.
    """
    for _ in range(2):
        optimizer.zero_grad()
        with RecordedCollectives() as recorded:
            loss_of(model).backward()
            optimizer.step()
    inner = getattr(optimizer, "inner", getattr(optimizer, "optim", optimizer))
    own = [parameter for group in inner.param_groups for parameter in group["params"]]
    parameters = list(model.parameters())
    gradients = [p.grad for p in (*own, *parameters) if p.grad is not None]
    state = [value for values in inner.state.values() for value in values.values()]
    tensors = [value for value in state if isinstance(value, Tensor) and value.ndim]
    sent = ring_bytes(recorded.launched, dist.get_world_size())
    return StepCost(sent, held(parameters), held(gradients), held(tensors))


def ring_bytes(launched: Sequence[LaunchedCollective], world_size: int) -> float:
    """Bytes that each of `world_size` ranks sends if every collective is a ring."""
    total = 0.0
    for one in launched:
        numbers = max(torch.Size(shape).numel() for shape in one.shapes)
        passes = _PASSES if one.op.startswith("allreduce") else 1
        total += passes * numbers * getattr(torch, one.dtype).itemsize
    return total * (world_size - 1) / world_size


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes of all distinct storages; of a DTensor, this rank's part."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    storages = [tensor.detach().untyped_storage() for tensor in local]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())
