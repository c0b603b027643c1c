"""Each rank's first batch with the masks of its own seed, averaged."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler


def gradient(script, load):
    model = load(script.TextClassifier())
    data = script.corpus()
    for rank in range(2):
        torch.manual_seed(1 + rank)
        sampler = DistributedSampler(data, 2, rank, drop_last=True)
        # iter() draws a number, as it does in the script.
        tokens, label = next(iter(DataLoader(data, batch_size=8, sampler=sampler)))
        (F.cross_entropy(model(tokens), label) / 2).backward()
    return model
