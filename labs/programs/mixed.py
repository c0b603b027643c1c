"""Mixed precision, accumulation, and clipping in one step: what comes before what.

    torchrun --standalone --nproc-per-node 2 labs/programs/mixed.py

A step accumulates three micro-batches in float16, and then: unscale, clip the whole gradient by
its norm, step, update the scale. Its first scale overflows on purpose: that step is skipped.

The table has one row per rank: the last scale; the gradient's norm in the second step, before it
was clipped; the loss after the last step, on samples that are the same on every rank; and how far
the weights have moved.
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

STEPS, MICRO_BATCHES, MAX_NORM = 6, 3, 0.6


def train(seed: int, rank: int, world_size: int) -> list[str]:
    torch.manual_seed(seed)  # the same first weights on every rank
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    held_out = torch.randn(64, 6)
    start = nn.utils.parameters_to_vector(module.parameters()).detach()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-30)
    own = torch.Generator().manual_seed(1000 * seed + rank)  # other samples on each rank
    norms = []
    for step in range(STEPS):
        # Small samples have a short gradient, mostly too short to be clipped.
        scale = 3 if step % 2 else 0.3
        for i in range(MICRO_BATCHES):
            x = scale * torch.randn(4, 6, generator=own)
            y = x[:, :3].argmax(dim=1)
            last = i == MICRO_BATCHES - 1
            # Only the last backward of a step sends gradients: the sum of all three.
            with nullcontext() if last else model.no_sync():
                with torch.autocast("cpu", torch.float16):
                    loss = cross_entropy(model(x), y) / MICRO_BATCHES
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        scaler.step(optimizer)  # not if the gradient has an infinity or a NaN
        scaler.update()
        optimizer.zero_grad()
    with torch.no_grad():
        final = cross_entropy(module(held_out), held_out[:, :3].argmax(dim=1))
    moved = nn.utils.parameters_to_vector(module.parameters()).detach() - start
    return [f"{scaler.get_scale():.0f}", f"{norms[1]:.6f}", f"{final:.6f}", f"{moved.norm():.6f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = [[""]] * world_size
    dist.all_gather_object(rows, train(seed, rank, world_size))
    if rank == 0:
        print("rank  scale      norm      loss     moved")
        for number, (scale, norm, loss, moved) in enumerate(rows):
            print(f"{number:4}  {scale:>5}  {norm:>8}  {loss:>8}  {moved:>8}", flush=True)
    dist.barrier()  # no rank may leave while another one still connects
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
