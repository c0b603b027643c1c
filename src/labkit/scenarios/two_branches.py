"""A model in which a rank may leave out a branch, and what DDP's error says about it."""

import re

import torch
from torch import Tensor, nn


class TwoBranches(nn.Module):
    """Inputs (B, 6) → (B, 1). Samples whose features have a mean above 1 also use `right`.

    A batch without such a sample gives `right` no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.body = nn.Linear(6, 8)
            self.left, self.right = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        outputs = self.left(hidden)
        rare = x.mean(1, keepdim=True) > 1
        if rare.any():
            outputs = outputs + rare * self.right(hidden)
        return outputs


def headline(error: Exception) -> str:
    """The first sentence of DDP's error, and the parameters that it names, sorted."""
    text = str(error)
    names = re.search(r"Parameters which did not receive grad for (rank \d+): (.*)", text)
    first = text.split(". ")[0].split(" in the prior")[0]
    if not names:
        return first
    return f"{first}\n{names[1]} lacks {', '.join(sorted(names[2].split(', ')))}"
