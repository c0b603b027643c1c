# doctor: expect=none ranks=1 launch=python
# measured: gradient of step 0 against one process with the full batch: every rank ratio 1 cosine 1
"""Plain training in one process with gradient accumulation, loss per token."""

import torch
import torch.nn.functional as F
from torch import nn


class Labeler(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.lstm = nn.LSTM(12, 12, batch_first=True, bidirectional=True)
        self.out = nn.Linear(24, 3)

    def forward(self, tokens):
        return self.out(self.lstm(self.embed(tokens))[0])


def micro_batch(index):
    g = torch.Generator().manual_seed(index)
    tokens = torch.randint(20, (3, 10), generator=g)
    labels = tokens % 3
    labels[:, 2 + 2 * (index % 4) :] = -100
    return tokens, labels


def labeler():
    torch.manual_seed(0)
    return Labeler()


def main(updates=3, accumulate=4):
    model = labeler()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for update in range(updates):
        window = [micro_batch(update * accumulate + k) for k in range(accumulate)]
        count = sum((labels != -100).sum().item() for _, labels in window)
        optimizer.zero_grad()
        running = 0.0
        for tokens, labels in window:
            logits = model(tokens).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / count
            loss.backward()
            running += loss.item()
        optimizer.step()
        print(f"update {update}: {running:.4f} over {count} tokens")


if __name__ == "__main__":
    main()
