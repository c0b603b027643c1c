"""A small autoregressive image-token model; the learning rate drops when the loss stalls."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, LENGTH, DIM = 24, 10, 16
BATCH = 4
STEPS = 6


class TokenModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def build_models():
    torch.manual_seed(5)
    return [TokenModel()]


def build_data():
    g = torch.Generator().manual_seed(13)
    return TensorDataset(torch.randint(VOCAB, (96, LENGTH + 1), generator=g))


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(build_models()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    data = build_data()
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)

    sampler.set_epoch(0)
    for step, (tokens,) in enumerate(loader):
        if step == STEPS:
            break
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        avg_loss = loss.detach().clone()
        dist.all_reduce(avg_loss)
        avg_loss /= world_size
        scheduler.step(avg_loss.item())
        lr = optimizer.param_groups[0]["lr"]
        if rank == 0:
            print(f"step {step}: loss {avg_loss.item():.4f}, lr {lr:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
