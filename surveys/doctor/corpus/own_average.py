# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Averages gradients by hand, in one flat buffer."""

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(11, 22), nn.ReLU(), nn.Linear(22, 5))


def batch(step, rank):
    g = torch.Generator().manual_seed(13 * step + rank)
    x = torch.randn(12, 11, generator=g)
    return x, x[:, :5].argmax(1)


def sync_initial_weights(model):
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, src=0)


def average_gradients(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat.div_(dist.get_world_size())
    for grad, averaged in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
        grad.copy_(averaged)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = make_model()
    sync_initial_weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for step in range(6):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        average_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if rank == 0:
        print(f"{sum(p.abs().sum().item() for p in model.parameters()):.5f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
