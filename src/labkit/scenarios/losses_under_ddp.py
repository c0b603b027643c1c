"""Losses that ranks back-propagate under DDP, each compared with the loss that was meant.

    def mean(model, rows):
        return F.mse_loss(model(inputs[rows]), targets[rows])

    def summed(model, rows):
        return F.mse_loss(model(inputs[rows]), targets[rows], reduction="sum")

    print(verdict_table(judge(model, {"mean": mean, "sum": summed}, meant=mean, counts=[4, 4])))

A loss is a function of the model and of the rows that a rank owns. On a rank the model is wrapped
in DDP and the rows are that rank's; for `meant` it is the bare model in one process, and all rows.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.launch import run_ranks
from labkit.testing import gradient_of, gradients, verdicts
from labkit.testing.verdict import Verdict

LossOnRows = Callable[[nn.Module, slice], Tensor]


def rows_of_ranks(counts: Sequence[int]) -> list[slice]:
    """Consecutive rows: rank 0 owns the first `counts[0]`, rank 1 the next `counts[1]`, …"""
    ends = list(accumulate(counts))
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def judge(
    model: nn.Module,
    losses: Mapping[str, LossOnRows],
    meant: LossOnRows,
    counts: Sequence[int],
    only: Callable[[Tensor], bool] | None = None,
    find_unused_parameters: bool = False,
) -> list[Verdict]:
    """Back-propagate each of `losses` under DDP on `len(counts)` ranks; compare the gradients.

    The model is copied for each loss, and is left as it is. `only` selects the gradients to
    compare; by default all are. `find_unused_parameters` is DDP's. Raises what a rank raises.
    Costs one start of the ranks.
    """
    rows = rows_of_ranks(counts)

    def on_rank(rank: int) -> dict[str, list[Tensor]]:
        found = {}
        for name, loss in losses.items():
            ddp = DistributedDataParallel(
                copy.deepcopy(model), find_unused_parameters=find_unused_parameters
            )
            loss(ddp, rows[rank]).backward()
            found[name] = [g for g in gradients(ddp) if only is None or only(g)]
        return found

    true = gradient_of(model, lambda alone: meant(alone, slice(None)))
    true = [gradient for gradient in true if only is None or only(gradient)]
    return verdicts(run_ranks(on_rank, len(counts)), true)
