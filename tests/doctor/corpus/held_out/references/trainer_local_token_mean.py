"""The first eight dialogues in one batch: the mean over all of their answer tokens."""

import torch
from transformers import Trainer


def parameters(model):
    """Trainer's optimizer has two groups: with weight decay and without."""
    decay = Trainer.get_decay_parameter_names(None, model)
    named = list(model.named_parameters())
    return [p for n, p in named if n in decay] + [p for n, p in named if n not in decay]


def gradient(script, load):
    model = load(script.tiny_llama())
    items = [script.Dialogues()[i] for i in range(8)]
    batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
    model(**batch).loss.backward()
    return model
