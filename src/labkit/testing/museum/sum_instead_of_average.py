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

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import Trainer, used_somewhere


class SumInsteadOfAverage(Trainer):
    def finish(self) -> None:
        for parameter in used_somewhere(self.module):
            dist.all_reduce(parameter.grad)


EXHIBIT = Exhibit(SumInsteadOfAverage, bug="scale", caught_by="gradients_equal_full_batch")
