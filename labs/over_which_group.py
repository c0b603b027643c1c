"""Over which group? Right and wrong ways to combine gradients on meshes of 2 × 2 ranks.

Start it with torchrun on 4 ranks:

    torchrun --standalone --nproc-per-node 4 labs/over_which_group.py --mesh tensor

Each mesh has a tiny model. The first way follows the rule: divide by the tokens of the step, then
add up each parameter's gradient over all ranks that hold a copy of it. Every other way is a known
bug. Rank 0 prints one line for each:

  ratio, cosine    the gradients of all ranks, compared with the same shards of one process's
  worst parameter  the one that is farthest off, with its own ratio and cosine
  the last column  the kind of bug, or "copies differ" if copies of a gradient differ between ranks

The exit code is 1 if the rule's gradients are not right, or if another way's are.
"""

from labkit.launch.arguments import explained_by, parse_arguments

MESHES = ("context", "tensor", "expert", "hsdp", "pipeline")


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    parser = explained_by(__doc__)
    parser.add_argument(
        "--mesh", choices=[*MESHES, "all"], default="all", help="the second dimension (default all)"
    )
    ARGUMENTS = parse_arguments(parser)

import torch.distributed as dist

from labkit.launch.lab import join_ranks, refuse
from labkit.scenarios.meshes import WAYS, Judged, Measured, judge, measure
from labkit.tables import table
from miniddp.collectives.mesh import Mesh


def ways_table(judged: list[Judged]) -> str:
    """One line per way; the worst parameter of the right one is not named, as none is wrong."""
    rows = []
    for one in judged:
        numbers = [f"{number:.3f}" for number in one.of_worst]
        worst = ["", "", ""] if one.right else [one.worst, *numbers]
        rows.append([one.way, *one.comparison, *worst, one.kind])
    headers = ["", "ratio", "cosine", "worst parameter", "ratio", "cosine", ""]
    return table(headers, rows, digits=3)


def main(chosen: str) -> None:
    wrong = []
    with join_ranks() as place:
        if place.world_size != 4:
            refuse(
                place,
                f"A mesh of 2 × 2 has 4 ranks, not {place.world_size}. Start it with\n"
                "    torchrun --standalone --nproc-per-node 4 labs/over_which_group.py",
            )
        for name in MESHES if chosen == "all" else [chosen]:
            ways = WAYS[name]
            first, second = next(iter(ways.values())).dimensions
            measured = measure(ways, Mesh(**{first: 2, second: 2}), Mesh())
            of_ranks: list[Measured] = [{}] * place.world_size
            dist.gather_object(measured, of_ranks if place.rank == 0 else None)
            if place.rank == 0:
                judged = judge(of_ranks)
                print(f"{first} × {second}")
                print(ways_table(judged) + "\n", flush=True)
                wrong += [f"{name}: {one.way}" for one in judged[:1] if not one.right]
                wrong += [f"{name}: {one.way}, right" for one in judged[1:] if one.right]
    if wrong:
        raise SystemExit("not as expected: " + "; ".join(wrong))


if __name__ == "__main__":
    main(ARGUMENTS.mesh)
