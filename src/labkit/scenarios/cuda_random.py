"""CUDA's `torch.randn` on a CPU, to reproduce a table that was printed on a GPU.

    x = randn((4, 4), seed=1000)
    # the numbers of torch.randn(4, 4, generator=torch.Generator("cuda").manual_seed(1000))

A GPU draws its random numbers in parallel. Each thread encrypts its own index with the seed as the
key, and the result is random. `torch.randn` takes three steps:

1. Philox4x32-10 of the counter (0, 0, i, 0) under the 64-bit seed; i is the element's index.
2. The first two of the four 32-bit words, as fractions of 1 that are never 0.
3. The Box–Muller transform of the two to a pair of normal numbers; the first is used.

Sources: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011),
for Philox; aten/src/ATen/native/cuda/DistributionTemplates.h in PyTorch, for the thread indices.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# PyTorch starts at most as many threads as the GPU can hold at once. While there are no more
# elements than threads, element i is the first number that thread i draws. Beyond that a thread
# draws several, and which elements they become depends on the GPU. One multiprocessor holds at
# least this many threads, so up to here all GPUs agree.
MOST_ELEMENTS = 1024

_WORD = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def randn(shape: Sequence[int], seed: int) -> Tensor:
    """The first `torch.randn(shape)` of a CUDA generator with this seed.

    Returns a float32 tensor on the CPU. A GPU computes sine and logarithm less exactly, so the
    last digits may differ. The function was checked against 30 printed numbers of a training run
    on GPUs (`labkit.scenarios.unwrapped_loss`), not bit by bit against a GPU.

    Raises ValueError if `shape` has more than 1024 elements (larger draws depend on the GPU) or a
    negative size, or if `seed` is not in 0 … 2⁶⁴ − 1.
    """
    if any(size < 0 for size in shape):
        raise ValueError(f"sizes must not be negative, got {tuple(shape)}")
    count = math.prod(shape)
    if count > MOST_ELEMENTS:
        raise ValueError(
            f"{tuple(shape)} has {count} elements, and only up to {MOST_ELEMENTS} do all GPUs draw "
            "the same numbers: beyond that it depends on how many threads the GPU holds. Draw "
            "smaller pieces, each with its own seed."
        )
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be one of 0 … 2**64 - 1, got {seed}")
    index = torch.arange(count)
    zero = torch.zeros_like(index)
    first, second, _, _ = philox4x32_10((zero, zero, index, zero), (seed & _WORD, seed >> 32))
    return _box_muller(_uniform(first), _uniform(second)).reshape(tuple(shape))


def philox4x32_10(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox with four 32-bit words and ten rounds, for many counters at once.

    counter: four int64 tensors of one shape, with elements in 0 … 2³² − 1, lowest word first. key:
    two such words. Returns four tensors of the same shape.
    """
    a, b, c, d = counter
    low_key, high_key = key
    for _ in range(_ROUNDS):
        high_a, low_a = _multiply(a, _MULTIPLIERS[0])
        high_c, low_c = _multiply(c, _MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ low_key, low_c, high_a ^ d ^ high_key, low_a
        low_key = (low_key + _KEY_STEPS[0]) & _WORD
        high_key = (high_key + _KEY_STEPS[1]) & _WORD
    return a, b, c, d


def _multiply(words: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of each 64-bit product."""
    # The product may wrap to a negative int64. Its bits are right; the mask removes the copies of
    # the sign that the shift brings in.
    product = words * by
    return (product >> 32) & _WORD, product & _WORD


def _uniform(words: Tensor) -> Tensor:
    """Each 32-bit word as a float32 in (0, 1], at the center of its interval of length 2⁻³²."""
    return words.float() * 2.0**-32 + 2.0**-33


def _box_muller(first: Tensor, second: Tensor) -> Tensor:
    """The first normal number of each pair; cosine instead of sine gives the second."""
    return torch.sin(second * (2 * math.pi)) * torch.sqrt(-2 * torch.log(first))
