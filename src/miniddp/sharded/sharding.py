"""How a parameter is divided among ranks: by the rows of its first dimension, as in FSDP2.

Of R rows, rank r of W holds n = ⌈R / W⌉, from row r·n on; the last ranks hold fewer, or none. In a
message, every rank has n rows, the missing ones zero, because a collective moves the same number of
bytes for each. A message of a parameter is a table: one line per rank, n rows long.

Source: `_chunk_with_empty` and `chunk_cat` in torch/distributed/fsdp/_fully_shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Adafactor, Muon, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from miniddp.comm import wait_for

# New in torch 2.13, which deprecates the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Sharding:
    """The division of one parameter; a sharded parameter has it as its attribute `sharding`.

    Args:
        size: the shape of the whole parameter, with at least one dimension.
        group: the ranks that divide it.
        replicas: with HSDP, the ranks that hold the same rows as this one; otherwise None.
    """

    size: torch.Size
    group: dist.ProcessGroup
    replicas: dist.ProcessGroup | None = None

    @property
    def rows(self) -> int:
        """The rows per rank, padding included."""
        return -(-self.all_rows // self.group.size())

    @property
    def all_rows(self) -> int:
        """The rows of the whole parameter; a scalar is one row."""
        return self.size[0] if self.size else 1

    @property
    def padded(self) -> int:
        """The elements per rank, padding included."""
        return self.rows * self.size[1:].numel()

    @property
    def own(self) -> slice:
        """This rank's rows; none, if there are fewer rows than ranks before it."""
        first = min(self.rows * self.group.rank(), self.all_rows)
        return slice(first, min(first + self.rows, self.all_rows))

    def shard(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor of the whole shape: a view."""
        return torch.atleast_1d(whole)[self.own]

    def pad(self, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """This rank's line of a message: its rows and zeros, flat."""
        line = shard.new_zeros(self.padded, dtype=dtype)
        line[: shard.numel()] = shard.reshape(-1)
        return line

    def table(self, whole: Tensor) -> Tensor:
        """A tensor of the whole shape as a message: W lines of `padded` elements."""
        flat = whole.reshape(-1)
        missing = self.padded * self.group.size() - flat.numel()
        if missing:
            flat = nn.functional.pad(flat, (0, missing))
        return flat.view(self.group.size(), -1)

    def whole(self, table: Tensor) -> Tensor:
        """The inverse of `table`: a view."""
        return table.view(-1)[: self.size.numel()].view(self.size)

    def unpad(self, line: Tensor) -> Tensor:
        """The inverse of `pad`: this rank's rows, as a view."""
        shape = torch.Size([self.own.stop - self.own.start, *self.size[1:]])
        return line[: shape.numel()].view(shape)

    def gather(self, shard: Tensor) -> Tensor:
        """The whole tensor, on every rank, from each rank's rows. Costs one all-gather."""
        return gather_all([shard], [self])[0]


def own_rows(parameter: Tensor, group: dist.ProcessGroup) -> nn.Parameter:
    """This rank's rows of `parameter`, for an optimizer: a view, which has a `sharding`."""
    sharding = Sharding(parameter.shape, group)
    rows = nn.Parameter(sharding.shard(parameter.detach()))
    rows.sharding = sharding
    return rows


@torch.no_grad()
def gather_all(shards: Sequence[Tensor], shardings: Sequence[Sharding]) -> list[Tensor]:
    """The whole tensors of which each rank has rows, of any dtype. Costs one all-gather."""
    pairs = zip(shards, shardings, strict=True)
    lines = [sharding.pad(rows, rows.dtype).view(torch.uint8) for rows, sharding in pairs]
    line, group = torch.cat(lines), shardings[0].group
    gathered = line.new_empty(group.size(), line.numel())
    wait_for(all_gather_single(gathered.view(-1), line, group=group, async_op=True))
    columns = gathered.split([line.numel() for line in lines], dim=1)
    return [
        sharding.whole(column.reshape(-1).view(rows.dtype))
        for rows, sharding, column in zip(shards, shardings, columns, strict=True)
    ]


def refuse_rows(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Before each step of any optimizer: raise ValueError if it would take rows for a matrix."""
    if isinstance(optimizer, LBFGS | Adafactor | Muon):
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if any(hasattr(parameter, "sharding") for parameter in parameters):
            raise ValueError(
                f"{type(optimizer).__name__} computes with whole tensors, and a rank has only its "
                "rows: take an optimizer that works element by element, such as AdamW, or "
                "miniddp.sharded.muon.ShardedMuon"
            )


register_optimizer_step_pre_hook(refuse_rows)
