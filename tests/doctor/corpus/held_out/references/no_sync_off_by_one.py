"""The four first batches of each rank as one."""

import torch
import torch.nn.functional as F


def gradient(script, load):
    model = load(script.new_model())
    x, y = map(torch.cat, zip(*script.batches(0, 4), *script.batches(1, 4), strict=True))
    F.cross_entropy(model(x), y).backward()
    return model
