"""Two collectives with gradients, for losses that use the samples of all ranks.

`torch.distributed`'s own collectives write into a tensor outside autograd. A loss computed from
their output has no gradient with respect to the other ranks' samples, and nothing warns. The
backward of these two functions is a collective as well:

==============  =============================  ================================================
forward         output                         backward: the sum over all ranks of the gradients
==============  =============================  ================================================
`all_gather`    every rank's tensor, stacked   for this rank's tensor
`all_reduce`    the sum of all ranks' tensors  for that sum
==============  =============================  ================================================

Every rank must reach the backward passes, too, in the same order. If every rank computes the same
whole loss L from the output, then Σ L_r = W · L, and DDP's average delivers the gradient of L
without a factor. If ranks compute different losses, the rule of `miniddp.training.losses` applies.

A plain gather with the rank's own slice reinserted needs the factor W instead, and only for the
parameters before the gather, such as an encoder's. A parameter of the loss itself (a learned
temperature) is then W times too large. With a plain gather and only the own rows of the loss, no
factor helps.

`torch.distributed.nn.functional` has the same two functions, deprecated in torch 2.13 in favor of a
private module.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Every rank's `tensor` (n, …) as one tensor (W · n, …), in rank order, with gradients.

    The shapes must be equal on all ranks. Costs an all-gather of W times the tensor's bytes, and in
    backward an all-reduce of as many bytes.
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
