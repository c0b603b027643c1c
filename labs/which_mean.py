"""Which mean: the gradients of SFT, DPO, GRPO, Dr. GRPO, DAPO, and GSPO with three denominators.

Start it with torchrun, on any number of ranks:

    torchrun --standalone --nproc-per-node 2 labs/which_mean.py

A tiny policy samples groups of four completions, which are dealt to the ranks and their
micro-batches. Each loss is a sum over a micro-batch, divided by a count of tokens, sequences,
pairs, or prompts. The three ways differ in the count:

  own micro-batch   its own count, times the number of micro-batches: a mean of means
  own window        the count of this rank's micro-batches
  all ranks         N / W: the count of all micro-batches on all ranks, over the number of ranks

Rank 0 compares the gradients under torch's DDP and under MiniDDP with those of a single process
that has all completions. It prints ratio, cosine, and the largest difference on any rank. The exit
code is 1 if the way named by --way misses that gradient for any loss.
"""

import argparse
import copy
from typing import NamedTuple

from labkit.launch.arguments import explained_by, parse_arguments, positive

WAYS = ("own micro-batch", "own window", "all ranks")


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    parser = explained_by(__doc__)
    parser.add_argument("--seed", type=int, default=6, help="seed of the completions (default 6)")
    parser.add_argument("--prompts", type=positive, default=12, help="groups of four (default 12)")
    parser.add_argument(
        "--accumulate", type=positive, default=2, help="micro-batches per rank and step (default 2)"
    )
    parser.add_argument(
        "--equal",
        choices=("sequences", "tokens"),
        default="sequences",
        help="what all micro-batches have the same number of (default sequences)",
    )
    parser.add_argument(
        "--way",
        choices=WAYS,
        default="all ranks",
        help="the way that the exit code is about (default: all ranks)",
    )
    ARGUMENTS = parse_arguments(parser)

from torch.nn.parallel import DistributedDataParallel

from labkit.launch.lab import Place, join_ranks, largest_on_any_rank
from labkit.scenarios import sampled_completions as sampled
from labkit.tables import bound, table
from labkit.testing.compare import (
    Comparison,
    gradient_of,
    gradients,
    largest_difference,
    ratio_and_cosine,
)
from miniddp import MiniDDP

TOLERANCE = 1e-9  # relative, in float64
WRAPPERS = {"torch DDP": DistributedDataParallel, "MiniDDP": MiniDDP}


class Outcome(NamedTuple):
    """What one way gave; `difference` is relative to the true gradient's largest entry."""

    loss: str
    way: str
    wrapper: str
    comparison: Comparison
    difference: float


def run_ways(arguments: argparse.Namespace, place: Place) -> list[Outcome]:
    """Every loss, way, and wrapper. Ends the run if the completions are too few for all ranks."""
    sampler = sampled.Policy()
    found = sampled.sample_completions(sampler, arguments.prompts, arguments.seed)
    parts = place.world_size * arguments.accumulate
    if len(found.prompts) < 2 * parts:
        raise SystemExit(
            f"{len(found.prompts)} completions are fewer than one pair for each of {parts} "
            f"micro-batches: use --prompts {-(-parts // 2)} or more"
        )
    first = place.rank * arguments.accumulate
    mine = sampled.deal(found, parts, arguments.equal)[first : first + arguments.accumulate]
    found = sampled.Completions(*(each.to(place.device) for each in found))
    window = [sampled.rows(found, part) for part in mine]
    policy = sampled.moved_policy(sampler).to(place.device)
    outcomes = []
    for name, loss in sampled.LOSSES.items():
        count = loss.count(found)
        wanted = gradient_of(policy, lambda model: loss.total(model, found) / count)  # noqa: B023
        largest = max(gradient.abs().max().item() for gradient in wanted)
        for way in WAYS:
            for wrapper, wrap in WRAPPERS.items():
                replica = wrap(copy.deepcopy(policy))
                sampled.accumulate(replica, window, loss, way)
                own = gradients(replica)
                off = largest_on_any_rank(largest_difference(own, wanted) / largest)
                outcomes.append(Outcome(name, way, wrapper, ratio_and_cosine(own, wanted), off))
    return outcomes


def main(arguments: argparse.Namespace) -> None:
    with join_ranks() as place:
        outcomes = run_ways(arguments, place)
    # `<=` and not `>`: a NaN has to fail, and compares as False.
    wrong = [o for o in outcomes if o.way == arguments.way and not o.difference <= TOLERANCE]
    if place.rank == 0:
        split = f"{arguments.accumulate} micro-batches × {place.world_size} ranks"
        print(f"{4 * arguments.prompts} completions, {split}, equal {arguments.equal}\n")
        rows = [[*o[:3], *o.comparison, bound(o.difference, TOLERANCE)] for o in outcomes]
        print(table(["loss", "way", "", "ratio", "cosine", "largest difference"], rows))
        if wrong:
            names = ", ".join(dict.fromkeys(o.loss for o in wrong))
            print(f"\n{arguments.way} does not give the gradient of one process for: {names}")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main(ARGUMENTS)
