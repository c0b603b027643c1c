"""Divides each rank's loss by the rank's own sample count, then averages over ranks.

Claims: a mean over tokens that is also right under accumulation: the sum of all micro-batches'
losses over the number of all their tokens.

The bug: that number counts this rank's tokens only. The average then weights every *rank* equally,
so a token on a rank with few tokens counts more than one on a rank with many.

Symptom: none while all ranks have equally many tokens. With sequences of different lengths, or
with masked tokens, short sequences weigh too much. The logged loss is a mean of means and looks
normal.

Seen in: the fix of the same bug for accumulation, applied to several ranks; cross-entropy's default
mean with padding ignored.

Kind: a direction bug. Caught by uneven_items_equal_full_batch.
"""

from torch import Tensor

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import AveragingTrainer


class LocalDenominator(AveragingTrainer):
    def loss(self, losses: Tensor, items: int) -> Tensor:
        return losses.sum() / items


EXHIBIT = Exhibit(LocalDenominator, bug="direction", caught_by="uneven_items_equal_full_batch")
