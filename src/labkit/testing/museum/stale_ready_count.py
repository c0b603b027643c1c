"""Counts ready gradients, and does not reset the count after a backward that raised.

Claims: sends one flat all-reduce, from the hook of the last gradient to become ready.

The bug: the count is reset when a step is finished. A backward that raises halfway never gets
there. The next one starts with part of the count done, and sends before its last gradients exist.

Symptom: one wrong step after each batch that was skipped, for example for lack of memory: the
gradients of the first layers stay local. From then on the replicas differ.

Seen in: reducers with a ready count, in training loops that catch an exception and continue.

Kind: a direction bug. Caught by survives_an_exception.
"""

from torch import nn

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import OverlappingTrainer, average_gradients


class StaleReadyCount(OverlappingTrainer):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.reset()
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.ready)

    def reset(self) -> None:
        self.awaited = len(list(self.module.parameters()))
        self.averaged = False

    def ready(self, parameter: nn.Parameter) -> None:
        if not self.accumulating:
            self.awaited -= 1
            if self.awaited == 0:
                self.average()

    def average(self) -> None:
        average_gradients(self.module)
        self.averaged = True

    def finish(self) -> None:
        if not self.averaged:  # some parameter took no part on this rank
            self.average()
        self.reset()


EXHIBIT = Exhibit(StaleReadyCount, bug="direction", caught_by="survives_an_exception")
