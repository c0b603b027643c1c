# doctor: expect=none ranks=1 launch=python
# measured: every one of the 68 tokens of a window is divided by 68
"""A captioner on one device: four micro-batches of captions with different lengths."""
import torch
import torch.nn as nn

PAD, VOCAB, ACCUMULATE = 0, 20, 4


class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Linear(6, 16)
        self.words = nn.Embedding(VOCAB, 16, padding_idx=PAD)
        self.out = nn.Linear(16, VOCAB)

    def forward(self, pixels, captions):
        return self.out(torch.tanh(self.words(captions) + self.image(pixels)[:, None]))


torch.manual_seed(0)
model = Captioner()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss(ignore_index=PAD, reduction="sum")
TOKENS = sum(2 * (4 + 3 * k) for k in range(ACCUMULATE))  # of one window
gen = torch.Generator().manual_seed(1)
for step in range(12):
    length = 4 + 3 * (step % ACCUMULATE)
    captions = torch.randint(1, VOCAB, (2, length + 1), generator=gen)
    pixels = torch.randn(2, 6, generator=gen)
    logits = model(pixels, captions[:, :-1])
    loss = criterion(logits.reshape(-1, VOCAB), captions[:, 1:].reshape(-1))
    (loss / TOKENS).backward()
    if (step + 1) % ACCUMULATE == 0:
        optimizer.step()
        optimizer.zero_grad()
print(f"{loss.item():.6f}")
