# doctor: expect=unequal_denominators ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 0.9714 cosine 0.9406; replicas equal at the end
"""Part-of-speech tagger, small transformer encoder. torchrun --nproc-per-node 2 pos_tagger.py"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD = 0
IGNORE = -100


class Sentences(Dataset):
    """Made-up sentences; the first half of the corpus is headlines, the second articles."""

    def __init__(self, n=64, vocab=50, tags=7):
        g = torch.Generator().manual_seed(7)
        self.items = []
        for i in range(n):
            length = 3 + i % 3 if i % 2 == 0 else 14 + i % 5
            words = torch.randint(1, vocab, (length,), generator=g)
            self.items.append((words, (words * 3 + 1) % tags))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(batch):
    words, tags = zip(*batch, strict=True)
    return (
        pad_sequence(words, batch_first=True, padding_value=PAD),
        pad_sequence(tags, batch_first=True, padding_value=IGNORE),
    )


class Tagger(nn.Module):
    def __init__(self, vocab=50, width=32, tags=7):
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=PAD)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, tags)

    def forward(self, words):
        hidden = self.encoder(self.embed(words), src_key_padding_mask=words == PAD)
        return self.head(hidden)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Tagger())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    data = Sentences()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, collate_fn=collate)
    for words, tags in loader:
        optimizer.zero_grad()
        logits = model(words)
        loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=IGNORE)
        loss.backward()
        optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"last loss {mean.item() / dist.get_world_size():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
