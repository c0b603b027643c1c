"""CUDA's `torch.randn` on a CPU, to reproduce a table that was printed on a GPU.

    x = randn((4, 4), seed=1000)
    # the numbers of torch.randn(4, 4, generator=torch.Generator("cuda").manual_seed(1000))

1. Philox4x32-10 encrypts the counter (0, 0, i, 0) with the seed as its key; i is the element.
2. The first two of the four words, as fractions of 1 that are never 0, are uniform.
3. The Box–Muller transform makes them a pair of normal numbers; the first is used.

Sources: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011),
for Philox; aten/src/ATen/native/cuda/DistributionTemplates.h in PyTorch, for the counters.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# While there are no more elements than threads, element i is the first number of thread i. Beyond
# that it depends on the GPU. One multiprocessor holds at least this many threads.
MOST_ELEMENTS = 1024

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def randn(shape: Sequence[int], seed: int) -> Tensor:
    """The first `torch.randn(shape)` of a CUDA generator with this seed; float32, on the CPU.

    A GPU computes sine and logarithm less exactly, so the last digits may differ. Checked against
    30 printed numbers of a training run on GPUs (`labkit.scenarios.unwrapped_loss`), not bit by bit
    against a GPU. Raises ValueError for more than 1024 elements.
    """
    count = math.prod(shape)
    if count > MOST_ELEMENTS:
        raise ValueError(
            f"{tuple(shape)} has {count} elements, and only up to {MOST_ELEMENTS} do all GPUs draw "
            "the same numbers. Draw smaller pieces, each with its own seed."
        )
    index = torch.arange(count)
    zero = torch.zeros_like(index)
    words = philox4x32_10((zero, zero, index, zero), (seed & _WORD, seed >> 32))
    # A word as a number in (0, 1], at the center of its interval of length 2⁻³².
    first, second = (word.float() * 2.0**-32 + 2.0**-33 for word in words[:2])
    normal = torch.sin(second * (2 * math.pi)) * torch.sqrt(-2 * torch.log(first))
    return normal.reshape(tuple(shape))


def philox4x32_10(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox on four 32-bit words, lowest first, for many counters at once.

    The words are in int64 tensors of one shape, as are those that it returns.
    """
    a, b, c, d = counter
    low_key, high_key = key
    for _ in range(10):
        # A product may wrap to a negative int64. Its bits are right; the mask removes the copies
        # of the sign that the shift brings in.
        by_a, by_c = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, c = ((by_c >> 32) & _WORD) ^ b ^ low_key, ((by_a >> 32) & _WORD) ^ d ^ high_key
        b, d = by_c & _WORD, by_a & _WORD
        low_key = (low_key + _KEY_STEPS[0]) & _WORD
        high_key = (high_key + _KEY_STEPS[1]) & _WORD
    return a, b, c, d
