"""Skips the parameters that have no gradient.

Claims: one all-reduce per parameter that was used, and none for the others.

The bug: which parameters were used depends on this rank's data. A rank that skips one is a
collective behind the others, and its next gradient is added to another parameter's.

Symptom: none while every rank uses every parameter. Otherwise an abort if sizes differ, or a hang
at the end of the step. If ranks skip different parameters of equal shape, gradients are silently
wrong.

Seen in: `if p.grad is not None:` in hand-written training loops, including tutorials.

Kind: a deadlock. Caught by missing_counts_as_zeros.
"""

import torch.distributed as dist

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import Trainer


class NoneSkipped(Trainer):
    def finish(self) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()
                dist.all_reduce(parameter.grad)


EXHIBIT = Exhibit(NoneSkipped, bug="deadlock", caught_by="missing_counts_as_zeros")
