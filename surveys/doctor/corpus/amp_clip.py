# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Mixed precision with a scaler, unscaled before clipping; one scheduler step per update."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR

STEPS = 5


def model_fn():
    torch.manual_seed(19)
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.LayerNorm(32),
        nn.ReLU(),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Linear(32, 8),
    )


def batch_for(step, rank):
    g = torch.Generator().manual_seed(3000 + 2 * step + rank)
    x = torch.randn(8, 16, generator=g)
    return x, x[:, :8].argmax(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(model_fn())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = CosineAnnealingLR(optimizer, T_max=STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(STEPS):
        x, y = batch_for(step, rank)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    if rank == 0:
        print(f"lr {scheduler.get_last_lr()[0]:.4f} scale {scaler.get_scale():.0f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
