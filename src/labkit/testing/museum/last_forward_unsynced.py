"""Switches synchronization on again only after the last micro-batch's forward pass.

Claims: accumulates without communication, and synchronizes once, in the last backward.

The bug: DDP decides in its *forward* whether the next backward is synchronized. The flag that says
"accumulating" is cleared after the last backward, not before the last forward.

Symptom: none without accumulation. With it, nothing is ever sent: steps are fast, and the replicas
diverge.

Seen in: trainers that enter no_sync around the forward pass only, or through a flag of their own;
an accumulation count that is off by one; an epoch with a shorter last window.

Kind: a direction bug. Caught by accumulation_equals_full_batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.testing.museum.exhibit import Exhibit


class LastForwardUnsynced:
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


EXHIBIT = Exhibit(LastForwardUnsynced, bug="direction", caught_by="accumulation_equals_full_batch")
