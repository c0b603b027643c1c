"""The model and the data of the thread on accumulated and distributed gradients.

The thread is "Unexplained behaviour in accumulate gradients vs in a ddp setting". An image of 4
numbers is encoded to 4 numbers and decoded to a distribution over 6 tokens; 3 captions of 4 tokens
each are scored against it. Sizes, seeds, and the order of the random draws are the thread's,
because its printed norms depend on them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

PIXELS = HIDDEN = 4
CAPTIONS = 3
WORDS = 4
VOCABULARY = 6
SEED = 42

# What the thread printed for each parameter, accumulated on one process and on each of 4 ranks.
PRINTED = {
    "encoder.weight": 0.1327,
    "encoder.bias": 0.0649,
    "decoder.weight": 0.2206,
    "decoder.bias": 0.1619,
}


class ToyCaptioner(nn.Module):
    """Two linear layers; `forward` returns the mean cross-entropy over all tokens of all captions.

    pixels: float (batch, 4). captions: int64 (batch, 3, 4), each below 6. The loss is a scalar.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(PIXELS, HIDDEN)
        self.decoder = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, pixels: Tensor, captions: Tensor) -> Tensor:
        logits = self.decoder(self.encoder(pixels))
        # Each of a picture's captions is scored, word by word, against the same logits.
        logits = logits[:, None, None, :].expand(-1, CAPTIONS, WORDS, -1)
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), captions.reshape(-1))


def draw_toy_data(samples: int = 4) -> TensorDataset:
    """`samples` images with captions, from the current state of torch's generator."""
    pixels = torch.randn(samples, PIXELS)
    captions = torch.randint(0, VOCABULARY, (samples, CAPTIONS, WORDS))
    return TensorDataset(pixels, captions)


def seeded_toy_data(seed: int = SEED, samples: int = 4) -> TensorDataset:
    """The same data on every process: the generator is seeded first."""
    torch.manual_seed(seed)
    return draw_toy_data(samples)


def seeded_toy_captioner(seed: int = SEED) -> ToyCaptioner:
    """The same model on every process: the generator is seeded again, as in the thread."""
    torch.manual_seed(seed)
    return ToyCaptioner()


def gradient_norms(module: nn.Module) -> dict[str, float]:
    """The norm of each parameter's gradient, by name, with or without a wrapper."""
    return {
        name.removeprefix("module."): parameter.grad.norm().item()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
