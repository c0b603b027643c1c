"""Two collectives that autograd knows, for losses that look at the items of all ranks.

`torch.distributed`'s own collectives write into a tensor and tell autograd nothing: a loss computed
from what they delivered has no gradient with respect to the other ranks' items, in silence. Here
both are functions, whose backward is the collective that mathematics asks for:

==============  =============================  =============================================
forward         out                            backward
==============  =============================  =============================================
`all_gather`    every rank's tensor, stacked   sum over the ranks of what they say about mine
`all_reduce`    the sum of all ranks' tensors  sum over the ranks of what they say about it
==============  =============================  =============================================

Both backwards are collectives, too: every rank has to reach them, in the same order. Where every
rank computes the same loss from what it received, the backward adds W equal terms; DDP's average
takes the W away again. So such a loss needs no factor, and one made of a plain gather needs W.

torch has the same: `torch.distributed.nn.functional`, deprecated in 2.13, and the private module
that its warning points to.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Every rank's `tensor` (n, …) as one tensor (W · n, …), in rank order, with gradients.

    The shapes have to be the same on all ranks. Costs an all-gather of W times the tensor's bytes,
    and in backward an all-reduce of as many.
    """
    return _AllGather.apply(tensor, group)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum of every rank's `tensor`, of the same shape, with gradients.

    Costs an all-reduce of the tensor's bytes, and in backward another.
    """
    return _AllReduce.apply(tensor, group)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, tensor.contiguous(), group=group)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        everybody = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(everybody, group=ctx.group)
        mine = everybody.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)]
        return mine, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
