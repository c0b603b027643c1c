"""Both ranks' views in one batch, gradients through every row and column."""

import torch


def gradient(script, load):
    model = load(script.Encoder())
    first, second = map(torch.cat, zip(script.views(0, 0), script.views(0, 1), strict=True))
    script.nt_xent(*model(torch.cat([first, second])).chunk(2)).backward()
    return model
