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

import torch.distributed as dist

from labkit.testing.museum import parts
from labkit.testing.museum.exhibit import Exhibit


class ClipByOwnPiece(parts.AveragingTrainer):
    def finish_and_clip(self, max_norm: float) -> None:
        gradients = [parameter.grad for parameter in parts.used_somewhere(self.module)]
        flat = parts.one_vector(gradients)
        piece = parts.piece_of_sum(flat / dist.get_world_size())
        parts.fill_from_pieces(flat, piece * (max_norm / piece.norm()).clamp(max=1))
        parts.copy_back(flat, gradients)


EXHIBIT = Exhibit(ClipByOwnPiece, bug="direction", caught_by="clipping_equals_full_batch")
