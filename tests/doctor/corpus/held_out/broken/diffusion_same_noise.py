# doctor: expect=same_random_numbers ranks=2 launch=torchrun
# measured: ranks draw the same noise (1: yes) 1, right is 0; replicas equal at the end
"""Denoising diffusion on 2-d points."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

T = 50


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(T, 16)
        self.net = nn.Sequential(nn.Linear(18, 64), nn.SiLU(), nn.Linear(64, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], dim=1))


def spiral(n=64):
    t = torch.linspace(0, 3, n)
    return TensorDataset(torch.stack([t * (4 * t).cos(), t * (4 * t).sin()], dim=1))


class Diffusion:
    def __init__(self):
        beta = torch.linspace(1e-4, 0.2, T)
        self.alpha_bar = (1 - beta).cumprod(0)

    def q_sample(self, x, t, noise):
        a = self.alpha_bar[t].unsqueeze(1)
        return a.sqrt() * x + (1 - a).sqrt() * noise

    def loss(self, model, x):
        t = torch.randint(T, (len(x),))
        noise = torch.randn_like(x)
        return nn.functional.mse_loss(model(self.q_sample(x, t, noise), t), noise)


def main(seed=3407):
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    model = DDP(Denoiser())
    diffusion = Diffusion()
    data = spiral()
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    distinct = torch.zeros(1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            diffusion.loss(model, x).backward()
            optimizer.step()
    probe = torch.randn(1)
    dist.all_reduce(distinct.copy_(probe))
    same = torch.allclose(distinct, dist.get_world_size() * probe)
    if dist.get_rank() == 0:
        print("the next random number is the same everywhere:", int(same))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
