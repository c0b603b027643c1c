"""The first eight images of each rank in one batch."""

import torch
import torch.nn.functional as F


def gradient(script, load):
    model = load(script.Net())
    shards = [script.partition(rank, 2) for rank in range(2)]
    images = torch.cat([images[:8] for images, _ in shards])
    labels = torch.cat([labels[:8] for _, labels in shards])
    F.nll_loss(model(images), labels).backward()
    return model
