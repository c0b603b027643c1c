# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Streams shards of unequal length; all workers stop when the first one runs out."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

LINES = {"a": 24, "b": 24, "c": 24, "d": 15}


class Stream(IterableDataset):
    def __init__(self, rank, world_size):
        self.files = sorted(LINES)[rank::world_size]

    def __iter__(self):
        for name in self.files:
            g = torch.Generator().manual_seed(ord(name))
            for _ in range(LINES[name]):
                yield torch.randint(64, (9,), generator=g)


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 64)

    def forward(self, tokens):
        logits = self.table(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def synchronized(loader):
    """Yields full batches for as long as every worker has one."""
    iterator = iter(loader)
    while True:
        batch = next(iterator, None)
        have = torch.tensor(int(batch is not None))
        dist.all_reduce(have, op=dist.ReduceOp.MIN)
        if not have:
            return
        yield batch


def bigram():
    torch.manual_seed(0)
    return Bigram()


def main():
    dist.init_process_group("gloo")
    model = DDP(bigram())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    stream = Stream(dist.get_rank(), dist.get_world_size())
    steps = 0
    for tokens in synchronized(DataLoader(stream, batch_size=8, drop_last=True)):
        optimizer.zero_grad()
        model(tokens).backward()
        optimizer.step()
        steps += 1
    if dist.get_rank() == 0:
        print(f"{steps} steps")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
