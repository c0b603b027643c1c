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
without a factor. If ranks compute different losses, the rule of `miniddp.losses` applies.

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

from miniddp.comm import this_group


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Every rank's `tensor` (n, …) as one tensor (W · n, …), in rank order, with gradients.

    The shapes must be equal on all ranks. Costs an all-gather of W times the tensor's bytes, and in
    backward an all-reduce of as many bytes. Raises ValueError on a rank outside the group.
    """
    return _AllGather.apply(tensor, this_group(group))


def all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum of every rank's `tensor`, of the same shape, with gradients.

    Costs an all-reduce of the tensor's bytes, and in backward another. Raises ValueError on a rank
    outside the group.
    """
    return _AllReduce.apply(tensor, this_group(group))


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        own = tensor.contiguous().resolve_conj().resolve_neg()  # what lies in memory is sent
        pieces = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(pieces, own, group=group)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Differentiable, too, for a gradient of the gradient.
        everybody = _AllReduce.apply(gradient, ctx.group)
        return everybody.chunk(ctx.group.size())[ctx.group.rank()], None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllReduce.apply(gradient, ctx.group), None
