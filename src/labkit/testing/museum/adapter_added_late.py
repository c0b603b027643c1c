"""Reduces the parameters that existed when the module was sharded, and no adapter added later.

Claims: shards the gradient of every parameter.

The bug: the list of parameters is made once, when the module is sharded. Each rank trains a later
adapter (LoRA) on its own data. Here the adapter is the module's last parameter.

Symptom: the adapter's gradients differ between the ranks, and only rank 0's adapter is saved. If
all else is frozen, nothing is synchronized.

Seen in: adapters, heads, and embeddings that are added after `fully_shard`, or after DDP.

Kind: a direction bug. Caught by gradients_are_identical.
"""

import torch.distributed as dist
from torch import nn

from labkit.testing.museum import parts
from labkit.testing.museum.exhibit import Exhibit


class AdapterAddedLate(parts.Trainer):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.sharded = set(list(module.parameters())[:-1])

    def finish(self) -> None:
        for parameter in parts.used_somewhere(self.module):
            if parameter in self.sharded:
                piece = parts.piece_of_sum(parameter.grad / dist.get_world_size())
                parts.fill_from_pieces(parameter.grad, piece)


EXHIBIT = Exhibit(AdapterAddedLate, bug="direction", caught_by="gradients_are_identical")
