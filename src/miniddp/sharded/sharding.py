"""How a parameter is divided among ranks: by the rows of its first dimension, as in FSDP2.

Of R rows, rank r of W holds n = ⌈R / W⌉, from row r·n on; the last ranks hold fewer, or none. A
message consists of one *chunk* per rank. Every chunk has n rows, the missing ones zero, because a
collective moves the same number of bytes for each rank.

Source: `_chunk_with_empty` and `chunk_cat` in torch/distributed/fsdp/_fully_shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
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
        size: the shape of the whole parameter. A scalar counts as one row; fully_shard refuses it.
        group: the ranks that divide it.
        replicas: with HSDP, the ranks that hold the same rows as this one; otherwise None.
    """

    size: torch.Size
    group: dist.ProcessGroup
    replicas: dist.ProcessGroup | None = None

    @property
    def chunk_rows(self) -> int:
        """The rows of a chunk, padding included."""
        return -(-self.total_rows // self.group.size())

    @property
    def total_rows(self) -> int:
        """The rows of the whole parameter; a scalar is one row."""
        return self.size[0] if self.size else 1

    @property
    def chunk_numel(self) -> int:
        """The elements of a chunk, padding included."""
        return self.chunk_rows * self.size[1:].numel()

    @property
    def local_rows(self) -> slice:
        """This rank's rows; none, if the ranks before it hold them all."""
        first = min(self.chunk_rows * self.group.rank(), self.total_rows)
        return slice(first, min(first + self.chunk_rows, self.total_rows))

    def shard(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor of the whole shape: a view."""
        return torch.atleast_1d(whole)[self.local_rows]

    def pad(self, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """This rank's chunk of a message, flat: its rows, and zeros."""
        chunk = shard.new_zeros(self.chunk_numel, dtype=dtype)
        chunk[: shard.numel()] = shard.reshape(-1)
        return chunk

    def unpad(self, chunk: Tensor) -> Tensor:
        """The inverse of `pad`: this rank's rows, as a view."""
        rows = self.local_rows
        shape = torch.Size([rows.stop - rows.start, *self.size[1:]])
        return chunk[: shape.numel()].view(shape)

    def to_chunks(self, whole: Tensor) -> Tensor:
        """A tensor of the whole shape as a message of shape (W, `chunk_numel`)."""
        flat = whole.reshape(-1)
        missing = self.chunk_numel * self.group.size() - flat.numel()
        if missing:
            flat = nn.functional.pad(flat, (0, missing))
        return flat.view(self.group.size(), -1)

    def from_chunks(self, chunks: Tensor) -> Tensor:
        """The inverse of `to_chunks`: a view."""
        return chunks.view(-1)[: self.size.numel()].view(self.size)

    def gather(self, shard: Tensor) -> Tensor:
        """The whole tensor, on every rank, from each rank's rows. Costs one all-gather."""
        return gather_all([shard], [self])[0]


def local_shard(parameter: Tensor, group: dist.ProcessGroup) -> nn.Parameter:
    """This rank's rows of `parameter`, for an optimizer: a view, which has a `sharding`."""
    install_refusal_of_shards()
    sharding = Sharding(parameter.shape, group)
    rows = nn.Parameter(sharding.shard(parameter.detach()))
    rows.sharding = sharding
    return rows


@torch.no_grad()
def gather_all(shards: Sequence[Tensor], shardings: Sequence[Sharding]) -> list[Tensor]:
    """The whole tensors of which each rank has rows, of any dtype. Costs one all-gather."""
    pairs = zip(shards, shardings, strict=True)
    chunks = [sharding.pad(rows, rows.dtype).view(torch.uint8) for rows, sharding in pairs]
    message, group = torch.cat(chunks), shardings[0].group
    gathered = message.new_empty(group.size(), message.numel())
    wait_for(all_gather_single(gathered.view(-1), message, group=group, async_op=True))
    columns = gathered.split([chunk.numel() for chunk in chunks], dim=1)
    return [
        sharding.from_chunks(column.reshape(-1).view(rows.dtype))
        for rows, sharding, column in zip(shards, shardings, columns, strict=True)
    ]


@cache
def install_refusal_of_shards() -> None:
    """From now on, no optimizer of this process may take a shard for a whole matrix."""
    register_optimizer_step_pre_hook(_refuse_shards)


def _refuse_shards(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Before each step of any optimizer: raise ValueError if it would take a shard for a whole."""
    if isinstance(optimizer, LBFGS | Adafactor | Muon):
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if any(hasattr(parameter, "sharding") for parameter in parameters):
            raise ValueError(
                f"{type(optimizer).__name__} computes with whole tensors, and a rank has only its "
                "rows: use an optimizer that works element by element, such as AdamW, or "
                "miniddp.sharded.muon.ShardedMuon"
            )
