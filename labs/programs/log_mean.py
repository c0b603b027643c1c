"""Log one mean loss of all ranks, over steps in which the ranks have different counts.

    torchrun --standalone --nproc-per-node 2 labs/programs/log_mean.py

A rank has 1 to 8 samples in a step. The ranks minimize the mean over all samples of the step.
Every four steps the program logs the mean loss over all samples of these steps, on all ranks.

The table has one row per rank: the three logged means, and how far the weights have moved from
their first values.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

STEPS, EVERY = 12, 4


def train(seed: int, rank: int, world_size: int) -> list[str]:
    torch.manual_seed(seed)  # the same first weights on every rank
    module = nn.Linear(5, 1)
    start = nn.utils.parameters_to_vector(module.parameters()).detach()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.Generator().manual_seed(1000 * seed + rank)  # other samples on each rank
    logged = []
    totals = torch.zeros(2, dtype=torch.float64)  # of losses, and of samples
    for step in range(1, STEPS + 1):
        count = torch.randint(1, 9, (1,), generator=own)
        x = torch.randn(int(count), 5, generator=own)
        y = x.sum(dim=1, keepdim=True) + rank
        samples = count.clone()
        dist.all_reduce(samples)
        loss_sum = mse_loss(model(x), y, reduction="sum")
        optimizer.zero_grad()
        (loss_sum * world_size / samples).backward()  # DDP divides by the number of ranks
        optimizer.step()

        totals += torch.cat([loss_sum.detach().view(1), count])
        if step % EVERY == 0:
            dist.all_reduce(totals)
            logged.append(totals[0] / totals[1])
            totals.zero_()
    moved = nn.utils.parameters_to_vector(module.parameters()).detach() - start
    return [*(f"{mean:.6f}" for mean in logged), f"{moved.norm():.6f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = [[""]] * world_size
    dist.all_gather_object(rows, train(seed, rank, world_size))
    if rank == 0:
        print("rank    step_4    step_8   step_12     moved")
        for number, (*means, moved) in enumerate(rows):
            print(f"{number:4}", *(f"{mean:>8}" for mean in means), f"{moved:>8}", sep="  ")
    dist.barrier()  # no rank may leave while another one still connects
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
