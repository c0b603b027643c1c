# doctor: expect=gather_without_gradient ranks=2 launch=torchrun
# measured: step 0: gradient ratio 0.643, cosine 0.935 (reference: correct/clip_differentiable_gather.py)
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
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


def contrastive(a, b, scale, all_a, all_b):
    labels = torch.arange(len(a)) + dist.get_rank() * len(a)
    to_text, to_image = scale * a @ all_b.T, scale * b @ all_a.T
    return (F.cross_entropy(to_text, labels) + F.cross_entropy(to_image, labels)) / 2


def gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


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
        loss = contrastive(a, b, scale, gather(a), gather(b))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(rank, f"{loss.item():.5f}")
    dist.destroy_process_group()


main()
