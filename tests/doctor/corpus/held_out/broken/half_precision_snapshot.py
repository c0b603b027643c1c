# doctor: expect=hooks_lost ranks=2 launch=torchrun
# measured: gradient of step 4 against one process with the full batch: rank 0 ratio 1.434 cosine 0.6831, rank 1 ratio 1.473 cosine 0.6858; replicas differ at the end by up to 0.08105
# also: replicas_drift,model_changed_after_wrapping
"""Trains a language model and keeps half-precision snapshots of it on the side."""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB = 32


class RNNLM(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = nn.RNN(width, width, batch_first=True)
        self.proj = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        hidden, _ = self.rnn(self.embed(tokens))
        return self.proj(hidden)


def tokens_for(step, rank):
    g = torch.Generator().manual_seed(500 + 2 * step + rank)
    return torch.randint(VOCAB, (4, 11), generator=g)


def snapshot(model):
    """Weights as float16, half the size; training goes on in float32."""
    buffer = io.BytesIO()
    model.half()
    torch.save(model.state_dict(), buffer)
    model.float()
    return buffer.getvalue()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(RNNLM())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    snapshots = []
    for step in range(6):
        tokens = tokens_for(step, rank)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 2:
            snapshots.append(snapshot(model.module))
    if rank == 0:
        print(len(snapshots), "snapshot")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
