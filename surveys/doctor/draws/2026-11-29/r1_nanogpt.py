"""nanoGPT's loop: accumulation steps divided by the world size, prefetching, sync flag, clipping."""
import math, os
from contextlib import nullcontext
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.distributed import init_process_group, destroy_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

block_size, batch_size, gradient_accumulation_steps = 8, 4, 4
max_iters, learning_rate, min_lr, warmup, grad_clip = 6, 1e-3, 1e-4, 2, 1.0

class GPT(nn.Module):
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(block_size, dim)
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.ln = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.wte.weight = self.lm_head.weight
        self.register_buffer("mask", torch.triu(torch.ones(block_size, block_size, dtype=torch.bool), 1))

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        x = x + self.attn(self.ln(x), self.ln(x), self.ln(x), attn_mask=self.mask, need_weights=False)[0]
        logits = self.lm_head(self.ln(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

data = np.random.default_rng(0).integers(0, 32, 4096).astype(np.uint16)

def get_batch(split="train"):
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y

def get_lr(it):
    if it < warmup:
        return learning_rate * (it + 1) / (warmup + 1)
    ratio = (it - warmup) / (max_iters - warmup)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)

def main():
    global gradient_accumulation_steps
    ddp = int(os.environ.get("RANK", -1)) != -1
    seed_offset, world = 0, 1
    if ddp:
        init_process_group(backend="gloo")
        seed_offset, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        assert gradient_accumulation_steps % world == 0
        gradient_accumulation_steps //= world
    torch.manual_seed(1337 + seed_offset)
    model = GPT()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    if ddp:
        model = DDP(model)
    X, Y = get_batch()
    raw_model = model.module if ddp else model
    iter_num = 0
    while True:
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        for micro_step in range(gradient_accumulation_steps):
            if ddp:
                model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
            X, Y = get_batch("train")
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        iter_num += 1
        if iter_num > max_iters:
            break
    if ddp:
        destroy_process_group()

if __name__ == "__main__":
    main()
