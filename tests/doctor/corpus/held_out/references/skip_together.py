"""The third update (of step 3, after one that was skipped): both ranks' windows in one batch."""

import torch
import torch.nn.functional as F

STEP = 2


def gradient(script, load):
    model = load(script.forecaster())
    x, y = map(torch.cat, zip(script.series(3, 0), script.series(3, 1), strict=True))
    F.mse_loss(model(x), y).backward()
    return model
