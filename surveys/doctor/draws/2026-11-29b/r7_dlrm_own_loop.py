"""A DLRM: sparse embedding bags with offsets, a dense tower, SparseAdam beside Adam; own loop, no loader."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

TABLES, ROWS, DIM, DENSE = 3, 100, 8, 5


class Clicks(Dataset):
    def __init__(self, n=256):
        g = torch.Generator().manual_seed(13)
        self.dense = torch.randn(n, DENSE, generator=g)
        counts = torch.randint(1, 5, (n, TABLES), generator=g)
        self.sparse = [
            [torch.randint(0, ROWS, (int(k),), generator=g) for k in row] for row in counts
        ]
        self.click = (torch.rand(n, generator=g) < 0.3).float()

    def __len__(self):
        return len(self.click)

    def __getitem__(self, i):
        return self.dense[i], self.sparse[i], self.click[i]


def collate(samples):
    dense, sparse, click = zip(*samples)
    indices, offsets = [], []
    for table in zip(*sparse):
        lengths = torch.tensor([0, *(len(bag) for bag in table[:-1])])
        indices.append(torch.cat(table))
        offsets.append(lengths.cumsum(0))
    return torch.stack(dense), indices, offsets, torch.stack(click)


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True) for _ in range(TABLES)
        )
        self.bottom = nn.Sequential(nn.Linear(DENSE, 16), nn.ReLU(), nn.Linear(16, DIM), nn.ReLU())
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(nn.Linear(DIM + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, indices, offsets):
        x = self.bottom(dense)
        bags = [table(i, o) for table, i, o in zip(self.tables, indices, offsets)]
        stacked = torch.stack([x, *bags], 1)
        z = stacked @ stacked.transpose(1, 2)
        row, column = torch.tril_indices(TABLES + 1, TABLES + 1, offset=-1)
        return self.top(torch.cat([x, z[:, row, column]], 1)).squeeze(1)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(727)
    model = DLRM()
    sparse_optimizer = torch.optim.SparseAdam(list(model.tables.parameters()), lr=1e-2)
    dense_optimizer = torch.optim.Adam(
        [*model.bottom.parameters(), *model.top.parameters()], lr=1e-3
    )
    model = DDP(model)
    loss_fn = nn.BCEWithLogitsLoss()
    data = Clicks()
    rank, world_size, batch = dist.get_rank(), dist.get_world_size(), 16
    mine = range(rank * len(data) // world_size, (rank + 1) * len(data) // world_size)
    for start in range(0, len(mine), batch):
        dense, indices, offsets, click = collate([data[i] for i in mine[start : start + batch]])
        loss = loss_fn(model(dense, indices, offsets), click)
        sparse_optimizer.zero_grad()
        dense_optimizer.zero_grad()
        loss.backward()
        sparse_optimizer.step()
        dense_optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
