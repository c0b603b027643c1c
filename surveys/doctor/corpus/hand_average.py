# doctor: expect=none ranks=2 launch=torchrun
# measured: parameters are bitwise equal on all ranks after each of 9 steps
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim


def sync_gradients(model):
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= dist.get_world_size()


def run(rank, size):
    torch.manual_seed(1234)
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    loss_fn = nn.CrossEntropyLoss()
    gen = torch.Generator().manual_seed(rank)
    for epoch in range(3):
        epoch_loss = 0.0
        for _ in range(3):
            data = torch.randn(8, 10, generator=gen)
            target = torch.randint(0, 5, (8,), generator=gen)
            optimizer.zero_grad()
            output = model(data)
            loss = loss_fn(output, target)
            epoch_loss += loss.item()
            loss.backward()
            sync_gradients(model)
            optimizer.step()
        print("Rank", rank, "epoch", epoch, f"{epoch_loss:.5f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.destroy_process_group()
