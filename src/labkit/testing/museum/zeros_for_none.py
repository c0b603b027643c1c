"""Gives every parameter a gradient, zeros if there is none.

Claims: all ranks call the same collectives, whichever parameters they used.

The bug: it does so for parameters too that no rank used. To an optimizer zeros are not None: Adam
applies its momentum, weight decay shrinks the weight.

Symptom: gradients are right to the bit. Experts that were not chosen, heads of tasks that were
not drawn, layers that were dropped: they fade and drift, where one process would leave them
alone.

Seen in: the usual cure for the hang of skipped parameters; optimizers' set_to_none=False.

Kind: a phantom update. Caught by none_stays_none.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import broadcast_from_rank_0


class ZerosForNone:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        broadcast_from_rank_0(module)

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.module(inputs)

    def finish(self) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


EXHIBIT = Exhibit(ZerosForNone, bug="phantom update", caught_by="none_stays_none")
