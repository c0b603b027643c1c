# doctor: expect=scheduler_steps_per_rank ranks=2 launch=torchrun
# measured: learning rate in the middle of the run 0, right is 0.05; replicas equal at the end
"""Accelerate: linear decay over the run."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset


def main(epochs=2):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    total = epochs * len(loader)
    scheduler = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=total)
    scheduler = accelerator.prepare(scheduler)
    rates = []
    for _ in range(epochs):
        for inputs, targets in loader:
            rates.append(optimizer.param_groups[0]["lr"])
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.print("learning rate in the middle of the run", f"{rates[len(rates) // 2]:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
