"""The mean of the means: gradient accumulation and DDP on captions of different lengths.

Start it with torchrun, on any number of ranks:

    torchrun --standalone --nproc-per-node 2 labs/mean_of_means.py

Each rank draws different captions, splits them into micro-batches, and accumulates their gradients
under DDP. Three variants differ only in the denominator of a micro-batch's summed loss:

  each-part    its own token count, times the number of micro-batches: the mean of the means
  own-window   the tokens of all micro-batches of this rank: the well-known fix for accumulation
  whole-step   N / W: the tokens of all micro-batches of all ranks, divided by the number of ranks

Rank 0 compares the gradient of each variant, under torch's DDP and under MiniDDP, with the gradient
of a single process that sees all captions. It prints the ratio of the norms, the cosine, and the
largest difference on any rank. The exit code is 1 if the variant named by --variant misses that
gradient on any rank. It is also 1 if the loss that `miniddp.losses.global_mean` returns
for logging is not the mean over all tokens.
"""

import argparse
import copy
from contextlib import nullcontext
from typing import NamedTuple

from labkit.launch.arguments import explained_by, parse_arguments, positive

VARIANTS = ("each-part", "own-window", "whole-step")
SEED = 0


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    parser = explained_by(__doc__)
    parser.add_argument(
        "--seed", type=int, default=SEED, help=f"seed of the captions (default {SEED})"
    )
    parser.add_argument(
        "--accumulate", type=positive, default=4, help="micro-batches per rank and step (default 4)"
    )
    parser.add_argument(
        "--captions", type=positive, default=2, help="captions per micro-batch (default 2)"
    )
    parser.add_argument(
        "--variant",
        choices=VARIANTS,
        default="whole-step",
        help="the variant that the exit code is about (default whole-step)",
    )
    ARGUMENTS = parse_arguments(parser)

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.lab import Place, join_ranks, largest_on_any_rank
from labkit.scenarios.padded_captioner import (
    Captioner,
    Captions,
    count_tokens,
    draw_captions,
    joined,
    micro_batches,
    to_device,
    trained_captioner,
)
from labkit.tables import bound, table
from labkit.testing.compare import Comparison, gradients, largest_difference, ratio_and_cosine
from miniddp import MiniDDP
from miniddp.losses import global_mean, loss_scale, token_cross_entropy

TOLERANCE = 1e-5  # relative, in float32

Wrapped = DistributedDataParallel | MiniDDP


class VariantOutcome(NamedTuple):
    """What a variant gave.

    `difference` is the largest difference from the full batch's gradient on any rank, relative to
    the largest entry of that gradient.
    """

    variant: str
    wrapper: str
    comparison: Comparison
    difference: float


def full_batch_gradient(
    model: Captioner, captions: Captions, device: torch.device
) -> tuple[float, list[Tensor]]:
    """Loss and gradient of one process that sees all captions, from one backward."""
    model, captions = copy.deepcopy(model), to_device(captions, device)
    loss_sum, count = token_cross_entropy(model(captions.pixels, captions.tokens), captions.targets)
    loss = loss_sum / count
    loss.backward()
    return loss.item(), gradients(model)


def scales(variant: str, counts: list[int], device: torch.device) -> list[float]:
    """The factor of the summed loss, for each micro-batch of this rank."""
    if variant == "each-part":
        return [1 / (count * len(counts)) for count in counts]
    if variant == "own-window":
        return [1 / sum(counts)] * len(counts)
    return [loss_scale(sum(counts), device=device)] * len(counts)


def accumulate_with_variant(
    replica: Wrapped, parts: list[Captions], variant: str, place: Place
) -> float:
    """Leave the variant's gradient in the replica; return the mean loss over all ranks' tokens."""
    counts = [count_tokens(part) for part in parts]
    logged = torch.zeros((), device=place.device)
    for i, scale in enumerate(scales(variant, counts, place.device)):
        part = to_device(parts[i], place.device)
        with nullcontext() if i == len(parts) - 1 else replica.no_sync():
            loss_sum, _ = token_cross_entropy(replica(part.pixels, part.tokens), part.targets)
            (loss_sum * scale).backward()
        logged += loss_sum.detach()
    return global_mean(logged, sum(counts)).item()


def run_variants(
    arguments: argparse.Namespace, place: Place
) -> tuple[float, float, list[VariantOutcome]]:
    """The true loss, the largest relative error of a logged loss, and what each variant gave."""
    share = arguments.accumulate * arguments.captions
    # Captions differ between ranks. Every rank draws all of them, for the single process.
    shares = [draw_captions(share, 1000 * arguments.seed + r) for r in range(place.world_size)]
    parts = micro_batches(shares[place.rank], arguments.captions)
    model = trained_captioner().to(place.device)
    loss, wanted = full_batch_gradient(model, joined(shares), place.device)
    largest = max(gradient.abs().max().item() for gradient in wanted)
    outcomes, apart = [], []
    for variant in VARIANTS:
        for name, wrap in (("torch DDP", DistributedDataParallel), ("MiniDDP", MiniDDP)):
            replica = wrap(copy.deepcopy(model))
            logged = accumulate_with_variant(replica, parts, variant, place)
            apart.append(abs(logged / loss - 1))
            found = gradients(replica)
            difference = largest_on_any_rank(largest_difference(found, wanted) / largest)
            outcomes.append(
                VariantOutcome(variant, name, ratio_and_cosine(found, wanted), difference)
            )
    return loss, largest_on_any_rank(*apart), outcomes


def main(arguments: argparse.Namespace) -> None:
    with join_ranks() as place:
        loss, apart, outcomes = run_variants(arguments, place)
    # `<=` and not `>`: a NaN has to fail, and compares as False.
    right = all(o.difference <= TOLERANCE for o in outcomes if o.variant == arguments.variant)
    logged_right = apart <= TOLERANCE
    if place.rank == 0:
        split = f"{arguments.captions} captions × {arguments.accumulate} parts"
        print(f"{split} × {place.world_size} ranks: the mean loss over all tokens is {loss:.4f}")
        print(f"largest error of the loss that global_mean logs: {bound(apart, TOLERANCE)}\n")
        rows = [
            [o.variant, o.wrapper, *o.comparison, bound(o.difference, TOLERANCE)] for o in outcomes
        ]
        print(table(["variant", "", "ratio", "cosine", "largest difference"], rows))
        if not right:
            print(f"\n{arguments.variant} does not give the gradient of the full batch.")
        if not logged_right:
            print("\nThe logged loss is not the mean over all tokens.")
    if not (right and logged_right):
        raise SystemExit(1)


if __name__ == "__main__":
    main(ARGUMENTS)
