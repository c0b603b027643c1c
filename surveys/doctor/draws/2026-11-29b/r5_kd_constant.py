"""DistilBERT-like distillation: sums over the batch size, layer-wise learning rates, checkpointing."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB, DIM, CLASSES, TEMPERATURE, BATCH = 50, 16, 4, 2.0, 8


class Sentences(Dataset):
    def __init__(self, n=96):
        g = torch.Generator().manual_seed(9)
        self.rows = []
        for _ in range(n):
            k = int(torch.randint(3, 12, (), generator=g))
            ids = torch.randint(1, VOCAB, (k,), generator=g)
            self.rows.append((ids, int(ids.sum()) % CLASSES))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    ids = nn.utils.rnn.pad_sequence([r[0] for r in rows], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": ids != 0,
        "labels": torch.tensor([r[1] for r in rows]),
    }


class Classifier(nn.Module):
    def __init__(self, layers, gradient_checkpointing=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(DIM, CLASSES)
        self.gradient_checkpointing = gradient_checkpointing

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(layer, x, None, ~attention_mask, use_reentrant=False)
            else:
                x = layer(x, src_key_padding_mask=~attention_mask)
        return self.head(x[:, 0]), x[:, 0]


def distillation(student, teacher, labels):
    s_logits, s_hidden = student
    t_logits, t_hidden = teacher
    loss_ce = (
        F.kl_div(
            F.log_softmax(s_logits / TEMPERATURE, dim=-1),
            F.softmax(t_logits / TEMPERATURE, dim=-1),
            reduction="sum",
        )
        * TEMPERATURE**2
        / BATCH
    )
    loss_cos = (
        F.cosine_embedding_loss(s_hidden, t_hidden, torch.ones(BATCH), reduction="sum") / BATCH
    )
    return (
        5.0 * loss_ce + 2.0 * F.cross_entropy(s_logits, labels, reduction="sum") / BATCH + loss_cos
    )


def layer_wise(model, lr=1e-3, decay=0.8):
    groups = [{"params": model.head.parameters(), "lr": lr}]
    for depth, layer in enumerate(reversed(model.layers), 1):
        groups.append({"params": layer.parameters(), "lr": lr * decay**depth})
    return [
        *groups,
        {"params": model.embed.parameters(), "lr": lr * decay ** (len(model.layers) + 1)},
    ]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(42)
    teacher = Classifier(4).eval().requires_grad_(False)
    student = Classifier(2, gradient_checkpointing=True)
    for i, layer in enumerate(student.layers):
        layer.load_state_dict(teacher.layers[2 * i].state_dict())
    optimizer = torch.optim.AdamW(layer_wise(student), weight_decay=0.01)
    student = DistributedDataParallel(student)
    data = Sentences()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler, collate_fn=collate, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        student.train()
        for batch in loader:
            labels = batch.pop("labels")
            with torch.no_grad():
                target = teacher(**batch)
            loss = distillation(student(**batch), target, labels)
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
