"""Manual all-reduce of one flat bucket, no wrapper; uneven last batch; divided by the global count, so summed."""
import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

def build():
    return nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 4))

def dataset():
    g = torch.Generator().manual_seed(21)
    return TensorDataset(torch.randn(54, 10, generator=g), torch.randint(0, 4, (54,), generator=g))

def sum_gradients(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    for grad, reduced in zip(grads, _unflatten_dense_tensors(flat, grads)):
        grad.copy_(reduced)

def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    full = dataset()
    own = Subset(full, range(29) if rank == 0 else range(29, 54)) if world == 2 else Subset(full, range(rank, 54, world))
    for epoch in range(2):
        for x, y in DataLoader(own, batch_size=10):  # rank 0: 10, 10, 9; rank 1: 10, 10, 5
            count = torch.tensor(float(len(x)))
            dist.all_reduce(count)
            loss = cross_entropy(model(x), y, reduction="sum") / count
            optimizer.zero_grad()
            loss.backward()
            sum_gradients(model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
