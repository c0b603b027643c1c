"""The flat ring and the hierarchical all-reduce on the real links between this machine's ranks.

Start it with torchrun on two or more nodes; on one machine, for example

    labs/two_hosts.sh --rate 1gbit torchrun --nproc-per-node 4 labs/two_nodes.py

Each all-reduce sums the same gradients, of a few MiB. The output has three numbers for each:

1. The bytes that left a node. They are counted at every send. If the link is a separate interface
   (Linux, named by GLOO_SOCKET_IFNAME), the system's counter is read, too. The counter includes
   what protocols add (headers and acknowledgements) and everything else that ranks send.
2. The median time of the slowest rank.
3. Both, relative to the hierarchical all-reduce.

A column that has no numbers here is left out.

The exit code is 1 if the sums differ between ranks.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from labkit.launch.arguments import explained_by, parse_arguments, positive

MIB = 2**20


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    parser = explained_by(__doc__)
    parser.add_argument("--mib", type=float, default=4, help="MiB of gradients (default 4)")
    parser.add_argument(
        "--repeat", type=positive, default=5, help="timed all-reduces of each kind (default 5)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the gradients (default 0)")
    ARGUMENTS = parse_arguments(parser)

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.launch.lab import Place, join_ranks
from labkit.profiling.sent_bytes import counted
from labkit.tables import table
from miniddp.collectives import Nodes, hierarchical_all_reduce, ring_all_reduce


class AllReduceCost(NamedTuple):
    """The cost of one all-reduce.

    `counted` and `on_the_wire` are bytes that left a node; the second is None if no counter of the
    system was read. `same` is False if a rank got other bits.
    """

    counted: float
    on_the_wire: float | None
    seconds: float
    same: bool


def sent_by_the_interface() -> int | None:
    """Bytes that the interface to the other nodes has sent since it came up; None if unknown."""
    name, counters = os.environ.get("GLOO_SOCKET_IFNAME", ""), Path("/proc/self/net/dev")
    if name in ("", "lo") or not counters.exists():
        return None
    for line in counters.read_text().splitlines():
        interface, _, numbers = line.partition(":")
        if interface.strip() == name:
            return int(numbers.split()[8])
    return None


def sent_to_other_nodes(
    ranks_per_node: int, all_reduce: Callable[[Tensor], None], x: Tensor
) -> int:
    """Run `all_reduce`; return the bytes that this rank sent to ranks on other nodes."""
    here = dist.get_rank() // ranks_per_node
    with counted() as sent:
        all_reduce(x)
    return sum(nbytes for peer, nbytes in sent.items() if peer // ranks_per_node != here)


def wait_for_the_gpu(place: Place) -> None:
    """On a GPU a call only launches work: without this, the clock would measure the launch.

    Not yet run on a GPU.
    """
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)


def measure_on_two_nodes(
    arguments: argparse.Namespace,
    place: Place,
    ranks_per_node: int,
    all_reduce: Callable[[Tensor], None],
) -> AllReduceCost:
    generator = torch.Generator().manual_seed(arguments.seed + place.rank)
    gradient = torch.randn(int(arguments.mib * MIB / 4), generator=generator).to(place.device)

    total = gradient.clone()
    counted = torch.tensor(float(sent_to_other_nodes(ranks_per_node, all_reduce, total)))
    dist.all_reduce(counted)
    of_first = total.clone()
    dist.broadcast(of_first, src=0)
    differs = torch.tensor(float(not torch.equal(total, of_first)))
    dist.all_reduce(differs)

    seconds, wire = [], []
    for _ in range(arguments.repeat):
        total = gradient.clone()
        dist.barrier()
        wait_for_the_gpu(place)
        before, begin = sent_by_the_interface(), time.perf_counter()
        all_reduce(total)
        wait_for_the_gpu(place)
        mine = torch.tensor(time.perf_counter() - begin)
        dist.barrier()
        after = sent_by_the_interface()
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        seconds.append(mine.item())
        if before is not None and after is not None:
            wire.append(after - before)
    nodes = place.world_size // ranks_per_node
    return AllReduceCost(
        counted.item() / nodes,
        statistics.median(wire) if wire else None,
        statistics.median(seconds),
        differs.item() == 0,
    )


def main(arguments: argparse.Namespace) -> None:
    with join_ranks() as place:
        ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = Nodes.groups(ranks_per_node)
        ways: dict[str, Callable[[Tensor], None]] = {
            "flat ring": ring_all_reduce,
            "hierarchical": lambda tensor: hierarchical_all_reduce(tensor, nodes=nodes),
        }
        found = {
            name: measure_on_two_nodes(arguments, place, ranks_per_node, way)
            for name, way in ways.items()
        }
    count, base = place.world_size // ranks_per_node, found["hierarchical"]
    if place.rank == 0:
        print(f"nodes {count}, ranks per node {ranks_per_node}, {arguments.mib:g} MiB of gradients")
        others = place.world_size - ranks_per_node
        costs = list(found.values())
        columns: dict[str, list[Any]] = {
            "": list(found),
            "MiB out of a node": [one.counted / MIB for one in costs],
            "on the wire": [one.on_the_wire / MIB for one in costs if one.on_the_wire is not None],
            "ms": [one.seconds * 1000 for one in costs],
            "bytes ÷": [one.counted / base.counted for one in costs if others],
            "time ÷": [one.seconds / base.seconds for one in costs],
            "same bits": [one.same for one in costs],
        }
        known = {header: cells for header, cells in columns.items() if cells}
        print(table(list(known), list(zip(*known.values(), strict=True)), digits=2))
        if others:
            theory = (place.world_size - 1) / others
            print(f"theory of the bytes: {theory:.2f} to 1", flush=True)
        else:
            print(
                "All ranks are on one node, and no byte leaves it. Two nodes on this machine:\n"
                "    python -m labkit.launch.nodes --nodes 2 --nproc-per-node 2 labs/two_nodes.py",
                flush=True,
            )
    if not all(one.same for one in found.values()):
        raise SystemExit("the sums differ between ranks")


if __name__ == "__main__":
    main(ARGUMENTS)
