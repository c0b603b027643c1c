# doctor: expect=uneven_batches ranks=2 launch=torchrun
# measured: the run fails, exit code not 0
# also: hang_missing_rank,mismatched_collectives
"""Streams text shards; every worker reads its own files until they end."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

# lines per file
FILES = {"a.txt": 24, "b.txt": 24, "c.txt": 24, "d.txt": 15}


class Stream(IterableDataset):
    def __init__(self, rank, world_size):
        self.files = sorted(FILES)[rank::world_size]

    def __iter__(self):
        for name in self.files:
            g = torch.Generator().manual_seed(ord(name[0]))
            for _ in range(FILES[name]):
                yield torch.randint(64, (9,), generator=g)


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 64)

    def forward(self, tokens):
        logits = self.table(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    torch.manual_seed(0)
    model = DDP(Bigram())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(Stream(dist.get_rank(), dist.get_world_size()), batch_size=8)
    for tokens in loader:
        loss = model(tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = torch.tensor(float(loss.detach()))
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"final loss {total.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
