"""GradScaler; the gradients are unscaled and clipped, and only then averaged through one flat bucket."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def build():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

def dataset():
    g = torch.Generator().manual_seed(17)
    x = torch.randn(96, 6, generator=g)
    return TensorDataset(x, 4 * x.prod(1, keepdim=True) + x.sum(1, keepdim=True))

def average_gradients(model):
    flat = torch.cat([p.grad.view(-1) for p in model.parameters()])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat /= dist.get_world_size()
    offset = 0
    for p in model.parameters():
        p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = dataset()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            scaler.scale(mse_loss(model(x), y)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            average_gradients(model)
            scaler.step(optimizer)
            scaler.update()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
