"""Less often: local SGD and DiLoCo with several H, beside DDP, in loss, bytes, and time.

Start it with torchrun, on one machine or on several nodes:

    torchrun --standalone --nproc-per-node 4 labs/less_often.py --gbit 0.01 --own-classes

A small classifier is trained with SGD. torch's DDP averages the gradients in every step. With local
SGD the ranks average their weights every H steps, and with DiLoCo they then take an outer step of
SGD with Nesterov momentum (learning rate 0.7, momentum 0.9). Rank 0 prints one row for each:

  all-reduces  the number of all-reduces in the whole run
  kB per step  the weights or gradients that were all-reduced, per step
  from DDP     the largest difference from DDP's weights: rounding for local SGD with H = 1
  loss         the cross-entropy on held-out samples, at the end
  s            the seconds of the run on rank 0

--own-classes gives each rank samples of its own classes only. --gbit slows down the link between
CPU ranks of one machine.

The exit code is 1 if local SGD with H = 1 differs from DDP by more than rounding, or if the ranks'
weights differ after a synchronization.
"""

import argparse
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from labkit.launch.arguments import explained_by, parse_arguments, positive

if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    parser = explained_by(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of model and data (default 0)")
    parser.add_argument(
        "--every",
        type=positive,
        nargs="+",
        default=[1, 4, 16, 64],
        metavar="H",
        help="steps between synchronizations (default 1 4 16 64)",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        default=4,
        help="a run has this many times the least common multiple of all H steps (default 4)",
    )
    parser.add_argument("--lr", type=float, default=0.1, help="of the inner SGD (default 0.1)")
    parser.add_argument("--own-classes", action="store_true", help="each rank has its own classes")
    parser.add_argument(
        "--gbit",
        type=float,
        help="slow the link down to this many Gbit/s (CPU ranks on one machine)",
    )
    ARGUMENTS = parse_arguments(parser)

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from labkit.launch.lab import Place, join_ranks, largest_on_any_rank
from labkit.profiling.slow_link import SlowLink
from labkit.scenarios.own_classes import draw_batch, held_out_loss, seeded_classifier
from labkit.tables import Cell, bound, table
from labkit.testing.compare import largest_difference
from labkit.testing.watch import RecordedCollectives
from miniddp.extras.local_updates import DiLoCo, LocalSGD

ROUNDING = 1e-5
DDP, H1 = "torch DDP", "local SGD, H = 1"


class Run(NamedTuple):
    """One training run, on this rank."""

    weights: list[Tensor]
    launched: list[int]  # bytes of each all-reduce
    seconds: float


def train(
    arguments: argparse.Namespace, place: Place, prepare: Callable[[nn.Module, SGD], Any]
) -> Run:
    """Train in one way. `prepare` returns the module to call and the optimizer to step."""
    rank, world_size, device = place
    module = seeded_classifier(arguments.seed).to(device)
    called, optimizer = prepare(module, SGD(module.parameters(), lr=arguments.lr))
    dist.barrier()
    begin = time.perf_counter()
    with RecordedCollectives() as watch:
        for step in range(arguments.rounds * math.lcm(*arguments.every)):
            batch = draw_batch(rank, world_size, step, arguments.own_classes, arguments.seed)
            inputs, labels = (part.to(device) for part in batch)
            optimizer.zero_grad()
            cross_entropy(called(inputs), labels).backward()
            optimizer.step()
    seconds = time.perf_counter() - begin
    launched = [one.bytes for one in watch.launched if one.op == "allreduce_"]
    return Run([p.detach() for p in module.parameters()], launched, seconds)


def runs(arguments: argparse.Namespace, place: Place, link: Any) -> dict[str, Run]:
    def under_ddp(module: nn.Module, inner: SGD) -> tuple[nn.Module, Any]:
        return DistributedDataParallel(module, process_group=link), inner

    found = {DDP: train(arguments, place, under_ddp)}
    for every in arguments.every:
        for name, kind in (("local SGD", LocalSGD), ("DiLoCo", DiLoCo)):

            def prepare(module: nn.Module, inner: SGD) -> tuple[nn.Module, Any]:
                return module, kind(inner, every, link)  # noqa: B023

            found[f"{name}, H = {every}"] = train(arguments, place, prepare)
    return found


def main(arguments: argparse.Namespace) -> None:
    with join_ranks() as place:
        if arguments.gbit is not None and place.device.type != "cpu":
            raise SystemExit("--gbit slows down a link between CPU ranks; these are on GPUs")
        link = None if arguments.gbit is None else SlowLink(arguments.gbit)
        found = runs(arguments, place, link)
        steps = arguments.rounds * math.lcm(*arguments.every)
        rows: list[list[Cell]] = []
        wrong = []
        for name, run in found.items():
            first = [weights.clone() for weights in run.weights]
            for weights in first:
                dist.broadcast(weights, src=0)
            from_ddp, apart = (
                largest_on_any_rank(largest_difference(run.weights, other))
                for other in (found[DDP].weights, first)
            )
            if apart or (name == H1 and not from_ddp < ROUNDING):
                wrong.append(name)
            kb, loss = sum(run.launched) / steps / 1000, loss_of(run.weights, arguments.seed)
            row = [name, len(run.launched), kb, bound(from_ddp, ROUNDING), loss, run.seconds]
            rows.append(row)
        if place.rank == 0:
            print(f"{place.world_size} ranks, {steps} steps")
            headers = ["", "all-reduces", "kB per step", "from DDP", "loss", "s"]
            print(table(headers, rows, digits=3), flush=True)
    if wrong:
        raise SystemExit(f"not what it should be: {'; '.join(wrong)}")


def loss_of(weights: list[Tensor], seed: int) -> float:
    module = seeded_classifier(seed).to(weights[0].device)
    with torch.no_grad():
        for parameter, trained in zip(module.parameters(), weights, strict=True):
            parameter.copy_(trained)
    return held_out_loss(module, seed)


if __name__ == "__main__":
    main(ARGUMENTS)
