# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Rank 0 validates through .module and saves; all ranks load the best weights at the end."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def split(seed, n):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    return TensorDataset(x, (x[:, 0] > x[:, 1]).long())


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))


@torch.no_grad()
def validate(model, loader):
    model.eval()
    losses = [nn.functional.cross_entropy(model(x), y, reduction="sum") for x, y in loader]
    model.train()
    return sum(losses).item() / len(loader.dataset)


def fit(folder):
    rank = dist.get_rank()
    train_set = split(0, 64)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=8, sampler=sampler)
    val_loader = DataLoader(split(1, 30), batch_size=10)
    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    path, best = Path(folder) / "best.pt", float("inf")
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            value = validate(model.module, val_loader)
            print(f"epoch {epoch} validation loss {value:.4f}")
            if value < best:
                best = value
                torch.save({"model": model.module.state_dict(), "epoch": epoch}, path)
        dist.barrier()
    state = torch.load(path, map_location="cpu")
    model.module.load_state_dict(state["model"])
    if rank == 0:
        print("best epoch", state["epoch"])


def main():
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    fit(folder[0])
    dist.barrier()
    if dist.get_rank() == 0:
        for file in Path(folder[0]).iterdir():
            file.unlink()
        Path(folder[0]).rmdir()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
