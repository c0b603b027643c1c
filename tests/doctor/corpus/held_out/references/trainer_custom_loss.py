"""All sixteen sequences, which make up one step, in one batch."""

import torch
from transformers import Trainer


def parameters(model):
    """Trainer's optimizer has two groups: with weight decay and without."""
    decay = Trainer.get_decay_parameter_names(None, model)
    named = list(model.named_parameters())
    return [p for n, p in named if n in decay] + [p for n, p in named if n not in decay]


def gradient(script, load):
    model = load(script.tiny_gpt2())
    ids = torch.stack([item["input_ids"] for item in map(script.Numbers().__getitem__, range(16))])
    script.smoothed(model(input_ids=ids).logits, ids).backward()
    return model
