"""torch's DistributedDataParallel, used wrongly."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.testing.museum.parts import Exhibit, Trainer


class BypassedWrapper:
    """Calls the model inside the wrapper, not the wrapper.

    Claims: uses torch's DistributedDataParallel unchanged.

    The bug: DDP prepares its reducer in its own forward. A loss computed through `.module` (to
    reach a method such as compute_loss, generate, or training_step) skips that, and backward leaves
    every gradient local. No error, no warning.

    Symptom: W separate trainings that began with equal weights. Each loss curve is that of one
    process with 1/W of the data, and the checkpoint is rank 0's alone.

    Seen in: trainers that unwrap the model to call one of its methods.
    """

    def __init__(self, module: nn.Module) -> None:
        self.model = DistributedDataParallel(module, find_unused_parameters=True)

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.model.module(inputs)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync()


class WrapperNotKept(Trainer):
    """Wraps the model at each call, and keeps the output but not the wrapper.

    Claims: uses torch's DistributedDataParallel unchanged, in a one-line forward function; the
    weights are broadcast once, at the start, so not at each wrapping (`init_sync=False`).

    The bug: DDP's reducer, with its hooks on the gradients, belongs to the wrapper. When the
    forward pass has returned, the wrapper is freed, and its hooks with it, so backward finds none.
    No error, no warning; only with find_unused_parameters=True an error about a NoneType.

    Symptom: every gradient is local, as in bypassed_wrapper: W separate trainings that began with
    equal weights, although the wrapper's forward is called at every step.

    Seen in: helper functions that wrap, compute a loss, and return it; tests; notebooks.
    """

    def __call__(self, inputs: Tensor) -> Tensor:
        return DistributedDataParallel(self.module, init_sync=False)(inputs)


class LastForwardUnsynced:
    """Switches synchronization on again only after the last micro-batch's forward pass.

    Claims: accumulates without communication, and synchronizes once, in the last backward.

    The bug: DDP decides in its *forward* whether the next backward is synchronized. The flag that
    says "accumulating" is cleared after the last backward, not before the last forward.

    Symptom: none without accumulation. With it, nothing is ever sent: steps are fast, and the
    replicas diverge.

    Seen in: trainers that enter no_sync around the forward pass only, or through a flag of their
    own; an accumulation count that is off by one; an epoch with a shorter last window.
    """

    def __init__(self, module: nn.Module) -> None:
        self.model = DistributedDataParallel(module, find_unused_parameters=True)
        self.accumulating = False

    def __call__(self, inputs: Tensor) -> Tensor:
        with self.model.no_sync() if self.accumulating else nullcontext():
            return self.model(inputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.accumulating = True
        yield

    def finish(self) -> None:
        self.accumulating = False


EXHIBITS = (
    Exhibit(BypassedWrapper, "direction", "gradients_are_identical"),
    Exhibit(WrapperNotKept, "direction", "gradients_are_identical"),
    Exhibit(LastForwardUnsynced, "direction", "accumulation_equals_full_batch"),
)
