"""Sum or average: which learning rate does what one process does, and does it to the last digit?

Start it with torchrun, on 1, 2, 4, 8 or 16 ranks:

    torchrun --standalone --nproc-per-node 2 labs/sum_or_average.py

One process trains a small model for one epoch: 16 samples a step, learning rate 0.01, plain SGD.
All ranks together do the same, in eight ways: each rank's loss a mean or a sum over its own
samples; the gradients averaged or summed; the 16 samples of a step shared by all ranks, or 16
samples for each. Rank 0 prints, for each way:

  a rank, all    the samples of one step: of each rank, and of all together
  ratio          of the combined gradient to that of one process with the same samples and loss
  lr             the learning rate that makes up for it
  miniddp, torch DDP
                 max |Δw| after the epoch, with that learning rate, from one process with the same
                 samples in each step: rounding
  from 16        the same from the one process with 16: rounding as long as all is 16, and
                 otherwise what the linear scaling rule is worth here

The comm hook `miniddp.extras.comm_hooks.total` sums the gradients. The exit code is 1 if, on any
rank, a ratio is not the expected one or a distance that should be rounding is larger.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.book.tables import Cell, bound, table
from labkit.launch.lab import Place, join_ranks, largest_on_any_rank, parse_arguments
from labkit.scenarios.sum_and_average import (
    BATCH,
    COMBINATIONS,
    LEARNING_RATE,
    LOSSES,
    SEED,
    Combine,
    Loss,
    Trained,
    batches,
    combined_factor,
    matching_lr,
    one_epoch,
    seeded_data,
    seeded_model,
)
from labkit.testing.compare import largest_difference, ratio_and_cosine
from miniddp import MiniDDP
from miniddp.extras.comm_hooks import total

ROUNDING = 1e-6
WRAPPERS = {"miniddp": MiniDDP, "torch DDP": DistributedDataParallel}


class Way(NamedTuple):
    """One of the eight: which loss, what becomes of the gradients, how many samples a rank."""

    loss: Loss
    combine: Combine
    own_batch: int


class WayResult(NamedTuple):
    """What one way came to, on the rank where it came out worst."""

    ratio: float
    apart: list[float]  # from one process with the same samples, for each of WRAPPERS
    from_16: float
    right: bool


def arguments_of_this_lab() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed", type=int, default=SEED, help=f"seed of the data and of the model (default {SEED})"
    )
    return parse_arguments(parser)


def on_one_process(batch: int, loss: Loss, seed: int, device: torch.device) -> Trained:
    """A mean loss of κ · 16 samples is given κ times the learning rate; a sum has grown itself."""
    lr = LEARNING_RATE * (batch / BATCH if loss == "mean" else 1)
    return one_epoch(seeded_model(seed).to(device), batches(seeded_data(seed), batch), loss, lr)


def on_all_ranks(way: Way, wrap: type[nn.Module], seed: int, place: Place) -> Trained:
    rank, world_size, device = place
    wrapped = wrap(seeded_model(seed).to(device))
    if way.combine == "sum":
        wrapped.register_comm_hook(None, total)
    loader = batches(seeded_data(seed), way.own_batch, rank, world_size)
    lr = matching_lr(way.loss, way.combine, world_size, way.own_batch * world_size)
    return one_epoch(wrapped, loader, way.loss, lr)


def train_and_compare(way: Way, seed: int, place: Place) -> WayResult:
    """Train one way, on all ranks and on this process alone. The same result on every rank."""
    same = on_one_process(way.own_batch * place.world_size, way.loss, seed, place.device)
    sixteen = on_one_process(BATCH, way.loss, seed, place.device)
    found = [on_all_ranks(way, wrap, seed, place) for wrap in WRAPPERS.values()]

    apart = [largest_on_any_rank(largest_difference(f.weights, same.weights)) for f in found]
    from_16 = largest_on_any_rank(largest_difference(found[-1].weights, sixteen.weights))
    factor = combined_factor(way.loss, way.combine, place.world_size)
    ratios = [ratio_and_cosine(one.gradient, same.gradient) for one in found]
    off = [largest_on_any_rank(abs(ratio / factor - 1), 1 - cosine) for ratio, cosine in ratios]
    # Each on its own: Python's max leaves out a NaN that does not come first.
    right = all(figure < ROUNDING for figure in (*off, *apart))
    return WayResult(ratios[-1].ratio, apart, from_16, right)


def main() -> None:
    seed = arguments_of_this_lab().seed
    with join_ranks() as place:
        if BATCH % place.world_size:
            refuse_world_size(place)
        shares = dict.fromkeys((BATCH // place.world_size, BATCH))
        ways = [Way(loss, c, share) for share in shares for loss in LOSSES for c in COMBINATIONS]
        rows: list[list[Cell]] = []
        wrong: list[Way] = []
        for way in ways:
            samples = way.own_batch * place.world_size
            result = train_and_compare(way, seed, place)
            lr = matching_lr(way.loss, way.combine, place.world_size, samples)
            distances = [bound(d, ROUNDING) for d in (*result.apart, result.from_16)]
            rows.append([*way, samples, result.ratio, f"{lr:g}", *distances])
            if not result.right:
                wrong.append(way)
        if place.rank == 0:
            print(f"One process: {BATCH} samples a step, lr {LEARNING_RATE:g}.")
            headers = ["loss", "combined", "a rank", "all", "ratio", "lr", *WRAPPERS, "from 16"]
            print(table(headers, rows))
    if wrong:
        ways_in_words = "; ".join(f"{way.loss} loss, {way.combine}" for way in wrong)
        raise SystemExit(f"not what one process does: {ways_in_words}")


def refuse_world_size(place: Place) -> NoReturn:
    if place.rank == 0:
        print(
            f"{BATCH} samples cannot be dealt evenly to {place.world_size} ranks. Start it on 1, "
            "2, 4, 8 or 16 ranks, for example\n"
            "    torchrun --standalone --nproc-per-node 2 labs/sum_or_average.py"
        )
    raise SystemExit(1)


if __name__ == "__main__":
    main()
