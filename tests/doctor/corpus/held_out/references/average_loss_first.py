"""Both ranks' points in one batch."""

import torch
import torch.nn.functional as F


def gradient(script, load):
    model = load(script.net())
    x, label = map(torch.cat, zip(script.moons(16, 0), script.moons(16, 1), strict=True))
    F.cross_entropy(model(x), label).backward()
    return model
