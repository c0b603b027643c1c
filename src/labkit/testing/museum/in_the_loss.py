"""Losses that are wrong on several ranks; the gradients are averaged rightly."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.testing.museum.parts import AveragingTrainer, Exhibit, Trainer, average_gradients


class LocalDenominator(AveragingTrainer):
    """Divides each rank's loss by the rank's own sample count, then averages over ranks.

    Claims: a mean over tokens that is also right under accumulation: the sum of all micro-batches'
    losses over the number of all their tokens.

    The bug: that number counts this rank's tokens only. The average then weights every *rank*
    equally, so a token on a rank with few tokens counts more than one on a rank with many.

    Symptom: none while all ranks have equally many tokens. With sequences of different lengths, or
    with masked tokens, short sequences weigh too much. The logged loss is a mean of means and looks
    normal.

    Seen in: the fix of the same bug for accumulation, applied to several ranks; cross-entropy's
    default mean with padding ignored.
    """

    def loss(self, losses: Tensor, items: int) -> Tensor:
        return losses.sum() / items


class PlainAllReduceInLoss(AveragingTrainer):
    """Back-propagates a loss that went through a plain all-reduce.

    Claims: every rank has the global mean loss, so every rank has its gradient.

    The bug: `dist.all_reduce` moves values and no gradients. Its backward is the identity, so each
    rank differentiates only its own term, over a denominator that counts all terms. The average
    over ranks then divides by W a second time.

    Symptom: the loss is exactly that of one process, on all ranks. The learning rate is 1/W of the
    configured one. Adam hides the bug, except in its ε, L2 weight decay, and clipping.

    Seen in: losses reduced for the log before backward; contrastive losses on gathered features;
    correlation matrices summed over ranks.
    """

    def loss(self, losses: Tensor, items: int) -> Tensor:
        own = losses.sum()
        totals = torch.stack([own.detach(), own.new_tensor(items)])
        dist.all_reduce(totals)
        total, items_in_step = totals
        return (own + (total - own).detach()) / items_in_step


LARGEST_SCALE = 2.0**15  # half of what float16 can hold


class OwnLossScale(Trainer):
    """Scales each rank's loss by its own factor, then averages the scaled gradients.

    Claims: keeps gradients within half precision's range, with a scale that follows their size.

    The bug: the scale follows the size of *this rank's* gradients. In the average, each rank is
    weighted by its scale; then each rank divides by its own.

    Symptom: the first step is right, because all ranks begin with the same scale. After that the
    replicas diverge, and faster the more their data differ. No number overflows, so higher
    precision does not help.

    Seen in: loss scalers that do not share their search for infinities between ranks; a scaler
    state loaded from the checkpoint on rank 0 only.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.scale = 2.0**10

    def loss(self, losses: Tensor, items: int) -> Tensor:
        items_in_step = losses.new_tensor(items)
        dist.all_reduce(items_in_step)
        return losses.sum() * (dist.get_world_size() / items_in_step) * self.scale

    def finish(self) -> None:
        own = [p.grad for p in self.module.parameters() if p.grad is not None]
        largest = torch.stack([gradient.abs().max() for gradient in own]).max()
        average_gradients(self.module)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.scale
        self.scale *= 2.0 ** math.floor(math.log2(LARGEST_SCALE / largest.item()))


EXHIBITS = (
    Exhibit(LocalDenominator, "direction", "uneven_items_equal_full_batch"),
    Exhibit(PlainAllReduceInLoss, "scale", "gradients_equal_full_batch"),
    Exhibit(OwnLossScale, "direction", "gradients_are_identical"),
)
