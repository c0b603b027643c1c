"""Blurred seven-segment digits: classification data without the download of MNIST.

Every image is one sample, so micro-batches of equal size hold equally many samples. Captions of
different lengths do not have this property.
"""

import torch
from torch import Tensor

HEIGHT, WIDTH = 9, 5
# The seven bars as slices of rows and columns, and which of them each digit lights.
_BARS = {
    "top": (slice(0, 1), slice(0, 5)),
    "upper left": (slice(0, 5), slice(0, 1)),
    "upper right": (slice(0, 5), slice(4, 5)),
    "middle": (slice(4, 5), slice(0, 5)),
    "lower left": (slice(4, 9), slice(0, 1)),
    "lower right": (slice(4, 9), slice(4, 5)),
    "bottom": (slice(8, 9), slice(0, 5)),
}
_DARK = [
    {"middle"},
    {"top", "upper left", "middle", "lower left", "bottom"},
    {"upper left", "lower right"},
    {"upper left", "lower left"},
    {"top", "lower left", "bottom"},
    {"upper right", "lower left"},
    {"upper right"},
    {"upper left", "middle", "lower left", "bottom"},
    set(),
    {"lower left"},
]


def draw_digits(number: int, seed: int, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """`number` images, float32 (number, 9, 5), and their labels, int64 (number,).

    Segments are 1 and the rest is 0, plus Gaussian noise of standard deviation `noise`.
    """
    shapes = torch.zeros(10, HEIGHT, WIDTH)
    for shape, dark in zip(shapes, _DARK, strict=True):
        for name, (rows, columns) in _BARS.items():
            if name not in dark:
                shape[rows, columns] = 1
    generator = torch.Generator().manual_seed(seed)
    digits = torch.randint(10, (number,), generator=generator)
    blur = torch.randn(number, HEIGHT, WIDTH, generator=generator)
    return shapes[digits] + noise * blur, digits
