# doctor: expect=own_reduction_sums ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 2 cosine 1; replicas equal at the end
# also: scaled_by_world_size
"""Data-parallel training without a wrapper, after the tutorial, but with our own averaging."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.fc = nn.Linear(6 * 13 * 13, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        return F.log_softmax(self.fc(x.flatten(1)), dim=1)


def partition(rank, size, n=48):
    g = torch.Generator().manual_seed(1234)
    images = torch.randn(n, 1, 28, 28, generator=g)
    labels = torch.randint(10, (n,), generator=g)
    return images[rank::size], labels[rank::size]


def synchronize_gradients(model):
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)


def run(rank, size):
    torch.manual_seed(1234)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    images, labels = partition(rank, size)
    for epoch in range(2):
        epoch_loss = 0.0
        for x, y in zip(images.split(8), labels.split(8), strict=True):
            optimizer.zero_grad()
            loss = F.nll_loss(model(x), y)
            epoch_loss += loss.item()
            loss.backward()
            synchronize_gradients(model)
            optimizer.step()
        mean = torch.tensor(epoch_loss / 3)
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: {mean.item() / size:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()
