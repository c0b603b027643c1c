"""Gives every parameter a gradient: zeros if there is none.

Claims: all ranks call the same collectives, whichever parameters they used.

The bug: it also fills parameters that no rank used. To an optimizer, zeros are not None: momentum
and Adam's moments still move the weight, and weight decay shrinks it. Plain SGD does neither.

Symptom: gradients are bitwise right. With weight decay, momentum, or Adam, weights move that one
process would leave alone: experts not chosen, heads of tasks not drawn, layers that were dropped.

Seen in: the usual fix for the hang of skipped parameters; optimizers' set_to_none=False.

Kind: a phantom update. Caught by none_stays_none.
"""

import torch
import torch.distributed as dist

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import Trainer


class ZerosForNone(Trainer):
    def finish(self) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


EXHIBIT = Exhibit(ZerosForNone, bug="phantom update", caught_by="none_stays_none")
