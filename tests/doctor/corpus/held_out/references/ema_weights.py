"""Both ranks' samples in one batch."""

import torch
import torch.nn.functional as F


def gradient(script, load):
    model = load(script.regressor())
    x, y = map(torch.cat, zip(script.sample(0, 0), script.sample(0, 1), strict=True))
    F.huber_loss(model(x), y).backward()
    return model
