"""The 32 sequences of the first step in one batch."""

import torch


def gradient(script, load):
    model = load(script.GPT())
    generators = [torch.Generator().manual_seed(100 + rank) for rank in range(2)]
    batches = [script.get_batch(g) for g in generators for _ in range(4)]
    x, y = map(torch.cat, zip(*batches, strict=True))
    model(x, y)[1].backward()
    return model
