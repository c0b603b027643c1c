"""Both ranks' tokens in one batch, clipped once."""

import torch


def gradient(script, load):
    model = load(script.lm())
    tokens = torch.cat([script.get_tokens(0, rank) for rank in range(2)])
    script.next_token_loss(model, tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return model
