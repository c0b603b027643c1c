"""Evaluate on several ranks so that each sample counts once.

    torchrun --standalone --nproc-per-node 2 labs/programs/evaluate.py

`DistributedSampler` gives every rank equally many samples. 89 samples do not divide evenly, so it
deals the first ones twice. The accuracy and the mean loss have to leave out those repeats.

The table has one row per rank: the samples that it counted itself, then the accuracy and the mean
loss over all samples of all ranks.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def evaluate(seed: int, rank: int, world_size: int) -> list[str]:
    torch.manual_seed(seed)  # the same data and model on every rank
    inputs = torch.randn(89, 6)
    labels = inputs[:, :3].argmax(dim=1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3))

    data = TensorDataset(inputs, labels)
    sampler = DistributedSampler(data, shuffle=False)
    model.eval()
    seen = 0
    loss_sum, right, count = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            # The sampler deals in turns: sample 0 to rank 0, sample 1 to rank 1, …
            place = torch.arange(seen, seen + len(y)) * world_size + rank
            seen += len(y)
            real = place < len(data)
            outputs, targets = model(x)[real], y[real]
            loss_sum += cross_entropy(outputs, targets, reduction="sum")
            right += (outputs.argmax(dim=1) == targets).sum()
            count += len(targets)

    own_count = int(count)
    totals = torch.stack([loss_sum, right, count])
    dist.all_reduce(totals)
    loss_sum, right, count = totals
    accuracy, loss = right / count, loss_sum / count
    return [f"{own_count}", f"{accuracy:.6f}", f"{loss:.6f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = [[""]] * world_size
    dist.all_gather_object(rows, evaluate(seed, rank, world_size))
    if rank == 0:
        print("rank  samples  accuracy      loss")
        for number, (samples, accuracy, loss) in enumerate(rows):
            print(f"{number:4}  {samples:>7}  {accuracy:>8}  {loss:>8}", flush=True)
    dist.barrier()  # no rank may leave while another one still connects
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
