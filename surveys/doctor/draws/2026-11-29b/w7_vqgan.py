"""VQGAN: the adversarial loss's adaptive weight is a ratio of norms of each rank's own gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class VectorQuantizer(nn.Module):
    def __init__(self, n_e=32, e_dim=8, beta=0.25):
        super().__init__()
        self.beta = beta
        self.embedding = nn.Embedding(n_e, e_dim)
        nn.init.uniform_(self.embedding.weight, -1.0 / n_e, 1.0 / n_e)

    def forward(self, z):
        z = z.permute(0, 2, 3, 1)
        index = torch.cdist(z.flatten(0, 2), self.embedding.weight).argmin(1)
        z_q = self.embedding(index).view(z.shape)
        loss = ((z_q.detach() - z) ** 2).mean() * self.beta + ((z_q - z.detach()) ** 2).mean()
        return (z + (z_q - z).detach()).permute(0, 3, 1, 2), loss


class VQModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 12, 4, 2, 1), nn.SiLU(), nn.Conv2d(12, 8, 3, 1, 1)
        )
        self.quantize = VectorQuantizer()
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(8, 12, 4, 2, 1), nn.SiLU(), nn.Conv2d(12, 3, 3, 1, 1)
        )

    def forward(self, x):
        quant, diff = self.quantize(self.encoder(x))
        return self.decoder(quant), diff

    def get_last_layer(self):
        return self.decoder[-1].weight


def discriminator():
    return nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3, 1, 1))


def hinge_d_loss(logits_real, logits_fake):
    return 0.5 * (F.relu(1.0 - logits_real).mean() + F.relu(1.0 + logits_fake).mean())


def calculate_adaptive_weight(nll_loss, g_loss, last_layer):
    nll_grads = torch.autograd.grad(nll_loss, last_layer, retain_graph=True)[0]
    g_grads = torch.autograd.grad(g_loss, last_layer, retain_graph=True)[0]
    d_weight = torch.norm(nll_grads) / (torch.norm(g_grads) + 1e-4)
    return torch.clamp(d_weight, 0.0, 1e4).detach()


def images(n=96):
    g = torch.Generator().manual_seed(12)
    scale = torch.rand(n, 1, 1, 1, generator=g) * 2
    return TensorDataset(torch.randn(n, 3, 8, 8, generator=g) * scale)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(23)
    vq, disc = DDP(VQModel()), DDP(discriminator())
    opt_ae = torch.optim.Adam(vq.parameters(), lr=4.5e-4, betas=(0.5, 0.9))
    opt_disc = torch.optim.Adam(disc.parameters(), lr=4.5e-4, betas=(0.5, 0.9))
    data = images()
    loader = DataLoader(data, 6, sampler=DistributedSampler(data))
    for (x,) in loader:
        xrec, codebook_loss = vq(x)
        nll_loss = (x - xrec).abs().mean()
        for p in disc.parameters():
            p.requires_grad_(False)
        g_loss = -disc(xrec).mean()
        d_weight = calculate_adaptive_weight(nll_loss, g_loss, vq.module.get_last_layer())
        loss = nll_loss + d_weight * 0.8 * g_loss + codebook_loss
        opt_ae.zero_grad()
        loss.backward()
        opt_ae.step()
        for p in disc.parameters():
            p.requires_grad_(True)
        d_loss = hinge_d_loss(disc(x), disc(xrec.detach()))
        opt_disc.zero_grad()
        d_loss.backward()
        opt_disc.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
