"""LoRA on a frozen base, an IterableDataset sharded by rank, accumulation with a remainder at the end."""
import contextlib
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

ACCUM = 4

class LoraLinear(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scaling = alpha / r

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling

def build():
    net = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 30))
    net[1], net[3] = LoraLinear(net[1]), LoraLinear(net[3])
    for name, p in net.named_parameters():
        p.requires_grad = "lora_" in name
    return net

class Stream(IterableDataset):
    def __init__(self, rank, world, n=80):
        self.rank, self.world, self.n = rank, world, n

    def __iter__(self):
        g = torch.Generator().manual_seed(11)
        for i in range(self.n):
            row = torch.randint(0, 30, (9,), generator=g)
            if i % self.world == self.rank:
                yield row

def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    for epoch in range(2):
        batches = list(DataLoader(Stream(rank, world), batch_size=4))  # 10 per rank: 4 + 4 + 2
        for start in range(0, len(batches), ACCUM):
            group = batches[start : start + ACCUM]
            for i, rows in enumerate(group):
                last = i == len(group) - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    logits = model(rows[:, :-1])
                    loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
                    (loss / len(group)).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
