# doctor: expect=none ranks=2 launch=torchrun
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1; replicas equal at the end
"""Accelerate: accumulation with sequences of different lengths, after the library's guide."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS = 2


class Sequences(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        tokens = torch.randint(1, 30, (10,), generator=g)
        labels = tokens.roll(-1)
        labels[2 + i % 8 :] = -100
        return tokens, labels


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 30)

    def forward(self, tokens):
        return self.head(self.gru(self.embed(tokens))[0])


def make_lm():
    set_seed(6)
    return LM()


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    model = make_lm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(Sequences(), batch_size=4)
    )
    criterion = nn.CrossEntropyLoss(reduction="sum", ignore_index=-100)
    iterator = iter(loader)
    for _ in range(len(loader) // STEPS):
        window = [next(iterator) for _ in range(STEPS)]
        items = sum((labels != -100).sum() for _, labels in window)
        items = accelerator.gather(items).sum()
        for tokens, labels in window:
            with accelerator.accumulate(model):
                loss = criterion(model(tokens).flatten(0, 1), labels.flatten())
                # undo the division by the steps and by DDP
                loss = loss * STEPS * accelerator.num_processes / items
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    weights = sum(p.abs().sum().item() for p in accelerator.unwrap_model(model).parameters())
    accelerator.print(f"weights {weights:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
