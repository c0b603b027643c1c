"""The first step: both ranks' batches in one."""

import torch
import torch.nn.functional as F


def gradient(script, load):
    model = load(script.model_fn())
    first = [next(script.shard(rank)) for rank in range(2)]
    x, y = map(torch.cat, zip(*first, strict=True))
    F.mse_loss(model(x), y).backward()
    return model
