"""Wraps the model where it is called, and keeps the output but not the wrapper.

Claims: uses torch's DistributedDataParallel unchanged, in a forward function of one line. The
weights are broadcast once, at the start, not at each wrapping (`init_sync=False`).

The bug: DDP's reducer, with its hooks on the gradients, belongs to the wrapper. The wrapper is
freed when the forward pass returns, and its hooks with it, so backward finds none. There is no
error and no warning; only find_unused_parameters gives an error, about a NoneType.

Symptom: every gradient is local, as in bypassed_wrapper: W unrelated training runs that began with
the same weights, although the wrapper's forward runs in every step.

Seen in: helper functions that wrap, compute a loss, and return it; tests; notebooks.

Kind: a direction bug. Caught by gradients_are_identical.
"""

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import broadcast_from_rank_0


class WrapperNotKept:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        broadcast_from_rank_0(module)

    def __call__(self, inputs: Tensor) -> Tensor:
        return DistributedDataParallel(self.module, init_sync=False)(inputs)


EXHIBIT = Exhibit(WrapperNotKept, bug="direction", caught_by="gradients_are_identical")
