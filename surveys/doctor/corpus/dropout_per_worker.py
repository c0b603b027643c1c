# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Text classifier with dropout; every worker has its own random numbers on purpose."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TextClassifier(nn.Module):
    def __init__(self, vocab=60, width=24):
        super().__init__()
        self.embed = nn.EmbeddingBag(vocab, width)
        self.dropout = nn.Dropout(0.3)
        self.out = nn.Linear(width, 2)

    def forward(self, tokens):
        return self.out(self.dropout(self.embed(tokens)))


def corpus():
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(60, (64, 10), generator=g)
    return TensorDataset(tokens, (tokens < 30).sum(1).gt(5).long())


def seed_workers(seed, rank):
    """The same weights everywhere, different dropout masks."""
    torch.manual_seed(seed)
    model = TextClassifier()
    torch.manual_seed(seed + 1 + rank)
    return model


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(seed_workers(0, rank))
    data = corpus()
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens, label in loader:
            loss = nn.functional.cross_entropy(model(tokens), label)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        average = loss.detach().clone()
        dist.all_reduce(average)
        average /= dist.get_world_size()
        if rank == 0:
            print(f"epoch {epoch} loss {average.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
