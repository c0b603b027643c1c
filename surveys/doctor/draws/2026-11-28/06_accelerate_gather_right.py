"""Two-tower retrieval with in-batch negatives from all processes, with Accelerate."""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

IN, DIM = 12, 8
BATCH = 6
STEPS = 5


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(IN, 16), nn.ReLU(), nn.Linear(16, DIM))
        self.doc = nn.Sequential(nn.Linear(IN, 16), nn.ReLU(), nn.Linear(16, DIM))

    def forward(self, q, d):
        return self.query(q), self.doc(d)


class GatherWithGrad(torch.autograd.Function):
    """Rows of all processes; their gradients are summed and go back to the owners."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def build_models():
    torch.manual_seed(3)
    return [TwoTower()]


def build_data():
    g = torch.Generator().manual_seed(11)
    queries = torch.randn(72, IN, generator=g)
    docs = queries + 0.5 * torch.randn(72, IN, generator=g)
    return TensorDataset(queries, docs)


def contrast(a, b, scores):
    """Every query against its own document and against all documents."""
    return scores.logsumexp(1) - (a * b).sum(1)


def main():
    accelerator = Accelerator(cpu=True)
    model = build_models()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(build_data(), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for step, (q, d) in enumerate(loader):
        if step == STEPS:
            break
        optimizer.zero_grad()
        a, b = model(q, d)
        b_all = GatherWithGrad.apply(b)
        loss = contrast(a, b, a @ b_all.T).mean()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.print(f"step {step}: loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
