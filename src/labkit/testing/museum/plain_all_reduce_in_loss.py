"""Back-propagates a loss that went through a plain all-reduce.

Claims: every rank has the global mean loss, so every rank has its gradient.

The bug: `dist.all_reduce` moves values and no gradients. Its backward is the identity, so each rank
differentiates only its own term, over a denominator that counts all terms. The average over ranks
then divides by W a second time.

Symptom: the loss is exactly that of one process, on all ranks. The learning rate is 1/W of the
configured one. Adam hides the bug, except in its ε, L2 weight decay, and clipping.

Seen in: losses reduced for the log before backward; contrastive losses on gathered features;
correlation matrices summed over ranks.

Kind: a scale bug. Caught by gradients_equal_full_batch.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import AveragingTrainer


class PlainAllReduceInLoss(AveragingTrainer):
    def loss(self, losses: Tensor, items: int) -> Tensor:
        own = losses.sum()
        totals = torch.stack([own.detach(), own.new_tensor(items)])
        dist.all_reduce(totals)
        total, items_in_step = totals
        return (own + (total - own).detach()) / items_in_step


EXHIBIT = Exhibit(PlainAllReduceInLoss, bug="scale", caught_by="gradients_equal_full_batch")
