# doctor: expect=none ranks=2 launch=torchrun
# measured: parameters are bitwise equal on all ranks after each of 6 steps
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(10, 6), nn.Linear(7, 6)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        a = F.normalize(self.image(image), dim=-1)
        b = F.normalize(self.text(text), dim=-1)
        return a, b, self.logit_scale.exp()


def contrastive(a, b, scale):
    logits = scale * a @ b.T
    labels = torch.arange(len(a))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(TwoTowers())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(4)
    for _ in range(6):
        image, text = torch.randn(16, 10, generator=gen), torch.randn(16, 7, generator=gen)
        a, b, scale = model(image[rank::world], text[rank::world])
        loss = contrastive(torch.cat(all_gather(a)), torch.cat(all_gather(b)), scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(rank, f"{loss.item():.5f}")
    dist.destroy_process_group()


main()
