"""Contrastive sentence embeddings (NT-Xent) with negatives from all GPUs."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCAB, LENGTH, DIM = 50, 8, 16
BATCH = 8
STEPS = 4
TEMPERATURE = 0.2


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.proj = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))

    def forward(self, tokens):
        return F.normalize(self.proj(self.embed(tokens).mean(1)), dim=-1)


def build_models():
    torch.manual_seed(1)
    return [Encoder()]


def build_data():
    """Anchor spans and overlapping positive spans."""
    g = torch.Generator().manual_seed(7)
    anchors = torch.randint(VOCAB, (64, LENGTH), generator=g)
    positives = anchors.clone()
    noise = torch.rand(64, LENGTH, generator=g) < 0.4
    positives[noise] = torch.randint(VOCAB, (int(noise.sum()),), generator=g)
    return anchors, positives


def gather_all(x):
    """Embeddings of all ranks; only those of this rank carry a gradient."""
    out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x.detach().contiguous())
    out[dist.get_rank()] = x
    return torch.cat(out)


def nt_xent(a, b):
    z = torch.cat([a, b])
    logits = z @ z.T / TEMPERATURE
    logits.fill_diagonal_(float("-inf"))
    n = len(a)
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(logits, target)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(build_models()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    anchors, positives = build_data()

    for step in range(STEPS):
        start = (step * dist.get_world_size() + rank) * BATCH
        rows = slice(start, start + BATCH)
        a, b = model(torch.cat([anchors[rows], positives[rows]])).chunk(2)
        loss = nt_xent(gather_all(a), gather_all(b))
        optimizer.zero_grad()
        # DDP averages the gradients, and every rank only has its own part of the gradient
        (loss * dist.get_world_size()).backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
