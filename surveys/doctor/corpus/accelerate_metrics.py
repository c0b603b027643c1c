# doctor: expect=none ranks=2 launch=torchrun
# measured: samples counted in the accuracy 37, right is 37; replicas equal at the end
"""Accelerate: trains and evaluates with gather_for_metrics, which drops the padding."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def split(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long())


def network():
    set_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def main(batch_size=8):
    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(split(64, 1), batch_size=batch_size, shuffle=True),
        DataLoader(split(37, 2), batch_size=batch_size),
    )
    for x, y in train_loader:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    correct = count = 0
    for x, y in test_loader:
        with torch.no_grad():
            prediction = model(x).argmax(1)
        prediction, y = accelerator.gather_for_metrics((prediction, y))
        correct += (prediction == y).sum().item()
        count += len(y)
    accelerator.print(f"accuracy {correct / count:.4f} on {count} samples")
    accelerator.end_training()


if __name__ == "__main__":
    main()
