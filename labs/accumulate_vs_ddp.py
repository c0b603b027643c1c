"""Accumulated or distributed: the same gradients on every rank.

Start it with torchrun, one sample per rank:

    torchrun --standalone --nproc-per-node 4 labs/accumulate_vs_ddp.py

Rank 0 prints a table with the gradient norms of a small model, computed in three ways. Where ranks
differ, there is one table for each of them:

  accumulated   on this rank alone, over all samples: one backward each, each loss divided by their
                number
  miniddp       from this rank's sample only, then miniddp.manual.average_gradients
  torch DDP     from this rank's sample only, in torch.nn.parallel.DistributedDataParallel

With 4 ranks and seed 42 the numbers are those of the forum thread "Unexplained behaviour in
accumulate gradients vs in a ddp setting". The exit code is 1 if the three do not agree.

With --unseeded the data are drawn before the seed is set: every rank then has its own data,
different in each run, and the columns do not agree. The thread's whole program, with both of its
bugs, is labs/accumulate_vs_ddp_lightning.py.
"""

import argparse
import copy

from labkit.launch.arguments import explained_by, parse_arguments

SEED = 42


if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and errors are printed at once.
    parser = explained_by(__doc__)
    parser.add_argument(
        "--seed", type=int, default=SEED, help=f"seed of the data and of the model (default {SEED})"
    )
    parser.add_argument(
        "--unseeded",
        action="store_true",
        help="draw the data before the seed is set: different data on every rank and in every run",
    )
    ARGUMENTS = parse_arguments(parser)

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from labkit.launch.lab import Place, join_ranks, largest_on_any_rank
from labkit.scenarios.toy_captioner import (
    draw_toy_data,
    gradient_norms,
    seeded_toy_captioner,
    seeded_toy_data,
)
from labkit.tables import bound, table
from labkit.testing.compare import gradients, largest_difference
from miniddp.manual import average_gradients


def accumulate_alone(model: nn.Module, data: TensorDataset, device: torch.device) -> nn.Module:
    """All samples on this rank alone: one backward each, and the gradients add up."""
    for pixels, captions in data:
        loss = model(pixels[None].to(device), captions[None].to(device))
        (loss / len(data)).backward()
    return model


def compare_on_this_rank(place: Place, seed: int, unseeded: bool) -> tuple[str, list[float]]:
    """This rank's table, and how far the other two results are from the accumulated one."""
    rank, world_size, device = place
    data = draw_toy_data(world_size) if unseeded else seeded_toy_data(seed, world_size)
    model = seeded_toy_captioner(seed).to(device)
    pixels, captions = (part[rank : rank + 1].to(device) for part in data.tensors)

    accumulated = accumulate_alone(copy.deepcopy(model), data, device)

    by_hand = copy.deepcopy(model)
    by_hand(pixels, captions).backward()
    average_gradients(by_hand)

    ddp = DistributedDataParallel(copy.deepcopy(model))
    ddp(pixels, captions).backward()

    norms = [gradient_norms(m) for m in (accumulated, by_hand, ddp)]
    rows = [[name, *(column[name] for column in norms)] for name in norms[0]]
    block = table(["parameter", "accumulated", "miniddp", "torch DDP"], rows)
    apart = [largest_difference(gradients(m), gradients(accumulated)) for m in (by_hand, ddp)]
    return block, apart


def print_by_rank(text: str) -> None:
    """Print each different `text` once, from rank 0, below the ranks that have it.

    Every rank must call it. The first line says "equal on ranks 0–3" if all have the same text.
    """
    texts: list[str] = [""] * dist.get_world_size()
    dist.gather_object(text, texts if dist.get_rank() == 0 else None)
    if dist.get_rank() == 0:
        print(below_their_ranks(texts), flush=True)


def below_their_ranks(texts: list[str]) -> str:
    """The different ones of `texts`, which are in rank order, each below its ranks."""
    if len(texts) > 1 and len(set(texts)) == 1:
        return f"equal on ranks 0–{len(texts) - 1}\n{texts[0]}"
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_of.setdefault(text, []).append(rank)
    blocks = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {len(texts)}\n{text}"
        for text, ranks in ranks_of.items()
    ]
    return "\n\n".join(blocks)


def main(arguments: argparse.Namespace) -> None:
    with join_ranks() as place:
        block, apart = compare_on_this_rank(place, arguments.seed, arguments.unseeded)
        print_by_rank(block)
        worst = largest_on_any_rank(*apart)
        if place.rank == 0:
            print(f"\nlargest difference between the three, on any rank: {bound(worst)}")
    agree = worst <= 1e-6  # a NaN does not
    if not agree and not arguments.unseeded:
        raise SystemExit("accumulated and distributed gradients do not agree")


if __name__ == "__main__":
    main(ARGUMENTS)
