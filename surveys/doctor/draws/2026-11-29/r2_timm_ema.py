"""A timm-like image loop: mixup, label smoothing, EMA, GradScaler wrapper, custom autograd Function."""
import copy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class SwishJit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s * (1 + x * (1 - s)))

class Net(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head(SwishJit.apply(self.norm(self.stem(x))).mean((2, 3)))

class Images(Dataset):
    def __init__(self, n=96):
        g = torch.Generator().manual_seed(7)
        self.x, self.y = torch.randn(n, 3, 8, 8, generator=g), torch.randint(0, 5, (n,), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]

class ModelEma:
    def __init__(self, model, decay=0.99):
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for e, m in zip(self.module.state_dict().values(), model.state_dict().values()):
            e.copy_(self.decay * e + (1 - self.decay) * m)

class NativeScaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cpu")

    def __call__(self, loss, optimizer, clip_grad, parameters):
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()

def soft_targets(y, classes=5, smoothing=0.1):
    return torch.full((len(y), classes), smoothing / classes).scatter_(1, y[:, None], 1 - smoothing + smoothing / classes)

def mixup(x, y, lam=0.8):
    t = soft_targets(y)
    return lam * x + (1 - lam) * x.flip(0), lam * t + (1 - lam) * t.flip(0)

def soft_ce(logits, target):
    return torch.sum(-target * F.log_softmax(logits, dim=-1), dim=-1).mean()

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(42 + dist.get_rank())
    model = Net()
    ema = ModelEma(model)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    dataset = Images()
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)
    scaler = NativeScaler()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            x, target = mixup(x, y)
            loss = soft_ce(model(x), target)
            optimizer.zero_grad()
            scaler(loss, optimizer, 1.0, model.parameters())
            ema.update(model.module)
            reduced = loss.detach().clone()
            dist.all_reduce(reduced)
            reduced /= dist.get_world_size()
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {reduced.item():.4f}", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
