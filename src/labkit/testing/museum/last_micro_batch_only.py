"""Averages the gradient of the last micro-batch, and leaves the earlier ones local.

Claims: averages each gradient in a hook, and skips the hook during accumulation.

The bug: a tensor's hook (`register_hook`) receives the gradient of *this* backward pass, before it
is added to `.grad`. The gradients of earlier micro-batches in `.grad` are never averaged.

Symptom: none without accumulation. With k micro-batches, (k − 1)/k of the gradient is local, and
the replicas diverge.

Seen in: no_sync added later to a reducer built on gradient hooks.

It also launches in the order in which gradients become ready on this rank, the bug of
launch_when_locally_ready.

Kind: a direction bug. Caught by accumulation_equals_full_batch.
"""

import torch.distributed as dist
from torch import Tensor, nn

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import OverlappingTrainer


class LastMicroBatchOnly(OverlappingTrainer):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        for parameter in module.parameters():
            parameter.register_hook(self.average)

    def average(self, grad: Tensor) -> Tensor:
        if self.accumulating:
            return grad
        grad = grad / dist.get_world_size()
        dist.all_reduce(grad)
        return grad


EXHIBIT = Exhibit(LastMicroBatchOnly, bug="direction", caught_by="accumulation_equals_full_batch")
