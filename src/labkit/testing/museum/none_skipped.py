"""Skips the parameters that have no gradient.

Claims: one all-reduce for each parameter that took part, no time wasted on the others.

The bug: "took part" is a matter of this rank's data. A rank that skips a parameter is one
collective behind the others, and its next gradient is added to another parameter's.

Symptom: none while every rank uses every parameter. Then an abort over sizes that do not match, or
a hang at the end of the step; or, if ranks skip different parameters of equal shapes, wrong
gradients in silence.

Seen in: `if p.grad is not None:` in training loops by hand, tutorials among them.

Kind: a deadlock. Caught by missing_counts_as_zeros.
"""

import torch.distributed as dist
from torch import Tensor, nn

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import broadcast_from_rank_0


class NoneSkipped:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        broadcast_from_rank_0(module)

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.module(inputs)

    def finish(self) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()
                dist.all_reduce(parameter.grad)


EXHIBIT = Exhibit(NoneSkipped, bug="deadlock", caught_by="missing_counts_as_zeros")
