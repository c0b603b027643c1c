"""The second update: two micro-batches per rank in one batch."""

import torch
import torch.nn.functional as F

STEP = 1


def gradient(script, load):
    model = load(script.mlp())
    batches = [script.data(index, rank) for index in (1, 2) for rank in range(2)]
    x, y = map(torch.cat, zip(*batches, strict=True))
    F.cross_entropy(model(x), y).backward()
    return model
