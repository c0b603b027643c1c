# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""BatchNorm over all workers on CPUs, where nn.SyncBatchNorm does not run."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel as DDP


class GlobalBatchNorm1d(nn.BatchNorm1d):
    def forward(self, x):
        if not self.training or not dist.is_initialized():
            return super().forward(x)
        count = x.new_tensor(float(len(x)))
        moments = torch.cat([x.sum(0), x.square().sum(0), count.view(1)])
        moments = all_reduce(moments)
        total = moments[-1]
        mean, square = (moments[:-1] / total).chunk(2)
        var = square - mean.square()
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * total / (total - 1), self.momentum)
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


def network(norm=GlobalBatchNorm1d):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), norm(16), nn.ReLU(), nn.Linear(16, 3))


def points(step, rank):
    g = torch.Generator().manual_seed(2 * step + rank)
    x = torch.randn(5, 6, generator=g) * (1 + 3 * rank) + rank
    return x, x[:, :3].argmax(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(5):
        x, y = points(step, rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if rank == 0:
        print(f"running mean {model.module[1].running_mean.sum().item():.5f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
