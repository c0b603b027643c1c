# doctor: expect=wrapper_lost ranks=2 launch=torchrun
# measured: replicas differ at the end by up to 0.002698
# also: wrapper_bypassed,replicas_drift
"""Time-series anomaly detector, object-oriented."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Detector(nn.Module):
    def __init__(self, channels=3):
        super().__init__()
        self.conv = nn.Conv1d(channels, 8, 5, padding=2)
        self.score = nn.Conv1d(8, 1, 1)

    def forward(self, x):
        return self.score(torch.relu(self.conv(x))).squeeze(1)


class Experiment:
    def __init__(self, lr=0.05):
        torch.manual_seed(0)
        self.net = Detector()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=lr)
        self.loss_fn = nn.BCEWithLogitsLoss()
        self.distribute(self.net)

    def distribute(self, net):
        if dist.is_initialized():
            net = DistributedDataParallel(net)
        return net

    def windows(self, step):
        g = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(6, 3, 30, generator=g)
        return x, (x.abs().amax(1) > 1.5).float()

    def run(self, steps=5):
        for step in range(steps):
            x, y = self.windows(step)
            loss = self.loss_fn(self.net(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    last = Experiment().run()
    if dist.get_rank() == 0:
        print(f"{last:.4f}")
    dist.barrier()
    dist.destroy_process_group()
