"""Scales each rank's loss by a factor of its own, and averages the scaled gradients.

Claims: keeps gradients within half precision's range by a scale that follows their size.

The bug: the scale follows the size of *this rank's* gradients. In the average, a rank has the
weight of its scale; then each rank divides by its own scale.

Symptom: the first step is right, because all ranks begin with the same scale. Then the replicas
diverge, faster if their data differ more. Double precision would not help: no number overflows.

Seen in: loss scalers that do not share the search for infinities between ranks; a scaler state
that only rank 0 loads from the checkpoint.

Kind: a direction bug. Caught by gradients_are_identical.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import average_gradients, broadcast_from_rank_0

LARGEST_SCALE = 2.0**15  # half of what float16 can hold


class OwnLossScale:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.scale = 2.0**10
        broadcast_from_rank_0(module)

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.module(inputs)

    def loss(self, losses: Tensor, items: int) -> Tensor:
        items_in_step = losses.new_tensor(items)
        dist.all_reduce(items_in_step)
        return losses.sum() * (dist.get_world_size() / items_in_step) * self.scale

    def finish(self) -> None:
        own = [p.grad for p in self.module.parameters() if p.grad is not None]
        largest = torch.stack([gradient.abs().max() for gradient in own]).max()
        average_gradients(self.module)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.scale
        self.scale *= 2.0 ** math.floor(math.log2(LARGEST_SCALE / largest.item()))


EXHIBIT = Exhibit(OwnLossScale, bug="direction", caught_by="gradients_are_identical")
