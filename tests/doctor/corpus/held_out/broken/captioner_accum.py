# doctor: expect=unequal_denominators_accumulation ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1.093 cosine 0.7378; replicas equal at the end
# also: unequal_denominators,logged_value_is_local
"""Image captioning with an LSTM decoder and gradient accumulation."""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CONFIG = {"vocab": 40, "width": 24, "accum": 4, "micro_batch": 4, "steps": 3, "lr": 1e-1}


class Captioner(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(width)
        )
        self.embed = nn.Embedding(vocab, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def forward(self, images, captions):
        start = self.encoder(images).unsqueeze(1)
        inputs = torch.cat([start, self.embed(captions[:, :-1])], dim=1)
        hidden, _ = self.lstm(inputs)
        return self.out(hidden)


def make_model():
    torch.manual_seed(1)
    model = Captioner(CONFIG["vocab"], CONFIG["width"])
    model(torch.zeros(1, 3, 16, 16), torch.ones(1, 2, dtype=torch.long))
    return model


def get_micro_batch(index):
    g = torch.Generator().manual_seed(1000 + index)
    n = CONFIG["micro_batch"]
    images = torch.randn(n, 3, 16, 16, generator=g)
    lengths = torch.randint(2, 16, (n,), generator=g) if index % 3 else torch.full((n,), 2)
    captions = torch.zeros(n, 16, dtype=torch.long)
    for row, length in enumerate(lengths.tolist()):
        captions[row, :length] = torch.randint(1, CONFIG["vocab"], (length,), generator=g)
    return images, captions


def train():
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=CONFIG["lr"])
    criterion = nn.CrossEntropyLoss(ignore_index=0)
    accum = CONFIG["accum"]
    for step in range(CONFIG["steps"]):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for k in range(accum):
            images, captions = get_micro_batch((step * accum + k) * world + rank)
            sync = contextlib.nullcontext() if k == accum - 1 else model.no_sync()
            with sync:
                logits = model(images, captions)
                loss = criterion(logits.transpose(1, 2), captions) / accum
                loss.backward()
            total += loss.item()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {total:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]))
    train()
    dist.barrier()
    dist.destroy_process_group()
