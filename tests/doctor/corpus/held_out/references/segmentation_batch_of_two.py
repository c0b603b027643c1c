"""The eight images of the first step in one batch, with the statistics of all eight."""

import torch
import torch.nn.functional as F


def gradient(script, load):
    model = load(script.make_unet())
    data = script.Shapes()
    images, masks = map(torch.stack, zip(*(data[i] for i in range(8)), strict=True))
    F.binary_cross_entropy_with_logits(model(images), masks).backward()
    return model
