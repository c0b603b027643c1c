"""What every trainer is given: 12 prompts with two completions each, dealt in eight ways.

A trainer for supervised fine-tuning takes each completion as a sample. DPO prefers the first
completion of a prompt, and GRPO takes both as a group with rewards. The completions of the first
prompts are short and those of the last ones long, so every count differs between ranks and between
micro-batches.
"""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

PAD, EOS, FIRST_WORD, VOCABULARY = 0, 1, 2, 48
BETA = 0.5  # of DPO
LONGEST = 16  # completions, in tokens
LENGTHS = [1, 2, 3, 1, 4, 2, 5, 3, 2, 6, 1, 4, 9, 12, 7, 14, 10, 8, 13, 6, 11, 15, 5, 12]


class Sample(NamedTuple):
    """Tokens of a prompt and of a completion. If it is not `scored`, no token has a loss."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    reward: float
    advantage: float
    scored: bool = True

    @property
    def count(self) -> int:
        return len(self.completion) if self.scored else 0


class Case(NamedTuple):
    """One deal: micro-batch j, which is samples[j·size : (j+1)·size], goes to rank j mod world."""

    world: int
    steps: int  # micro-batches per rank and window
    size: int  # samples per micro-batch
    samples: tuple[Sample, ...]
    pad: int = 0  # pad batches to a multiple of this
    base: str = ""  # compare with this property's gradient, not with the wanted one
    generated: int = 1  # windows per generation; the first one is judged, otherwise the last one

    @property
    def windows(self) -> int:
        return -(-len(self.samples) // (self.world * self.steps * self.size))

    @property
    def judged(self) -> int:
        return 0 if self.generated > 1 else self.windows - 1

    def batches(self, rank: int) -> list[tuple[Sample, ...]]:
        """The micro-batches of `rank`."""
        return [
            self.samples[j * self.size : (j + 1) * self.size]
            for j in range(rank, len(self.samples) // self.size, self.world)
        ]

    def window(self) -> list[list[tuple[Sample, ...]]]:
        """[rank][micro-batch] of the judged step."""
        start = self.judged * self.steps
        return [self.batches(rank)[start : start + self.steps] for rank in range(self.world)]

    def factors(self) -> dict[str, float]:
        """What a ratio may be called besides W, K, and their products."""
        taken = len(self.window()[0])
        tokens = sum(one.count for of_rank in self.window() for batch in of_rank for one in batch)
        everything = sum(one.count for one in self.samples)
        names = {"k": float(taken), "k/K": taken / self.steps, "K/k": self.steps / taken}
        names |= {"1/G": 1 / self.generated, "G": self.generated}
        shares = {"N/N_G": tokens / everything, "G·N/N_G": self.generated * tokens / everything}
        return names | shares


def draw() -> list[Sample]:
    """24 samples; two that follow each other have one prompt, and advantages that sum to 0."""
    draws = random.Random(0)

    def words(count: int) -> tuple[int, ...]:
        return tuple(draws.randrange(FIRST_WORD, VOCABULARY) for _ in range(count))

    samples = []
    for i in range(0, len(LENGTHS), 2):
        prompt = (FIRST_WORD + i, *words(1 + i % 3))
        half = 0.5 + draws.random()  # of the distance between the two rewards
        for length, sign in zip(LENGTHS[i : i + 2], (1, -1), strict=True):
            samples.append(Sample(prompt, (*words(length - 1), EOS), sign * half, sign * half))
    return samples


def cases() -> dict[str, Case]:
    """The eight properties."""
    samples = tuple(draw())
    half = len(samples) // 2
    unscored = tuple(one._replace(scored=False) for one in samples[half:])
    moved = tuple(one for i in range(half) for one in samples[i * 7 % half * 2 :][:2])
    return {
        "W": Case(2, 1, 12, samples),
        "K": Case(1, 3, 8, samples),
        "W×K": Case(2, 3, 4, samples),
        "order": Case(2, 3, 4, moved, base="W×K"),
        "padding": Case(2, 1, 12, samples, pad=32, base="W"),
        "last-window": Case(1, 3, 4, samples[:20]),
        "generation": Case(1, 3, 4, samples, generated=2),
        "empty-rank": Case(2, 1, 12, samples[:half] + unscored),
    }


# A promise is the weight of each token of sample i in the loss Σ_i weight_i Σ_t −log p(token t).
Weights = list[float]


def token_mean(samples: Sequence[Sample]) -> Weights:
    count = sum(one.count for one in samples)
    return [one.scored / count for one in samples]


def pair_mean(samples: Sequence[Sample]) -> Weights:
    """DPO where policy and reference are equal: −log σ has the slope ½ there."""
    each = BETA / 2 / (len(samples) // 2)
    return [each * (1 if one.reward > 0 else -1) for one in samples]


def advantage_token_mean(samples: Sequence[Sample]) -> Weights:
    each = token_mean(samples)
    return [one.advantage * weight for one, weight in zip(samples, each, strict=True)]


def advantage_sequence_mean(samples: Sequence[Sample]) -> Weights:
    return [one.advantage * one.scored / (len(samples) * len(one.completion)) for one in samples]


def advantage_constant(samples: Sequence[Sample]) -> Weights:
    return [one.advantage * one.scored / (len(samples) * LONGEST) for one in samples]


PROMISES: dict[str, Callable[[Sequence[Sample]], Weights]] = {
    "token mean": token_mean,
    "pair mean": pair_mean,
    "A × token mean": advantage_token_mean,
    "A × sequence mean": advantage_sequence_mean,
    "A × constant": advantage_constant,
}


def wanted(case: Case, promise: str) -> dict[str, list[tuple[Sample, float]]]:
    """The weighted samples of the promise, and of the two usual means of means."""
    weigh, ranks = PROMISES[promise], case.window()
    groups = {
        "wanted": [[one for of_rank in ranks for batch in of_rank for one in batch]],
        "mean of rank means": [[one for batch in of_rank for one in batch] for of_rank in ranks],
        "mean of micro-batch means": [list(batch) for of_rank in ranks for batch in of_rank],
    }
    return {
        name: [
            (one, weight / len(of))
            for group in of
            if any(one.scored for one in group)
            for one, weight in zip(group, weigh(group), strict=True)
        ]
        for name, of in groups.items()
    }
