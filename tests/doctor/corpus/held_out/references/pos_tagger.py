"""The first 16 sentences in one batch: the mean over all of their tokens."""

import torch.nn.functional as F


def gradient(script, load):
    model = load(script.Tagger())
    data = script.Sentences()
    words, tags = script.collate([data[i] for i in range(16)])
    F.cross_entropy(model(words).flatten(0, 1), tags.flatten(), ignore_index=-100).backward()
    return model
