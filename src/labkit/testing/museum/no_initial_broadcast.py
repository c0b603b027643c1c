"""Averages every gradient rightly, and lets every rank start from weights of its own.

Claims: averaged gradients are all that data parallelism needs.

The bug: equal steps keep equal replicas equal, and different replicas different. Nothing gave the
ranks the same weights at the start.

Symptom: gradients are bitwise equal on all ranks, and every rank's loss falls, each with its own
model. A checkpoint of rank 0 was trained with gradients that were computed at other weights. If
every process sets the same seed, there is no symptom until one of them draws one more random
number before it builds the model.

Seen in: manual training loops that relied on a seed; models with buffers that are not broadcast.

Kind: drift. Caught by initial_state_is_broadcast.
"""

from torch import Tensor, nn

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import average_gradients


class NoInitialBroadcast:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.module(inputs)

    def finish(self) -> None:
        average_gradients(self.module)


EXHIBIT = Exhibit(NoInitialBroadcast, bug="drift", caught_by="initial_state_is_broadcast")
