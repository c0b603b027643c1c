"""The first 48 samples (eight batches of six, dealt in turn) in one batch."""

import torch.nn.functional as F


def gradient(script, load):
    model = load(script.network())
    x, y = script.dataset()[:48]
    F.cross_entropy(model(x), y).backward()
    return model
