"""Reduce-scatters after every micro-batch, and replaces its pieces instead of adding to them.

Claims: accumulates in pieces (ZeRO-2), so that no rank keeps a whole gradient.

The bug: every backward counts as the last one of its step. The optimizer sees one micro-batch.

Symptom: none without accumulation. With it, the norm in the log is too small. All ranks agree.

Seen in: trainers that accumulate on top of an engine whose own count of micro-batches is 1.

Kind: a direction bug. Caught by accumulation_equals_full_batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from labkit.testing.museum import parts
from labkit.testing.museum.exhibit import Exhibit


class EarlierPiecesLost(parts.Trainer):
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


EXHIBIT = Exhibit(EarlierPiecesLost, bug="direction", caught_by="accumulation_equals_full_batch")
