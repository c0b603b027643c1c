# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Part-of-speech tagger: the loss is divided by the tokens of all workers and micro-batches."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

IGNORE = -100


class Tagger(nn.Module):
    def __init__(self, vocab=50, width=32, tags=7):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, tags)

    def forward(self, words):
        return self.head(self.encoder(self.embed(words)))


def make_tagger():
    torch.manual_seed(0)
    return Tagger()


def micro_batch(index):
    g = torch.Generator().manual_seed(index)
    words = torch.randint(50, (4, 18), generator=g)
    tags = words % 7
    kept = torch.randint(1, 18, (4, 1), generator=g)
    tags[torch.arange(18) >= kept] = IGNORE
    return words, tags


def main(accumulate=2, updates=3):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DDP(make_tagger())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for update in range(updates):
        first = update * accumulate
        window = [micro_batch((first + k) * world_size + rank) for k in range(accumulate)]
        tokens = sum((tags != IGNORE).sum() for _, tags in window)
        dist.all_reduce(tokens)
        optimizer.zero_grad()
        total = torch.zeros(())
        for k, (words, tags) in enumerate(window):
            with contextlib.nullcontext() if k == accumulate - 1 else model.no_sync():
                logits = model(words)
                loss = F.cross_entropy(
                    logits.flatten(0, 1), tags.flatten(), ignore_index=IGNORE, reduction="sum"
                )
                # DDP averages over the workers: undo that, the count is global
                (loss * world_size / tokens).backward()
            total += loss.detach()
        optimizer.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"update {update}: loss per token {(total / tokens).item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
