"""The bypassed wrapper: DDP that never averages, and three ways to make it.

Start it with torchrun, on two ranks:

    torchrun --standalone --nproc-per-node 2 labs/bypassed_wrapper.py

A model is wrapped in DistributedDataParallel, and its loss computed on the module inside, as in the
pull request "Multi-GPU training does not data-parallelize: the DDP wrapper is bypassed". Rank 0
prints its two tables, bypassed and fixed, with the pull request's figure beside ours: the gradient
of one weight on each rank, and how far the two ranks' weights have drifted apart.

What --fix puts into the fixed half:

  all-reduce    average each gradient after backward, as the pull request does
  wrapper       compute the loss through the wrapper
  armed         call the wrapper once before the loss is computed on the module
  none          nothing: the fixed half shows the bug once more

With another --seed the model starts from other weights, and there is no printed figure to compare
with. The exit code is 1 if a figure differs from the printed one, or if the fixed replicas drift.
"""

from __future__ import annotations

import argparse
from typing import NoReturn

from labkit.book.tables import Cell, table
from labkit.launch.lab import Place, join_ranks, parse_arguments
from labkit.scenarios.unwrapped_loss import (
    FIXES,
    PRINTED_DRIFT,
    PRINTED_GRADIENTS,
    SEED,
    WORLD_SIZE,
    BypassedStep,
    Fix,
    trajectory,
)

Row = list[Cell]


def arguments_of_this_lab() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=SEED, help=f"the model's (default {SEED})")
    parser.add_argument("--fix", choices=FIXES, default="all-reduce", help="(default all-reduce)")
    return parse_arguments(parser)


def gradient_rows(name: str, fix: Fix, steps: list[BypassedStep], compare: bool) -> list[Row]:
    rows: list[Row] = []
    for i, (step, printed) in enumerate(zip(steps, PRINTED_GRADIENTS[fix], strict=True)):
        for rank, (ours, theirs) in enumerate(zip(step.gradients, printed, strict=True)):
            row: Row = [name, i + 1, rank, f"{ours:.5f}"]
            rows.append([*row, *against(f"{theirs:.5f}", row[-1])] if compare else row)
    return rows


def drift_rows(name: str, fix: Fix, steps: list[BypassedStep], compare: bool) -> list[Row]:
    rows: list[Row] = []
    for i, (step, theirs) in enumerate(zip(steps, PRINTED_DRIFT[fix], strict=True)):
        row: Row = [name, i + 1, f"{step.drift:.6f}"]
        rows.append([*row, *against(f"{theirs:.6f}", row[-1])] if compare else row)
    return rows


def against(theirs: str, ours: Cell) -> Row:
    return [theirs, theirs == ours]


def main() -> None:
    arguments = arguments_of_this_lab()
    with join_ranks() as place:
        if place.world_size != WORLD_SIZE:
            refuse_other_world_sizes(place)
        bypassed = trajectory("none", seed=arguments.seed, device=place.device)
        fixed = trajectory(arguments.fix, seed=arguments.seed, device=place.device)

    compare = arguments.seed == SEED
    halves: list[tuple[str, Fix, list[BypassedStep]]] = [
        ("bypassed", "none", bypassed),
        # Every fix has to give the numbers that the pull request printed for its own.
        (f"fixed: {arguments.fix}", "all-reduce", fixed),
    ]
    gradients = [row for half in halves for row in gradient_rows(*half, compare)]
    drifts = [row for half in halves for row in drift_rows(*half, compare)]
    beside = ["printed", "equal"] if compare else []
    wrong = compare and not all(row[-1] for row in gradients + drifts)
    if place.rank == 0:
        print("Table 1: the gradient of weight[0] after backward")
        print(table(["", "step", "rank", "ours", *beside], gradients))
        print("\nTable 2: how far the ranks' weights are apart after the step")
        print(table(["", "step", "ours", *beside], drifts))
        if wrong:
            print("\nNot every figure is the one that the pull request printed.")
        if any(step.drift for step in fixed):
            print("\nThe fixed replicas drift apart.")
    if wrong or any(step.drift for step in fixed):
        raise SystemExit(1)


def refuse_other_world_sizes(place: Place) -> NoReturn:
    if place.rank == 0:
        print(
            f"The pull request's toy has {WORLD_SIZE} ranks, not {place.world_size}. "
            "Start it with\n"
            f"    torchrun --standalone --nproc-per-node {WORLD_SIZE} labs/bypassed_wrapper.py"
        )
    raise SystemExit(1)


if __name__ == "__main__":
    main()
