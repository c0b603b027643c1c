"""The first batch of both samplers together."""

import torch
import torch.nn.functional as F
from torch.utils.data import DistributedSampler


def gradient(script, load):
    model = load(script.conv())
    data = script.Sines()
    rows = [i for rank in range(2) for i in list(DistributedSampler(data, 2, rank, seed=1))[:8]]
    x, y = zip(*(data[i] for i in rows), strict=True)
    F.cross_entropy(model(torch.stack(x)), torch.tensor(y)).backward()
    return model
