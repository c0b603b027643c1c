"""Clips each rank's gradient, then averages.

Claims: clips the gradient to the requested norm.

The bug: an average of clipped gradients is not a clipped average. Local gradients are larger,
because averaging removes noise, and each rank clips by its own factor.

Symptom: the norm of the result is below the threshold, as it should be, but too far below. Ranks
with large gradients, such as those with rare samples, lose weight.

Seen in: clipping in a gradient hook, or between backward and a hand-written all-reduce.

Kind: a direction bug. Caught by clipping_equals_full_batch.
"""

from torch.nn.utils import clip_grad_norm_

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import AveragingTrainer


class ClipBeforeSync(AveragingTrainer):
    def finish_and_clip(self, max_norm: float) -> None:
        clip_grad_norm_(self.module.parameters(), max_norm)
        self.finish()


EXHIBIT = Exhibit(ClipBeforeSync, bug="direction", caught_by="clipping_equals_full_batch")
