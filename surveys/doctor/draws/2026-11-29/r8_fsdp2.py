"""torchtitan-like: fully_shard per block, loss mean, clip_grad_norm_ on DTensors, accumulation with set_requires_gradient_sync."""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))

class Transformer(nn.Module):
    def __init__(self, vocab=40, dim=16, depth=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(depth))
        self.out = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        h = self.tok(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.out(h)

class Tokens(Dataset):
    def __init__(self, n=128):
        self.rows = torch.randint(0, 40, (n, 13), generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i, :-1], self.rows[i, 1:]

def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    data = Tokens()
    loader = iter(DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False)))
    accumulation = 2
    for step in range(6):
        optimizer.zero_grad()
        for micro in range(accumulation):
            model.set_requires_gradient_sync(micro == accumulation - 1)
            inputs, labels = next(loader)
            loss = cross_entropy(model(inputs).flatten(0, 1), labels.flatten()) / accumulation
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
