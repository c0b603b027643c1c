"""A GAN whose discriminator was never wrapped: each rank trains its own."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from r5_gan import NZ, discriminator, generator, real_data

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    netG, netD = DDP(generator()), discriminator()
    torch.manual_seed(100 + rank)
    criterion = nn.BCEWithLogitsLoss()
    optD = torch.optim.Adam(netD.parameters(), lr=2e-4)
    optG = torch.optim.Adam(netG.parameters(), lr=2e-4)
    data = TensorDataset(real_data())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            b = real.size(0)
            fake = netG(torch.randn(b, NZ))
            netD.zero_grad()
            errD = (criterion(netD(real), torch.ones(b, 1)) + criterion(netD(fake.detach()), torch.zeros(b, 1))) / 2
            errD.backward()
            optD.step()
            netG.zero_grad()
            criterion(netD(fake), torch.ones(b, 1)).backward()
            optG.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
