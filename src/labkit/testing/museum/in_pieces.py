"""Averages of which each rank keeps a piece: sharded gradients."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from labkit.testing.museum import parts
from labkit.testing.museum.parts import Exhibit


class ClipByOwnPiece(parts.AveragingTrainer):
    """Averages the gradients, then clips each rank's piece of them by the piece's own norm.

    Claims: clips a sharded gradient to the requested norm, without another message.

    The bug: a piece is shorter than the whole gradient, and each rank clips by another factor. The
    squares of all pieces have to be summed first.

    Symptom: the norm in the log depends on the number of ranks. Gradients are clipped less than
    they should be, and point in another direction.

    Seen in: clipping the local tensors of a sharded model with `clip_grad_norm_`, or in a loop of
    one's own; torch's function is right for sharded tensors, but not for their local parts.
    """

    def finish_and_clip(self, max_norm: float) -> None:
        gradients = [parameter.grad for parameter in parts.used_somewhere(self.module)]
        flat = parts.one_vector(gradients)
        piece = parts.piece_of_sum(flat / dist.get_world_size())
        parts.fill_from_pieces(flat, piece * (max_norm / piece.norm()).clamp(max=1))
        parts.copy_back(flat, gradients)


class EarlierPiecesLost(parts.Trainer):
    """Reduce-scatters after every micro-batch, and replaces its pieces instead of adding to them.

    Claims: accumulates in pieces (ZeRO-2), so that no rank keeps a whole gradient.

    The bug: every backward counts as the last one of its step. The optimizer sees one micro-batch.

    Symptom: none without accumulation. With it, the norm in the log is too small. All ranks agree.

    Seen in: trainers that accumulate on top of an engine whose own count of micro-batches is 1.
    """

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield
        self.reduce()

    def reduce(self) -> None:
        used, world_size = parts.used_somewhere(self.module), dist.get_world_size()
        self.pieces = {p: parts.piece_of_sum(p.grad / world_size) for p in used}
        self.module.zero_grad()

    def finish(self) -> None:
        self.reduce()
        for parameter, piece in self.pieces.items():
            parameter.grad = torch.empty_like(parameter)
            parts.fill_from_pieces(parameter.grad, piece)


class DividedByOneReplica(parts.Trainer):
    """Divides by the ranks of one sharded replica, then adds up the replicas.

    Claims: averages over a hybrid mesh (HSDP): a reduce-scatter inside a replica, an all-reduce
    between replicas.

    The bug: with an explicit divide factor, the all-reduce between replicas is a sum. The factor
    has to be the number of all ranks.

    Symptom: the norm in the log is R times too large with R replicas. Clipping is too strong; Adam
    hides the rest.

    Seen in: `set_gradient_divide_factor` in FSDP2, set to the number of shards.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        replicas = 2 if dist.get_world_size() % 4 == 0 else 1
        device = next(module.parameters()).device.type
        mesh = init_device_mesh(device, (replicas, dist.get_world_size() // replicas))
        self.replicas, self.shards = mesh.get_all_groups()

    def finish(self) -> None:
        for parameter in parts.used_somewhere(self.module):
            piece = parts.piece_of_sum(parameter.grad / self.shards.size(), self.shards)
            dist.all_reduce(piece, group=self.replicas)
            parts.fill_from_pieces(parameter.grad, piece, self.shards)


class AdapterAddedLate(parts.Trainer):
    """Reduces the parameters that existed when the module was sharded, and no adapter added later.

    Claims: shards the gradient of every parameter.

    The bug: the list of parameters is made once, when the module is sharded. Each rank trains a
    later adapter (LoRA) on its own data. Here the adapter is the module's last parameter.

    Symptom: the adapter's gradients differ between the ranks, and only rank 0's adapter is saved.
    If all else is frozen, nothing is synchronized.

    Seen in: adapters, heads, and embeddings that are added after `fully_shard`, or after DDP.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.sharded = set(list(module.parameters())[:-1])

    def finish(self) -> None:
        for parameter in parts.used_somewhere(self.module):
            if parameter in self.sharded:
                piece = parts.piece_of_sum(parameter.grad / dist.get_world_size())
                parts.fill_from_pieces(parameter.grad, piece)


EXHIBITS = (
    Exhibit(ClipByOwnPiece, "direction", "clipping_equals_full_batch"),
    Exhibit(EarlierPiecesLost, "direction", "accumulation_equals_full_batch"),
    Exhibit(DividedByOneReplica, "scale", "gradients_equal_full_batch", ranks_needed=4),
    Exhibit(AdapterAddedLate, "direction", "gradients_are_identical"),
)
