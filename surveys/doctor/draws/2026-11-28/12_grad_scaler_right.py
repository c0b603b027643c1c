"""Mixed-precision regression, resumed from a checkpoint that holds the scaler's state."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 8
STEPS = 4
DEVICE = "cpu"


def build_models():
    torch.manual_seed(9)
    return [nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 3))]


def build_data():
    g = torch.Generator().manual_seed(19)
    x = torch.randn(96, 10, generator=g)
    y = x[:, :3] * x[:, 3:6] + 0.1 * torch.randn(96, 3, generator=g)
    return TensorDataset(x, y)


def load_checkpoint():
    return {
        "scaler": {
            "scale": 1024.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
            "_growth_tracker": 0,
        }
    }


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(build_models()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler(DEVICE)
    scaler.load_state_dict(load_checkpoint()["scaler"])
    data = build_data()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)

    for step, (x, y) in enumerate(loader):
        if step == STEPS:
            break
        optimizer.zero_grad()
        with autocast(DEVICE, enabled=DEVICE == "cuda"):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}, scale {scaler.get_scale()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
