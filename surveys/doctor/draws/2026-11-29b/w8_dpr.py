"""Dense retrieval with negatives of all ranks: own rows carry gradient, the factor W is missing."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB, DIM, TRAIN_N_PASSAGES = 60, 16, 2


class TrainDataset(Dataset):
    def __init__(self, n=96):
        g = torch.Generator().manual_seed(15)
        self.query = torch.randint(0, VOCAB, (n, 4), generator=g)
        noise = torch.randint(0, VOCAB, (n, TRAIN_N_PASSAGES, 6), generator=g)
        noise[:, 0, :4] = self.query  # the first passage is the positive one
        self.passages = noise

    def __len__(self):
        return len(self.query)

    def __getitem__(self, i):
        return self.query[i], self.passages[i]


def collate(features):
    return torch.stack([f[0] for f in features]), torch.cat([f[1] for f in features])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mlp = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, DIM)

    def forward(self, ids):
        return self.mlp(torch.tanh(self.embed(ids)).mean(1))


class DenseModel(nn.Module):
    def __init__(self, temperature=0.5):
        super().__init__()
        self.lm_q, self.lm_p = Encoder(), Encoder()
        self.cross_entropy = nn.CrossEntropyLoss(reduction="mean")
        self.temperature = temperature
        self.process_rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def forward(self, query: Tensor, passage: Tensor):
        q_reps, p_reps = self.lm_q(query), self.lm_p(passage)
        if self.training:
            q_reps = self.dist_gather_tensor(q_reps)
            p_reps = self.dist_gather_tensor(p_reps)
        scores = q_reps @ p_reps.transpose(0, 1) / self.temperature
        target = torch.arange(scores.size(0), dtype=torch.long)
        target = target * (p_reps.size(0) // q_reps.size(0))
        return self.cross_entropy(scores, target)

    def dist_gather_tensor(self, t: Tensor):
        t = t.contiguous()
        all_tensors = [torch.empty_like(t) for _ in range(self.world_size)]
        dist.all_gather(all_tensors, t)
        all_tensors[self.process_rank] = t
        return torch.cat(all_tensors, dim=0)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(42)
    model = DistributedDataParallel(DenseModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    data = TrainDataset()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler, collate_fn=collate, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for query, passage in loader:
            loss = model(query, passage)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
