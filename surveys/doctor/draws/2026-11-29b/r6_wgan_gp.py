"""WGAN-GP: several critic steps per generator step, a gradient penalty with create_graph."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LATENT, BATCH, N_CRITIC, LAMBDA_GP = 6, 12, 2, 10.0


def real_images():
    g = torch.Generator().manual_seed(21)
    return torch.randn(192, 10, generator=g) * 0.5 + torch.linspace(-1, 1, 10)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(LATENT, 32), nn.LeakyReLU(0.2), nn.Linear(32, 10), nn.Tanh()
        )

    def forward(self, z):
        return self.net(z)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(10, 32),
            nn.LayerNorm(32),
            nn.SiLU(),
            nn.Linear(32, 16),
            nn.SiLU(),
            nn.Linear(16, 1),
        )

    def forward(self, x):
        return self.net(x)


def compute_gradient_penalty(critic, real, fake):
    alpha = torch.rand(real.size(0), 1)
    interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    d_interpolates = critic(interpolates)
    gradients = torch.autograd.grad(
        outputs=d_interpolates,
        inputs=interpolates,
        grad_outputs=torch.ones_like(d_interpolates),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    generator, critic = DDP(Generator()), DDP(Critic())
    optimizer_G = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
    optimizer_D = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
    data = TensorDataset(real_images())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    torch.manual_seed(1000 + dist.get_rank())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (real,) in enumerate(loader):
            optimizer_D.zero_grad()
            fake = generator(torch.randn(len(real), LATENT)).detach()
            penalty = compute_gradient_penalty(critic, real, fake)
            d_loss = critic(fake).mean() - critic(real).mean() + LAMBDA_GP * penalty
            d_loss.backward()
            optimizer_D.step()
            if i % N_CRITIC == 0:
                for p in critic.parameters():
                    p.requires_grad_(False)
                optimizer_G.zero_grad()
                g_loss = -critic(generator(torch.randn(len(real), LATENT))).mean()
                g_loss.backward()
                optimizer_G.step()
                for p in critic.parameters():
                    p.requires_grad_(True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
