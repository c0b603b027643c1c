"""Calls the model inside the wrapper, not the wrapper.

Claims: uses torch's DistributedDataParallel unchanged.

The bug: DDP prepares its reducer in its own forward. A loss computed through `.module` (to call a
method of the model: compute_loss, generate, a training_step) does not prepare it, and backward
leaves every gradient local. There is no error and no warning.

Symptom: W unrelated training runs that began with the same weights. Each loss curve looks like one
process with 1/W of the data, and a checkpoint holds rank 0's model only.

Seen in: trainers that unwrap the model to call one of its methods.

Kind: a direction bug. Caught by gradients_are_identical.
"""

from contextlib import AbstractContextManager

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.testing.museum.exhibit import Exhibit


class BypassedWrapper:
    def __init__(self, module: nn.Module) -> None:
        self.model = DistributedDataParallel(module, find_unused_parameters=True)

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.model.module(inputs)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync()


EXHIBIT = Exhibit(BypassedWrapper, bug="direction", caught_by="gradients_are_identical")
