# doctor: expect=loss_divided_twice ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 0.25 cosine 1; replicas equal at the end
"""Accelerate, gradient accumulation with accelerator.accumulate."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATION_STEPS = 4


def dataset():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(96, 7, generator=g)
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def network():
    set_seed(17)
    return nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 2))


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION_STEPS)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset(), batch_size=6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    criterion = nn.CrossEntropyLoss()
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = criterion(model(x), y)
            loss = loss / ACCUMULATION_STEPS
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    weights = sum(p.abs().sum().item() for p in accelerator.unwrap_model(model).parameters())
    accelerator.print(f"weights {weights:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
