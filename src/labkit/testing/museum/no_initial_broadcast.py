"""Averages every gradient rightly, and lets every rank start from weights of its own.

Claims: data parallelism is nothing but averaged gradients.

The bug: equal steps keep equal replicas equal. They keep different ones different: nobody gave
the ranks the same weights at the start.

Symptom: gradients agree to the bit, and every rank's loss falls, each on its own model. A
checkpoint of rank 0 is as good as the average of gradients taken elsewhere lets it be. Where
every process happens to set the same seed there is no symptom, until one draws a random number
more before it builds the model.

Seen in: training loops by hand, whose author had seeded; models whose buffers are not broadcast.

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
