"""Sum or average: which learning rate trains on several ranks what one process trains?

Start it with torchrun, on 1, 2, 4, 8, or 16 ranks:

    torchrun --standalone --nproc-per-node 2 labs/sum_or_average.py

One process trains a small model for one epoch: 16 samples per step, learning rate 0.01, plain SGD.
All ranks together do the same in eight ways. Each rank's loss is a mean or a sum over its own
samples. The gradients are averaged or summed. The 16 samples of a step are shared by all ranks, or
each rank has 16. Rank 0 prints, for each way:

  per rank, in all   the samples of one step
  ratio              the combined gradient over one process's, with the same samples and loss
  lr                 the learning rate that makes up for it
  miniddp, torch DDP max |Δw| after the epoch, with that learning rate, from one process with the
                     same samples in each step: rounding
  from 16            the same from the one process with 16: rounding where 16 is the number in all,
                     and otherwise the error of the linear scaling rule

Gradients are summed by the comm hook miniddp.extras.comm_hooks.total. The exit code is 1 if on any
rank a ratio is not the expected one, or a distance exceeds rounding where it should not.
"""

from typing import NamedTuple

from labkit.launch.arguments import explained_by, parse_arguments

SEED = 0


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    parser = explained_by(__doc__)
    parser.add_argument(
        "--seed", type=int, default=SEED, help=f"seed of the data and of the model (default {SEED})"
    )
    ARGUMENTS = parse_arguments(parser)

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.lab import Place, join_ranks, largest_on_any_rank, refuse
from labkit.scenarios.sum_and_average import (
    BATCH,
    COMBINATIONS,
    LEARNING_RATE,
    LOSSES,
    Combine,
    Reduction,
    Trained,
    batches,
    combined_factor,
    matching_lr,
    one_epoch,
    seeded_data,
    seeded_model,
)
from labkit.tables import Cell, bound, table
from labkit.testing.compare import largest_difference, ratio_and_cosine
from miniddp.extras.comm_hooks import total
from miniddp.torch_drop_in import DistributedDataParallel as DropIn

ROUNDING = 1e-6
WRAPPERS = {"miniddp": DropIn, "torch DDP": DistributedDataParallel}


class Way(NamedTuple):
    """One of the eight: a rank's loss, how gradients are combined, and its samples per step."""

    loss: Reduction
    combine: Combine
    own_batch: int


class WayResult(NamedTuple):
    """The result of one way, on the rank where it is worst."""

    ratio: float
    apart: list[float]  # from one process with the same samples, for each of WRAPPERS
    from_16: float
    right: bool


def on_one_process(batch: int, loss: Reduction, seed: int, device: torch.device) -> Trained:
    """A mean loss over κ · 16 samples gets κ times the learning rate; a sum grows with them."""
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


def main(seed: int) -> None:
    with join_ranks() as place:
        if BATCH % place.world_size:
            refuse(
                place,
                f"{BATCH} samples cannot be divided evenly among {place.world_size} ranks. Start "
                "it on 1, 2, 4, 8, or 16 ranks, for example\n"
                "    torchrun --standalone --nproc-per-node 2 labs/sum_or_average.py",
            )
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
            print(f"One process: {BATCH} samples per step, lr {LEARNING_RATE:g}.")
            headers = ["loss", "combined", "per rank", "in all", "ratio", "lr"]
            print(table([*headers, *WRAPPERS, "from 16"], rows))
    if wrong:
        ways_in_words = "; ".join(f"{way.loss} loss, {way.combine}" for way in wrong)
        raise SystemExit(f"not what one process does: {ways_in_words}")


if __name__ == "__main__":
    main(ARGUMENTS.seed)
