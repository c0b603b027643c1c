# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""A GAN on a ring of points: two networks, two wrappers, two optimizers."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def generator():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))


def discriminator():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def set_grad(net, flag):
    for p in net.parameters():
        p.requires_grad_(flag)


def ring(step, rank, n=16):
    g = torch.Generator().manual_seed(100 * rank + step)
    angle = torch.rand(n, generator=g) * 6.2832
    return torch.stack([angle.cos(), angle.sin()], 1), torch.randn(n, 4, generator=g)


def d_loss(real_logits, fake_logits):
    return F.softplus(-real_logits).mean() + F.softplus(fake_logits).mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net_g = DDP(generator())
    net_d = DDP(discriminator())
    opt_d = torch.optim.Adam(net_d.parameters(), lr=1e-2, betas=(0.5, 0.99))
    opt_g = torch.optim.Adam(net_g.parameters(), lr=1e-2, betas=(0.5, 0.99))
    for step in range(5):
        real, z = ring(step, rank)
        # discriminator
        opt_d.zero_grad()
        with torch.no_grad():
            fake = net_g(z)
        both = net_d(torch.cat([real, fake]))
        d_loss(*both.chunk(2)).backward()
        opt_d.step()
        # generator
        set_grad(net_d.module, False)
        opt_g.zero_grad()
        F.softplus(-net_d(net_g(z))).mean().backward()
        opt_g.step()
        set_grad(net_d.module, True)
    if rank == 0:
        for name, net in (("generator", net_g), ("discriminator", net_d)):
            print(name, f"{sum(p.abs().sum().item() for p in net.parameters()):.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
