"""Each rank's mean loss with its own layers, averaged."""

import torch.nn.functional as F


def gradient(script, load):
    model = load(script.make())
    for rank in range(2):
        x, y, keep = script.batch(0, rank)
        (F.mse_loss(model(x, keep), y) / 2).backward()
    return model
