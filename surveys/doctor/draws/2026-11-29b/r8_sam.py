"""Sharpness-aware minimization: two synchronized backwards per step, the second at other weights."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def _grad_norm(self):
        norms = [
            p.grad.norm(p=2)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        return torch.norm(torch.stack(norms), p=2)


class SmoothCrossEntropy(nn.Module):
    def __init__(self, smoothing=0.1):
        super().__init__()
        self.smoothing = smoothing

    def forward(self, pred, gold):
        n = pred.size(1)
        one_hot = torch.full_like(pred, self.smoothing / (n - 1))
        one_hot.scatter_(1, gold.unsqueeze(1), 1.0 - self.smoothing)
        return nn.functional.kl_div(pred.log_softmax(1), one_hot, reduction="none").sum(-1)


def dataset(n=128):
    g = torch.Generator().manual_seed(17)
    return TensorDataset(
        torch.randn(n, 3, 6, 6, generator=g), torch.randint(0, 5, (n,), generator=g)
    )


def build():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 32),
        nn.ReLU(),
        nn.Linear(32, 5),
    )


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(42)
    model = DistributedDataParallel(build())
    criterion = SmoothCrossEntropy()
    optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
    data = dataset()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            predictions = model(inputs)
            loss = criterion(predictions, targets)
            loss.mean().backward()
            optimizer.first_step(zero_grad=True)
            criterion(model(inputs), targets).mean().backward()
            optimizer.second_step(zero_grad=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
