"""Pretraining on packed documents: cu_seqlens, positions per document, accumulation steps shared by the ranks."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB, MAX_LEN, GRAD_ACCUM = 40, 48, 4


class Documents(Dataset):
    def __init__(self, n=512):
        g = torch.Generator().manual_seed(3)
        lengths = torch.randint(4, 17, (n,), generator=g)
        self.docs = [torch.randint(0, VOCAB, (int(k),), generator=g) for k in lengths]

    def __len__(self):
        return len(self.docs)

    def __getitem__(self, i):
        return self.docs[i]


def pack(docs):
    """One row without padding: as many documents as fit into MAX_LEN tokens."""
    kept, total = [], 0
    for doc in docs:
        if total + len(doc) > MAX_LEN:
            break
        kept.append(doc)
        total += len(doc)
    lengths = torch.tensor([len(d) for d in kept])
    ids = torch.cat(kept)
    labels = ids.roll(-1)
    ends = lengths.cumsum(0)
    labels[ends - 1] = -100  # the next document's first token is no target
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.cat([torch.arange(int(k)) for k in lengths]),
        "cu_seqlens": F.pad(ends, (1, 0)).int(),
    }


class Block(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x, cu_seqlens):
        q, k, v = self.qkv(self.norm1(x)).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)
        parts = []
        for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
            s = slice(start, end)
            parts.append(F.scaled_dot_product_attention(q[:, s], k[:, s], v[:, s], is_causal=True))
        x = x + self.out(torch.cat(parts, 1).transpose(0, 1).flatten(1))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, dim), nn.Embedding(MAX_LEN, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.lm_head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, input_ids, position_ids, cu_seqlens):
        x = self.wte(input_ids) + self.wpe(position_ids)
        for block in self.blocks:
            x = block(x, cu_seqlens)
        return self.lm_head(x)


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    grad_accum = GRAD_ACCUM // world_size
    torch.manual_seed(0)
    model = DDP(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = Documents()
    loader = iter(DataLoader(data, 8, sampler=DistributedSampler(data), collate_fn=pack))
    for step in range(8):
        micro_batches = [next(loader) for _ in range(grad_accum)]
        num_tokens = sum((b["labels"] != -100).sum() for b in micro_batches)
        dist.all_reduce(num_tokens)
        for i, batch in enumerate(micro_batches):
            labels = batch.pop("labels")
            last = i == grad_accum - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = F.cross_entropy(model(**batch), labels, ignore_index=-100, reduction="sum")
                (loss / num_tokens * world_size).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
