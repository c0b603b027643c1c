"""SimCLR with dist.all_gather: the other ranks' features carry no gradient."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Views(Dataset):
    def __init__(self, n=64):
        g = torch.Generator().manual_seed(4)
        self.x = torch.randn(n, 10, generator=g)
        self.noise = 0.1 * torch.randn(2, n, 10, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + self.noise[0, i], self.x[i] + self.noise[1, i]

def encoder():
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 8))

def gather(z):
    out = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(out, z)
    out[dist.get_rank()] = z
    return torch.cat(out)

def nt_xent(z1, z2, all1, all2, offset, t=0.2):
    n = len(z1)
    labels = torch.arange(n) + offset
    mask = F.one_hot(labels, len(all1)) * 1e9
    aa, bb = z1 @ all1.T / t - mask, z2 @ all2.T / t - mask
    ab, ba = z1 @ all2.T / t, z2 @ all1.T / t
    return (F.cross_entropy(torch.cat([ab, aa], 1), labels) + F.cross_entropy(torch.cat([ba, bb], 1), labels)) / 2

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(encoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Views()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in loader:
            z = F.normalize(model(torch.cat([a, b])), dim=1)
            z1, z2 = z.chunk(2)
            loss = nt_xent(z1, z2, gather(z1), gather(z2), dist.get_rank() * len(z1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
