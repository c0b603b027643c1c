"""CUDA's randn on a CPU: the cipher by its published answers, the draws by known properties."""

import math

import pytest
import torch

from labkit.scenarios.cuda_random import MOST_ELEMENTS, philox4x32_10, randn

# The known-answer vectors that come with the authors' own implementation, Random123.
ANSWERS = {
    "zeros": ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "digits of pi": (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
}


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("name", ANSWERS)
def test_philox_gives_its_published_answers(name):
    counter, key, answer = map(words, ANSWERS[name])
    low, high = key
    found = philox4x32_10(tuple(torch.tensor([word]) for word in counter), (low, high))
    assert [int(word) for word in found] == answer


def test_many_counters_at_once_give_what_each_gives_alone():
    counters = [words(counter) for counter, _, _ in ANSWERS.values()]
    together = philox4x32_10(tuple(torch.tensor(counters).T), (1, 2))
    for i, counter in enumerate(counters):
        alone = philox4x32_10(tuple(torch.tensor(word) for word in counter), (1, 2))
        assert [int(word[i]) for word in together] == [int(word) for word in alone]


@pytest.mark.parametrize("seed", [0, 1004, 2**32, 2**64 - 1])
def test_a_shorter_draw_is_the_beginning_of_a_longer_one(seed):
    longest = randn((MOST_ELEMENTS,), seed)
    for shape in ((), (0,), (1,), (4, 4), (3, 5, 7), (MOST_ELEMENTS - 1,)):
        drawn = randn(shape, seed)
        assert drawn.shape == shape
        assert drawn.dtype == torch.float32
        assert torch.equal(drawn.flatten(), longest[: drawn.numel()])


def test_both_halves_of_the_seed_count():
    seeds = [0, 1, 2, 2**32, 2**32 + 1, 2**63]
    assert len({tuple(randn((4,), seed).tolist()) for seed in seeds}) == len(seeds)


def test_the_draws_are_standard_normal_and_independent_of_the_next_seeds():
    draws = torch.stack([randn((MOST_ELEMENTS,), seed) for seed in range(200)]).double()
    values, count = draws.flatten(), draws.numel()
    assert torch.isfinite(values).all()
    # Five standard errors of each moment: mean 1, variance 2, third 15, fourth 96, over the count.
    wanted = {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}
    for power, (moment, variance) in wanted.items():
        assert abs(values.pow(power).mean() - moment) < 5 * math.sqrt(variance / count)
    below = (values[:, None] < torch.tensor([-2.0, -1, 0, 1, 2])).double().mean(dim=0)
    normal = torch.special.ndtr(torch.tensor([-2.0, -1, 0, 1, 2]).double())
    assert (below - normal).abs().max() < 5 * math.sqrt(0.25 / count)
    assert abs((draws[:-1] * draws[1:]).mean()) < 5 / math.sqrt(count)
    assert abs((draws[:, :-1] * draws[:, 1:]).mean()) < 5 / math.sqrt(count)


@pytest.mark.parametrize(
    ("shape", "seed", "said"),
    [
        ((MOST_ELEMENTS + 1,), 0, "1025 elements, and only up to 1024"),
        ((33, 32), 0, r"\(33, 32\) has 1056 elements"),
        ((2, -1), 0, "must not be negative"),
        ((4,), -1, "seed must be one of"),
        ((4,), 2**64, "seed must be one of"),
    ],
)
def test_what_would_be_a_guess_is_refused(shape, seed, said):
    with pytest.raises(ValueError, match=said):
        randn(shape, seed)
