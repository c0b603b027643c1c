"""The first eight images of either half in one batch."""

import torch
import torch.nn.functional as F


def gradient(script, load):
    model = load(script.ResidualNet())
    images, labels = script.all_images()
    rows = [*range(8), *range(32, 40)]
    F.cross_entropy(model(images[rows]), labels[torch.tensor(rows)]).backward()
    return model
