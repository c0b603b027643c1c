"""The same loop in one process: the loss after four steps of AdamW."""

import torch
import torch.nn.functional as F


def value(script, run):
    torch.manual_seed(30)
    model = script.MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    x, y = map(torch.cat, zip(script.get_batch(0, 0), script.get_batch(0, 1), strict=True))
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return "loss after four steps", run.printed("step 4 loss "), loss.item()
