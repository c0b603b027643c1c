"""Wraps the model at each call, and keeps the output but not the wrapper.

Claims: uses torch's DistributedDataParallel unchanged, in a one-line forward function; the weights
are broadcast once, at the start, so not at each wrapping (`init_sync=False`).

The bug: DDP's reducer, with its hooks on the gradients, belongs to the wrapper. When the forward
pass has returned, the wrapper is freed, and its hooks with it, so backward finds none. No error, no
warning; only with find_unused_parameters=True an error about a NoneType.

Symptom: every gradient is local, as in bypassed_wrapper: W separate trainings that began with equal
weights, although the wrapper's forward is called at every step.

Seen in: helper functions that wrap, compute a loss, and return it; tests; notebooks.

Kind: a direction bug. Caught by gradients_are_identical.
"""

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import Trainer


class WrapperNotKept(Trainer):
    def __call__(self, inputs: Tensor) -> Tensor:
        return DistributedDataParallel(self.module, init_sync=False)(inputs)


EXHIBIT = Exhibit(WrapperNotKept, bug="direction", caught_by="gradients_are_identical")
