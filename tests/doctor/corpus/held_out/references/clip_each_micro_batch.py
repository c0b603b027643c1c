"""The six micro-batches of the first update in one batch, clipped once."""

import torch
import torch.nn.functional as F


def gradient(script, load):
    model = load(script.build())
    tokens, target = map(torch.cat, zip(*map(script.micro_batch, range(6)), strict=True))
    F.cross_entropy(model(tokens), target).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), script.cfg["clip"])
    return model
