"""Each rank's mean loss, averaged, with a zero gradient where an expert saw nothing."""

import torch.nn.functional as F


def gradient(script, load):
    model = load(script.create())
    for rank in range(2):
        x, y, task = script.task_batch(0, rank)
        (F.mse_loss(model(x, task), y) / 2).backward()
    return model
