# doctor: expect=gather_without_gradient ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 0.497 cosine 0.9975; replicas equal at the end
"""SimCLR on small images: NT-Xent over the embeddings of every worker."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.projector = nn.Linear(32, 16)

    def forward(self, x):
        return F.normalize(self.projector(self.backbone(x)), dim=1)


def views(step, rank, n=6):
    g = torch.Generator().manual_seed(step * 17 + rank)
    image = torch.rand(n, 1, 8, 8, generator=g)
    return (image + 0.1 * torch.randn(image.shape, generator=g) for _ in range(2))


def all_gather(z):
    out = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(out, z)
    return torch.cat(out)


def nt_xent(a, b, temperature=0.2):
    z = torch.cat([a, b])
    n = len(a)
    similarity = z @ z.T / temperature
    similarity.fill_diagonal_(float("-inf"))
    target = torch.cat([torch.arange(n) + n, torch.arange(n)])
    return F.cross_entropy(similarity, target)


def nt_xent_gathered(a, b, temperature=0.2):
    """This worker's rows against the columns of all workers."""
    n, rank = len(a), dist.get_rank()
    everyone = torch.cat([all_gather(a), all_gather(b)])
    total = len(everyone) // 2
    mine = torch.arange(n) + rank * n
    similarity = torch.cat([a, b]) @ everyone.T / temperature
    own = torch.cat([mine, mine + total])
    similarity[torch.arange(2 * n), own] = float("-inf")
    target = torch.cat([mine + total, mine])
    return F.cross_entropy(similarity, target)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = DDP(Encoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(4):
        a, b = views(step, rank)
        z = model(torch.cat([a, b]))
        loss = nt_xent_gathered(*z.chunk(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    checksum = sum(p.double().abs().sum().item() for p in model.parameters())
    if rank == 0:
        print(f"checksum {checksum:.5f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
