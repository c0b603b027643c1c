"""Both ranks' batches in one, clipped by the norm of the whole gradient."""

import torch
import torch.nn.functional as F


def gradient(script, load):
    model = load(script.model_fn())
    x, y = map(torch.cat, zip(script.batch(0, 0), script.batch(0, 1), strict=True))
    F.mse_loss(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), script.MAX_NORM)
    return model
