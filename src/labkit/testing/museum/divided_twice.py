"""Divides by the world size before the sum, and again after it.

Claims: divides before the sum, so that half-precision gradients cannot overflow.

The bug: the division after the sum was not removed. The same happens if a communication hook and
the wrapper both divide, or if the loss is divided as well as the gradient.

Symptom: the learning rate is 1/W of the configured one. A sweep finds that a rate W times as large
works better. Adam hides the bug, except in its ε, L2 weight decay, and clipping.

Seen in: communication hooks; stacked libraries that each average.

Kind: a scale bug. Caught by gradients_equal_full_batch.
"""

import torch.distributed as dist

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import Trainer, used_somewhere


class DividedTwice(Trainer):
    def finish(self) -> None:
        for parameter in used_somewhere(self.module):
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


EXHIBIT = Exhibit(DividedTwice, bug="scale", caught_by="gradients_equal_full_batch")
