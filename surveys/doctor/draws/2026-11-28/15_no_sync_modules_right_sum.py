"""A small recognizer made of several modules; each module with weights is wrapped in DDP."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FEATURES, CLASSES = 12, 6
BATCH = 4
GRAD_ACCUMULATION_FACTOR = 2
UPDATE_SIZE = 8  # samples per rank and update
STEPS = 4


class Scale(nn.Module):
    """Fixed feature normalization, no weights."""

    def forward(self, x):
        return x / (1 + x.abs())


def build_models():
    torch.manual_seed(31)
    return [
        nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh()),
        nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)),
    ]


def build_data():
    g = torch.Generator().manual_seed(29)
    y = torch.randint(CLASSES, (96,), generator=g)
    x = torch.randn(96, FEATURES, generator=g) + F.one_hot(y, FEATURES)
    return TensorDataset(x, y)


class Brain:
    def __init__(self):
        encoder, decoder = build_models()
        self.modules = {
            "encoder": DistributedDataParallel(encoder),
            "scale": Scale(),
            "decoder": DistributedDataParallel(decoder),
        }
        params = [p for m in self.modules.values() for p in m.parameters()]
        self.optimizer = torch.optim.SGD(params, lr=0.1)
        self.step = 0

    @contextmanager
    def no_sync(self, use=True):
        """DDP's no_sync for all modules."""
        changed = []
        if use:
            for module in self.modules.values():
                if not hasattr(module, "require_backward_grad_sync"):
                    continue  # not DDP
                module.require_backward_grad_sync = False
                changed.append(module)
        yield
        for module in changed:
            module.require_backward_grad_sync = True

    def compute_forward(self, x):
        h = self.modules["scale"](self.modules["encoder"](x))
        return self.modules["decoder"](h)

    def fit_batch(self, x, y):
        self.step += 1
        should_step = self.step % GRAD_ACCUMULATION_FACTOR == 0
        with self.no_sync(not should_step):
            outputs = self.compute_forward(x)
            loss = F.cross_entropy(outputs, y, reduction="sum") / UPDATE_SIZE
            loss.backward()
        if should_step:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    brain = Brain()
    data = build_data()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)

    for i, (x, y) in enumerate(loader):
        if i == STEPS * GRAD_ACCUMULATION_FACTOR:
            break
        loss = brain.fit_batch(x, y)
        if rank == 0:
            print(f"batch {i}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
