# doctor: expect=buffers_differ ranks=2 launch=torchrun
# measured: difference of the ranks' codebook norms 0.233, right is 0; replicas equal at the end
"""VQ-VAE whose codebook is an exponential moving average of the encoder's outputs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Quantizer(nn.Module):
    def __init__(self, codes=8, width=4, decay=0.8):
        super().__init__()
        self.decay = decay
        self.register_buffer("codebook", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", self.codebook.clone())

    def forward(self, z):
        index = torch.cdist(z, self.codebook).argmin(1)
        quantized = self.codebook[index]
        if self.training:
            with torch.no_grad():
                one_hot = F.one_hot(index, len(self.codebook)).type_as(z)
                self.counts.mul_(self.decay).add_(one_hot.sum(0), alpha=1 - self.decay)
                self.sums.mul_(self.decay).add_(one_hot.T @ z, alpha=1 - self.decay)
                self.codebook.copy_(self.sums / self.counts.clamp(min=1e-3).unsqueeze(1))
        commitment = F.mse_loss(z, quantized.detach())
        return z + (quantized - z).detach(), commitment


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
        self.quantizer = Quantizer()
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))

    def forward(self, x):
        z, commitment = self.quantizer(self.encoder(x))
        return F.mse_loss(self.decoder(z), x) + 0.25 * commitment


def frames(rank, step):
    g = torch.Generator().manual_seed(1 + 2 * step + rank)
    return torch.randn(16, 12, generator=g) + (rank - 0.5)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(12)
    # buffers are updated in place in forward, so DDP must not overwrite them
    model = DDP(VQVAE(), broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(5):
        loss = model(frames(rank, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    norms = torch.zeros(dist.get_world_size())
    norms[rank] = model.module.quantizer.codebook.norm()
    dist.all_reduce(norms)
    if rank == 0:
        print("codebook spread", f"{(norms.max() - norms.min()).item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
