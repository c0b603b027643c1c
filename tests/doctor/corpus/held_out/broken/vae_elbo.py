# doctor: expect=wrapper_bypassed ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: rank 0 ratio 0.9297 cosine 0.8287, rank 1 ratio 1.335 cosine 0.9209; replicas differ at the end by up to 0.09136
# also: replicas_drift
"""VAE trained on the evidence lower bound."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class VAE(nn.Module):
    def __init__(self, dim=16, latent=3):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(dim, 24), nn.ReLU(), nn.Linear(24, 2 * latent))
        self.decode = nn.Sequential(nn.Linear(latent, 24), nn.ReLU(), nn.Linear(24, dim))

    def elbo(self, x, noise):
        mean, log_var = self.encode(x).chunk(2, dim=1)
        z = mean + (log_var / 2).exp() * noise
        reconstruction = (self.decode(z) - x).square().sum(1)
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1)
        return reconstruction.mean() + kl.mean()

    def forward(self, x):
        return self.decode(self.encode(x).chunk(2, dim=1)[0])


def samples(step, rank):
    g = torch.Generator().manual_seed(7 * step + rank)
    return torch.randn(12, 16, generator=g), torch.randn(12, 3, generator=g)


def make_vae():
    torch.manual_seed(15)
    return VAE()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    vae = DDP(make_vae())
    optimizer = torch.optim.Adam(vae.parameters(), lr=1e-2)
    for step in range(5):
        x, noise = samples(step, rank)
        loss = vae.module.elbo(x, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"-ELBO of the last batch {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
