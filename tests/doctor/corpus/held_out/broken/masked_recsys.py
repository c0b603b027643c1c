# doctor: expect=missing_world_size_factor ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 0.5 cosine 1; replicas equal at the end
"""Rating prediction; only observed ratings count, so the count is taken over all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Factorizer(nn.Module):
    def __init__(self, users=30, items=20, width=8):
        super().__init__()
        self.users = nn.Embedding(users, width)
        self.items = nn.Embedding(items, width)
        self.bias = nn.Parameter(torch.zeros(items))

    def forward(self, users):
        return self.users(users) @ self.items.weight.T + self.bias


def ratings(step, rank, n=6):
    g = torch.Generator().manual_seed(31 * step + rank)
    users = torch.randint(30, (n,), generator=g)
    scores = torch.rand(n, 20, generator=g) * 4 + 1
    observed = torch.rand(n, 20, generator=g) < (0.2 if rank == 0 else 0.6)
    return users, scores, observed


def masked_mse(prediction, scores, observed):
    squared = (prediction - scores).pow(2) * observed
    count = observed.sum().float()
    dist.all_reduce(count)
    return squared.sum() / count.clamp(min=1)


class Trainer:
    def __init__(self):
        torch.manual_seed(3)
        self.model = DDP(Factorizer())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

    def fit(self, steps):
        for step in range(steps):
            users, scores, observed = ratings(step, dist.get_rank())
            loss = masked_mse(self.model(users), scores, observed)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.log(step, loss)

    def log(self, step, loss):
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"{step:3d} loss {total.item():.4f}")


def main():
    dist.init_process_group("gloo")
    Trainer().fit(steps=5)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
