"""The bypassed wrapper: DDP that never averages, and three ways to repair it.

Start it with torchrun, on two ranks:

    torchrun --standalone --nproc-per-node 2 labs/bypassed_wrapper.py

A model is wrapped in DistributedDataParallel, but its loss is computed on the module inside, as in
the pull request "Multi-GPU training does not data-parallelize: the DDP wrapper is bypassed". Rank 0
prints the two tables of its toy, bypassed and fixed. Table 1 has the gradient of one weight on each
rank, Table 2 the largest difference between the ranks' weights. The pull request's numbers are next
to ours.

--fix chooses what the fixed half does:

  all-reduce    average each gradient after backward, as the pull request does
  wrapper       compute the loss through the wrapper
  prepared      call the wrapper only to prepare its reducer: discard the output, and compute
                the loss on the module
  none          nothing: the fixed half shows the bug once more

With another --seed the model starts from other weights, and no printed numbers are compared. The
exit code is 1 if a number differs from the printed one, or if the fixed replicas diverge.
"""

import argparse

from labkit.launch.arguments import explained_by, parse_arguments

SEED = 0
FIXES = ("none", "all-reduce", "wrapper", "prepared")


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    parser = explained_by(__doc__)
    parser.add_argument("--seed", type=int, default=SEED, help=f"the model's (default {SEED})")
    parser.add_argument("--fix", choices=FIXES, default="all-reduce", help="(default all-reduce)")
    ARGUMENTS = parse_arguments(parser)

from labkit.launch.lab import join_ranks, refuse
from labkit.scenarios.unwrapped_loss import (
    PRINTED_DRIFT,
    PRINTED_GRADIENTS,
    WORLD_SIZE,
    BypassedStep,
    Fix,
    trajectory,
)
from labkit.tables import Cell, table

Row = list[Cell]


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


def main(arguments: argparse.Namespace) -> None:
    with join_ranks() as place:
        if place.world_size != WORLD_SIZE:
            refuse(
                place,
                f"The pull request's toy has {WORLD_SIZE} ranks, not {place.world_size}. "
                "Start it with\n"
                f"    torchrun --standalone --nproc-per-node {WORLD_SIZE} labs/bypassed_wrapper.py",
            )
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
        print("\nTable 2: the largest difference between the ranks' weights after the step")
        print(table(["", "step", "ours", *beside], drifts))
        if wrong:
            print("\nNot every number is the one that the pull request printed.")
        if any(step.drift for step in fixed):
            print("\nThe fixed replicas diverge.")
    if wrong or any(step.drift for step in fixed):
        raise SystemExit(1)


if __name__ == "__main__":
    main(ARGUMENTS)
