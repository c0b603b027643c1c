"""Sums the gradients and does not divide.

Claims: all-reduces the gradients; `all_reduce` sums by default.

The bug: the sum of W means is W times the mean of the whole batch.

Symptom: the learning rate is W times the configured one. Adam divides by the gradient's size and
hides it, and gradient clipping hides it whenever it clips. SGD diverges if W times the configured
rate is too large.

Seen in: hand-written loops; a change from DataParallel, which sums over replicas and is right for
one loss over the gathered output.

Kind: a scale bug. Caught by gradients_equal_full_batch.
"""

import torch.distributed as dist
from torch import Tensor, nn

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import broadcast_from_rank_0, used_somewhere


class SumInsteadOfAverage:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        broadcast_from_rank_0(module)

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.module(inputs)

    def finish(self) -> None:
        for parameter in used_somewhere(self.module):
            dist.all_reduce(parameter.grad)


EXHIBIT = Exhibit(SumInsteadOfAverage, bug="scale", caught_by="gradients_equal_full_batch")
