"""A mixture of experts: the load-balancing loss multiplies fractions of each rank's own tokens."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB, DIM, EXPERTS, TOP_K, AUX_COEF = 32, 16, 4, 2, 0.5


class Tokens(Dataset):
    def __init__(self, n=128):
        g = torch.Generator().manual_seed(6)
        start = torch.arange(n) * VOCAB // n
        self.rows = (start[:, None] + torch.randint(0, 8, (n, 9), generator=g)) % VOCAB

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i, :-1], self.rows[i, 1:]


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, DIM, 2 * DIM) * 0.1)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, 2 * DIM, DIM) * 0.1)

    def forward(self, x):
        probs = self.gate(x).softmax(-1)
        weight, chosen = probs.topk(TOP_K, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        routed = torch.zeros_like(probs).scatter(-1, chosen, weight)
        hidden = torch.einsum("td,edh->teh", x, self.w1).relu()
        out = torch.einsum("teh,ehd,te->td", hidden, self.w2, routed)
        fraction = F.one_hot(chosen, EXPERTS).sum(1).float().mean(0) / TOP_K
        self.aux_loss = EXPERTS * (fraction * probs.mean(0)).sum()
        return x + out


class LM(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(MoE() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids, labels):
        x = self.embed(ids).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(self.norm(x)), labels.flatten())
        aux = sum(layer.aux_loss for layer in self.layers)
        return loss + AUX_COEF * aux, {"ce": loss.detach(), "aux": aux.detach()}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(LM())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    data = Tokens()
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False))
    for step, (ids, labels) in enumerate(loader):
        loss, logs = model(ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 4 == 0:
            for value in logs.values():
                dist.all_reduce(value)
            if dist.get_rank() == 0:
                print(
                    step,
                    {k: round(v.item() / dist.get_world_size(), 3) for k, v in logs.items()},
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
