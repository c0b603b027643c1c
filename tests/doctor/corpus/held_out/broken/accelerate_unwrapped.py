# doctor: expect=wrapper_bypassed ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: rank 0 ratio 1.132 cosine 0.8698, rank 1 ratio 1.159 cosine 0.8763; replicas differ at the end by up to 0.07698
# also: replicas_drift
"""Accelerate: preference optimization with a frozen reference policy."""

import copy

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCAB = 20


class Policy(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        return self.head(self.gru(self.embed(tokens))[0])

    def log_probability(self, tokens):
        logits = self(tokens[:, :-1]).log_softmax(-1)
        return logits.gather(2, tokens[:, 1:, None]).squeeze(2).sum(1)


def preferences(n=32):
    g = torch.Generator().manual_seed(0)
    chosen = torch.randint(10, (n, 8), generator=g)
    rejected = torch.randint(10, VOCAB, (n, 8), generator=g)
    return TensorDataset(chosen, rejected)


def dpo_loss(policy, reference, chosen, rejected, beta=0.5):
    with torch.no_grad():
        base = reference.log_probability(chosen) - reference.log_probability(rejected)
    margin = policy.log_probability(chosen) - policy.log_probability(rejected)
    return -F.logsigmoid(beta * (margin - base)).mean()


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(9)
    policy = Policy()
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    loader = DataLoader(preferences(), batch_size=4)
    policy, optimizer, loader = accelerator.prepare(policy, optimizer, loader)
    for chosen, rejected in loader:
        unwrapped = accelerator.unwrap_model(policy)
        loss = dpo_loss(unwrapped, reference, chosen, rejected)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.print(f"loss {mean:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
