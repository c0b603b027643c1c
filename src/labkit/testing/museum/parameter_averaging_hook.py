"""Averages parameters, because its hook's argument is named grad.

Claims: averages each gradient as soon as it is ready, in a few lines.

The bug: `register_post_accumulate_grad_hook` passes the *parameter* to its hook; the gradient is in
`parameter.grad`. The parameters are averaged, in place, during backward, and no gradient ever is.

Symptom: each rank follows its own gradient and is pulled back to the mean at the next backward. The
model trains, and the loss curve is close to the right one. After each step the replicas differ.

Seen in: tutorials and homework on data parallelism from scratch.

It also launches in the order in which gradients become ready on this rank, the bug of
launch_when_locally_ready.

Kind: a direction bug. Caught by gradients_are_identical.
"""

import torch.distributed as dist
from torch import Tensor, nn

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import Trainer


class ParameterAveragingHook(Trainer):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, grad: Tensor) -> None:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()


EXHIBIT = Exhibit(ParameterAveragingHook, bug="direction", caught_by="gradients_are_identical")
