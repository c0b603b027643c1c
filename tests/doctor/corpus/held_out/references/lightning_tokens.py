"""The first two batches of either sampler together (Lightning shuffles the training data)."""

import torch
from torch.utils.data import DistributedSampler


def gradient(script, load):
    model = load(script.Bert())
    data = script.MaskedText()
    samplers = [DistributedSampler(data, 2, rank, seed=1) for rank in range(2)]
    rows = [row for sampler in samplers for row in list(sampler)[:4]]
    tokens, labels = map(torch.stack, zip(*(data[row] for row in rows), strict=True))
    model.loss(model(tokens).flatten(0, 1), labels.flatten()).backward()
    return model
