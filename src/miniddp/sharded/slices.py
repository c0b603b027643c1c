"""Slices for ZeRO: parameters side by side, cut into W equal pieces; rank r owns the r-th.

A cut may fall into a parameter. Each rank's optimizer holds views of the pieces that the rank owns,
so it updates the parameters themselves; an all-gather then brings the others' pieces. Any optimizer
that works element by element takes slices as well as whole parameters. One that needs whole
matrices does not (`miniddp.sharded.muon`).
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from miniddp.comm import wait_for
from miniddp.sharded.sharding import all_gather_single


class Piece(NamedTuple):
    """Elements [start, stop) of parameter `index`, flat, which this rank owns."""

    index: int
    start: int
    stop: int
    shard: nn.Parameter  # a view of them

    def of(self, tensor: Tensor) -> Tensor:
        """The piece's elements of a tensor that is laid out like the parameter: a view."""
        return flat_view(tensor)[self.start : self.stop]


class Slices:
    """How the ranks of `group` divide `parameters`, which have one dtype and device.

    Args:
        parameters: dense ones, the same on every rank.
        group: the ranks.

    Raises ValueError if the elements of a parameter share memory or leave gaps.
    """

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup):
        self.parameters, self.group = list(parameters), group
        self.offsets = [0, *accumulate(parameter.numel() for parameter in self.parameters)]
        self.size = -(-self.offsets[-1] // group.size())  # elements per rank, padding included
        first = self.size * group.rank()
        self.pieces: list[Piece] = []
        for index, parameter in enumerate(self.parameters):
            offset, end = self.offsets[index], self.offsets[index + 1]
            start, stop = max(first, offset) - offset, min(first + self.size, end) - offset
            last = index == len(self.parameters) - 1
            # Every rank has a piece, if an empty one.
            if start < stop or (last and not self.pieces):
                start = min(start, stop)
                shard = nn.Parameter(flat_view(parameter.detach())[start:stop])
                shard.sharding = self  # so that its norm counts as a part of one over `group`
                self.pieces.append(Piece(index, start, stop, shard))

    @torch.no_grad()
    def gather(self) -> None:
        """Send the owned pieces to all ranks, and take the others'. Costs one all-gather."""
        own = self.parameters[0].new_zeros(self.size)
        owned = torch.cat([piece.shard for piece in self.pieces])
        own[: owned.numel()] = owned
        everything = own.new_empty(self.size * self.group.size())
        wait_for(all_gather_single(everything, own, group=self.group, async_op=True))
        for parameter, offset in zip(self.parameters, self.offsets, strict=False):
            values = everything[offset : offset + parameter.numel()]
            flat_view(parameter.data).copy_(values)


def flat_view(tensor: Tensor) -> Tensor:
    """All elements in the order in which they lie in memory, as a view."""
    covered = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != covered:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps "
                "or shares memory, so it cannot be cut into pieces: register its clone()"
            )
        covered *= size
    return tensor.as_strided((tensor.numel(),), (1,))
