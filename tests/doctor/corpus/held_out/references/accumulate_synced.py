"""The four micro-batches of the first update in one batch."""

import torch
import torch.nn.functional as F


def gradient(script, load):
    model = load(script.model_fn())
    x, y = map(torch.cat, zip(*map(script.micro, range(4)), strict=True))
    F.cross_entropy(model(x), y).backward()
    return model
