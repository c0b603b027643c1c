"""Scales each rank's loss by its own factor, then averages the scaled gradients.

Claims: keeps gradients within half precision's range, with a scale that follows their size.

The bug: the scale follows the size of *this rank's* gradients. In the average, each rank is
weighted by its scale; then each rank divides by its own.

Symptom: the first step is right, because all ranks begin with the same scale. After that the
replicas diverge, and faster the more their data differ. No number overflows, so higher precision
does not help.

Seen in: loss scalers that do not share their search for infinities between ranks; a scaler state
loaded from the checkpoint on rank 0 only.

Kind: a direction bug. Caught by gradients_are_identical.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import Trainer, average_gradients

LARGEST_SCALE = 2.0**15  # half of what float16 can hold


class OwnLossScale(Trainer):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.scale = 2.0**10

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
