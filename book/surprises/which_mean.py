"""For which_mean.ipynb: gradients of each loss and way, and training with Adam."""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from labkit.book.figures import RANKS, TRUTH, WRONG
from labkit.launch import RanksError, run_ranks
from labkit.scenarios import sampled_completions as sampled
from labkit.scenarios.sampled_completions import Completions, Loss, Way
from labkit.testing import gradient_of, gradients, ratio_and_cosine

Shares = Sequence[Sequence[Completions]]  # [rank][micro-batch]


def shares_of(found: Completions, parts: Sequence[slice], ranks: int) -> Shares:
    """The micro-batches `parts` of `found`, as consecutive windows of equal length."""
    steps = len(parts) // ranks
    return [
        [sampled.rows(found, part) for part in parts[rank * steps : (rank + 1) * steps]]
        for rank in range(ranks)
    ]


def full_batch(policy: nn.Module, found: Completions, loss: Loss) -> list[Tensor]:
    """The gradient of one process that has all completions."""
    count = loss.count(found)
    return gradient_of(policy, lambda model: loss.total(model, found) / count)


def gradients_by_way(
    policy: nn.Module,
    shares: Shares,
    right_step: Callable[[nn.Module, Sequence[Completions], Loss], None],
    wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
    ways: Sequence[Way] = sampled.WAYS,
) -> list[dict[tuple[str, Way], list[Tensor]]]:
    """Per rank, the gradient for each loss and each of `ways`, under `wrap`.

    `right_step` is the way "all ranks"; the others are those of `sampled.accumulate`.
    """

    def work(rank: int) -> dict[tuple[str, Way], list[Tensor]]:
        found = {}
        for name, loss in sampled.LOSSES.items():
            for way in ways:
                replica = wrap(copy.deepcopy(policy))
                if way == "all ranks":
                    right_step(replica, shares[rank], loss)
                else:
                    sampled.accumulate(replica, shares[rank], loss, way)
                found[name, way] = gradients(replica)
        return found

    return run_ranks(work, len(shares))


def gradients_divided(
    policy: nn.Module, shares: Shares, loss: Loss, divide_by: Sequence[float]
) -> list[list[Tensor]]:
    """Per rank, the gradient if micro-batch k is divided by `divide_by[k]`."""

    def work(rank: int) -> list[Tensor]:
        ddp = DistributedDataParallel(copy.deepcopy(policy))
        for k, (part, denominator) in enumerate(
            zip(shares[rank], divide_by, strict=True)
        ):
            with nullcontext() if k == len(divide_by) - 1 else ddp.no_sync():
                (loss.total(ddp, part) / denominator).backward()
        return gradients(ddp)

    return run_ranks(work, len(shares))


def deals_with_truncated(found: Completions) -> dict[str, Shares]:
    """48 completions on two ranks with two micro-batches each, as sampled and with
    only truncated ones on rank 1, and on three ranks.
    """
    ends = (found.tokens == sampled.END).any(dim=1)
    whole = int(ends.sum())
    truncated_last = ends.long().argsort(descending=True, stable=True).tolist()
    deals = {
        "as sampled": (list(range(48)), (0, 12, 24, 36, 48)),
        "rank 1 has none": (truncated_last, (0, whole // 2, whole, whole + 5, 48)),
        "on three ranks": (list(range(48)), (0, 5, 16, 24, 31, 40, 48)),
    }
    return {
        name: shares_of(
            sampled.rows(found, order),
            [slice(*cut) for cut in pairwise(cuts)],
            len(cuts) // 2,
        )
        for name, (order, cuts) in deals.items()
    }


def advantages_on_ranks(
    advantages: Callable[[Tensor, Tensor], Tensor],
    everything: Completions,
    mine: Sequence[list[int]],
) -> list[tuple[Tensor, Tensor]]:
    """Per rank, which has the completions `mine[rank]`: what `advantages` returns, and
    what is right.

    Raises AssertionError if a collective fails, as it does with tensors of other sizes.
    """

    def work(rank: int) -> tuple[Tensor, Tensor]:
        rewards, groups = everything.rewards, everything.groups
        means = torch.stack([rewards[groups == group].mean() for group in groups])
        found = advantages(rewards[mine[rank]], groups[mine[rank]])
        return found, (rewards - means)[mine[rank]]

    try:
        return run_ranks(work, len(mine), timeout=20)
    except RuntimeError as error:
        if isinstance(error, RanksError) or "gloo" in str(error):
            sizes = f"ranks with {', '.join(str(len(own)) for own in mine)} completions"
            raise AssertionError(f"a collective fails on {sizes}: {error}") from None
        raise


class Curves(NamedTuple):
    """Per step: the full batch's loss, and ratio and cosine to its gradient."""

    loss: list[float]
    ratio: list[float]
    cosine: list[float]


def trained(shares: Shares, way: Way, factor: float, steps: int) -> Curves:
    """Fine-tune a new policy with clipping and Adam; `factor` multiplies the loss."""
    total, count = sampled.LOSSES["SFT"]
    found = sampled.joined([part for own in shares for part in own])
    scaled = Loss(lambda model, part: factor * total(model, part), count)

    def work(rank: int) -> Curves:
        policy, curves = sampled.Policy(seed=5), Curves([], [], [])
        ddp = DistributedDataParallel(policy)
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            sampled.accumulate(ddp, shares[rank], scaled, way)
            if rank == 0:
                true = full_batch(policy, found, Loss(total, count))
                ratio, cosine = ratio_and_cosine(gradients(ddp), true)
                loss = total(policy, found).item() / count(found)
                for values, value in zip(curves, (loss, ratio, cosine), strict=True):
                    values.append(value)
            clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
        return curves

    return run_ranks(work, len(shares))[0]


def draw_curves(runs: dict[str, Curves]) -> Figure:
    """The losses on the left, and the ratios of the same steps on the right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3.0), facecolor="white")
    styles = zip(
        (TRUTH, WRONG, RANKS[0]), ("-", "--", ":"), (1.5, 2.5, 2.5), strict=True
    )
    for (name, curves), (color, line, width) in zip(runs.items(), styles, strict=True):
        style = {"color": color, "ls": line, "lw": width}
        left.plot(curves.loss, **style, label=name)
        right.plot(curves.ratio, **style)
    left.set(title="loss", xlabel="optimizer step")
    right.set(
        title="gradient: ratio to the true one", xlabel="optimizer step", ylim=(0, 1.5)
    )
    left.legend(fontsize=9)
    return figure
