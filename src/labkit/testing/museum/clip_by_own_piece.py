"""Averages the gradients, then clips each rank's piece of them by the piece's own norm.

Claims: clips a sharded gradient to the requested norm, without another message.

The bug: a piece is shorter than the whole gradient, and each rank clips by another factor. The
squares of all pieces have to be summed first.

Symptom: the norm in the log depends on the number of ranks. Gradients are clipped less than they
should be, and point in another direction.

Seen in: clipping the local tensors of a sharded model with `clip_grad_norm_`, or in a loop of one's
own; torch's function is right for sharded tensors, but not for their local parts.

Kind: a direction bug. Caught by clipping_equals_full_batch.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import (
    average_gradients,
    broadcast_from_rank_0,
    copy_back,
    one_vector,
)


class ClipByOwnPiece:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        broadcast_from_rank_0(module)

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.module(inputs)

    def finish(self) -> None:
        average_gradients(self.module)

    def finish_and_clip(self, max_norm: float) -> None:
        self.finish()
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat = one_vector(gradients)
        piece = flat.tensor_split(dist.get_world_size())[dist.get_rank()]
        clipped = piece * (max_norm / piece.norm()).clamp(max=1)
        # The other pieces come from their ranks: zeros here, and a sum.
        flat = torch.zeros_like(flat)
        flat.tensor_split(dist.get_world_size())[dist.get_rank()].copy_(clipped)
        dist.all_reduce(flat)
        copy_back(flat, gradients)


EXHIBIT = Exhibit(ClipByOwnPiece, bug="direction", caught_by="clipping_equals_full_batch")
