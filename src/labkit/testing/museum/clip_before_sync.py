"""Clips each rank's gradient, then averages.

Claims: clips the gradient to the norm that was asked for.

The bug: a clipped average is not an average of clipped gradients. Local gradients are larger
(they have the noise that the average removes) and are clipped each by a factor of its own.

Symptom: the norm of the result is below the threshold, as it should be; only too far below, and
ranks with large gradients, rare examples among them, have lost their weight.

Seen in: clipping in a gradient hook, or between backward and an all-reduce by hand.

Kind: a direction bug. Caught by clipping_equals_full_batch.
"""

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import average_gradients, broadcast_from_rank_0


class ClipBeforeSync:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        broadcast_from_rank_0(module)

    def __call__(self, inputs: Tensor) -> Tensor:
        return self.module(inputs)

    def finish(self) -> None:
        average_gradients(self.module)

    def finish_and_clip(self, max_norm: float) -> None:
        clip_grad_norm_(self.module.parameters(), max_norm)
        self.finish()


EXHIBIT = Exhibit(ClipBeforeSync, bug="direction", caught_by="clipping_equals_full_batch")
