"""Calls the model inside the wrapper, not the wrapper.

Claims: uses torch's DistributedDataParallel unchanged.

The bug: DDP prepares its reducer in its own forward. A loss computed through `.module` (to reach a
method such as compute_loss, generate, or training_step) skips that, and backward leaves every
gradient local. No error, no warning.

Symptom: W separate trainings that began with equal weights. Each loss curve is that of one process
with 1/W of the data, and the checkpoint is rank 0's alone.

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
