"""Divides by the ranks of one sharded replica, then adds up the replicas.

Claims: averages over a hybrid mesh (HSDP): a reduce-scatter inside a replica, an all-reduce between
replicas.

The bug: with an explicit divide factor, the all-reduce between replicas is a sum. The factor has to
be the number of all ranks.

Symptom: the norm in the log is R times too large with R replicas. Clipping is too strong; Adam
hides the rest.

Seen in: `set_gradient_divide_factor` in FSDP2, set to the number of shards.

Kind: a scale bug with two replicas, so on four ranks. Caught by gradients_equal_full_batch.
"""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from labkit.testing.museum import parts
from labkit.testing.museum.exhibit import Exhibit


class DividedByOneReplica(parts.Trainer):
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


EXHIBIT = Exhibit(DividedByOneReplica, "scale", "gradients_equal_full_batch", ranks_needed=4)
