"""DCGAN-like: two DDP models, two optimizers, noise of each rank's own."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NZ = 6

def generator():
    return nn.Sequential(nn.Linear(NZ, 24), nn.ReLU(), nn.Linear(24, 8))

def discriminator():
    return nn.Sequential(nn.Linear(8, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))

def real_data():
    return torch.randn(96, 8, generator=torch.Generator().manual_seed(5)) + 1.0

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    netG, netD = DDP(generator()), DDP(discriminator())
    torch.manual_seed(100 + rank)
    criterion = nn.BCEWithLogitsLoss()
    optD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    data = TensorDataset(real_data())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            b = real.size(0)
            noise = torch.randn(b, NZ)
            fake = netG(noise)
            netD.zero_grad()
            out = netD(torch.cat([real, fake.detach()]))
            errD = criterion(out, torch.cat([torch.ones(b, 1), torch.zeros(b, 1)]))
            errD.backward()
            optD.step()
            netG.zero_grad()
            errG = criterion(netD(fake), torch.ones(b, 1))
            errG.backward()
            optG.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
