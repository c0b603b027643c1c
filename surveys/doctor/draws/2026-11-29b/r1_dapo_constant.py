"""Dr. GRPO: the sum of the token losses over a constant, the batch times the longest completion."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB, EOS, BATCH, GROUP, MAX_NEW, MICRO = 24, 0, 4, 4, 10, 2
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


class Prompts(Dataset):
    def __init__(self, n=48):
        g = torch.Generator().manual_seed(5)
        self.rows = torch.randint(1, VOCAB, (n, 5), generator=g)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Policy(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


@torch.no_grad()
def generate(model, prompts):
    ids = prompts.repeat_interleave(GROUP, 0)
    for _ in range(MAX_NEW):
        probs = model(ids)[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probs, 1)], 1)
    completion = ids[:, prompts.shape[1] :]
    ended = (completion == EOS).cumsum(1)
    mask = ((ended == 0) | ((ended == 1) & (completion == EOS))).float()
    return ids, mask


def rewards(ids, mask):
    completion = ids[:, -MAX_NEW:]
    return ((completion % 3 == 1) * mask).sum(1) - 0.1 * mask.sum(1)


def logps(logits, ids):
    logits = logits[:, -MAX_NEW - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, -MAX_NEW:, None]).squeeze(-1)


def policy_loss(new, old, advantages, mask):
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    per_token = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
    return (per_token * mask).sum()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Policy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Prompts()
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    torch.manual_seed(100 + rank)
    for prompts in loader:
        ids, mask = generate(model.module, prompts)
        reward = rewards(ids, mask).view(-1, GROUP)
        advantages = reward - reward.mean(1, keepdim=True)
        advantages = advantages.flatten()
        with torch.no_grad():
            old = logps(model.module(ids), ids)
        chunks = list(zip(*(t.chunk(MICRO) for t in (ids, old, advantages, mask))))
        for k, (i, o, a, m) in enumerate(chunks):
            model.require_backward_grad_sync = k == MICRO - 1
            loss = policy_loss(logps(model(i), i), o, a, m)
            (loss / (BATCH * GROUP * MAX_NEW)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
