"""Stop at any step, resume, and end with the bits of an uninterrupted run.

    torchrun --standalone --nproc-per-node 2 labs/programs/resume.py
    torchrun --standalone --nproc-per-node 2 labs/programs/resume.py --checkpoint /tmp/a.pt --stop 8
    torchrun --standalone --nproc-per-node 2 labs/programs/resume.py --checkpoint /tmp/a.pt

The third command finds the checkpoint of the second, and prints the table of the first. The table
has one row per rank: the steps taken, the last batch's loss, how far the weights have moved from
their first values, and a hash of the weights.
"""

import argparse
import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(args: argparse.Namespace, rank: int, world_size: int) -> list[str]:
    torch.manual_seed(args.seed)  # the same data and first weights on every rank
    inputs = torch.randn(48, 6)
    data = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
    start = nn.utils.parameters_to_vector(module.parameters()).detach()
    # With find_unused_parameters, DDP never rebuilds its buckets: the order of its sums stays. (It
    # warns that it found none.)
    model = DistributedDataParallel(module, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    sampler = DistributedSampler(data, seed=args.seed)
    # A loader draws a seed in each epoch: from a generator of its own, not from dropout's.
    loader = DataLoader(data, batch_size=4, sampler=sampler, generator=torch.Generator())

    torch.manual_seed(1000 * args.seed + rank)  # other dropout masks on each rank
    step = first_epoch = done = 0  # `done` batches of the first epoch are behind us
    if args.checkpoint and args.checkpoint.exists():
        saved = torch.load(args.checkpoint)
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        step, first_epoch, done = saved["place"]
        torch.set_rng_state(saved["random"][rank])
    for epoch in range(first_epoch, 3):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            if epoch == first_epoch and number < done:
                continue
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step == args.stop:
                random = [torch.empty(0)] * world_size
                dist.all_gather_object(random, torch.get_rng_state())
                state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
                state["scheduler"] = scheduler.state_dict()
                state |= {"place": (step, epoch, number + 1), "random": random}
                if rank == 0:
                    torch.save(state, args.checkpoint)
                return []
    weights = nn.utils.parameters_to_vector(module.parameters()).detach()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:12]
    return [f"{step}", f"{loss:.6f}", f"{(weights - start).norm():.6f}", digest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--stop", type=int, help="save after this step, and end")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = [[""]] * world_size
    dist.all_gather_object(rows, train(args, rank, world_size))
    if rank == 0 and rows[0]:
        print("rank  steps      loss     moved       weights")
        for number, (steps, loss, moved, digest) in enumerate(rows):
            print(f"{number:4}  {steps:>5}  {loss:>8}  {moved:>8}  {digest}", flush=True)
    dist.barrier()  # no rank may leave while another one still connects
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
