"""An HF-Trainer-like loop: num_items_in_batch is gathered over ranks and micro-batches; ZeRO-1 optimizer."""
import itertools
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Texts(Dataset):
    def __init__(self, n=128):
        g = torch.Generator().manual_seed(3)
        self.rows = [torch.randint(1, 40, (int(torch.randint(3, 14, (), generator=g)),), generator=g) for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i]}

def collate(features):
    longest = max(len(f["input_ids"]) for f in features)
    ids = torch.zeros(len(features), longest, dtype=torch.long)
    labels = torch.full((len(features), longest), -100)
    for row, f in enumerate(features):
        n = len(f["input_ids"])
        ids[row, :n] = f["input_ids"]
        labels[row, :n] = f["input_ids"]
    return {"input_ids": ids, "labels": labels}

class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.body, self.head = nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 40)

    def forward(self, input_ids, labels, num_items_in_batch=None):
        logits = self.head(torch.tanh(self.body(self.emb(input_ids)))).float()
        reduction = "sum" if num_items_in_batch is not None else "mean"
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction=reduction)
        if reduction == "sum":
            loss = loss / num_items_in_batch
        return {"loss": loss, "logits": logits}

class Trainer:
    def __init__(self, model, accumulation=2):
        self.accumulation = accumulation
        self.model = DistributedDataParallel(model)
        self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.AdamW, lr=1e-3)
        data = Texts()
        self.loader = DataLoader(data, 4, sampler=DistributedSampler(data, seed=0), collate_fn=collate)

    def get_batch_samples(self, iterator):
        batches = list(itertools.islice(iterator, self.accumulation))
        items = sum((b["labels"][:, 1:] != -100).sum() for b in batches)
        gathered = [torch.zeros_like(items) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, items)
        return batches, torch.stack(gathered).sum()

    def training_step(self, batch, items):
        loss = self.model(**batch, num_items_in_batch=items)["loss"]
        loss = loss * dist.get_world_size()
        loss.backward()
        return loss.detach()

    def train(self):
        iterator = iter(self.loader)
        for step in range(len(self.loader) // self.accumulation):
            batches, items = self.get_batch_samples(iterator)
            for i, batch in enumerate(batches):
                if i < len(batches) - 1:
                    with self.model.no_sync():
                        self.training_step(batch, items)
                else:
                    self.training_step(batch, items)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.model.zero_grad()

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    Trainer(LM()).train()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
