"""What every trainer is given: 12 prompts with two completions each, dealt in several ways.

A trainer for supervised fine-tuning takes each completion as a sample. DPO prefers the first
completion of a prompt, and GRPO takes both as a group with rewards. The completions of the first
prompts are short and those of the last ones long, so every count differs between ranks and between
micro-batches.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

PAD, EOS, FIRST_WORD, VOCABULARY = 0, 1, 2, 48
BETA = 0.5  # of DPO
LONGEST = 16  # completions, in tokens
LENGTHS = [1, 2, 3, 1, 4, 2, 5, 3, 2, 6, 1, 4, 9, 12, 7, 14, 10, 8, 13, 6, 11, 15, 5, 12]


class Sample(NamedTuple):
    """Tokens of a prompt and of a completion. If it is not `scored`, no token has a loss."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    reward: float  # those of a prompt sum to 0, so it is the advantage, too
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
            for j in range(rank, -(-len(self.samples) // self.size), self.world)
        ]

    def own(self, rank: int) -> list[dict[str, Any]]:
        """The samples of `rank` in their order, as plain data, with the tokens of their step."""
        return [
            one._asdict() | {"step_tokens": self.tokens(i // self.steps)}
            for i, batch in enumerate(self.batches(rank))
            for one in batch
        ]

    def window(self, number: int) -> list[list[tuple[Sample, ...]]]:
        """[rank][micro-batch] of one step."""
        start = number * self.steps
        return [self.batches(rank)[start : start + self.steps] for rank in range(self.world)]

    def by_rank(self) -> list[Sample]:
        """All samples: in each window those of rank 0, then those of rank 1, …"""
        ranks = (of for number in range(self.windows) for of in self.window(number))
        return [one for of in ranks for batch in of for one in batch]

    def tokens(self, number: int) -> int:
        """How many tokens are scored in one step, on all ranks."""
        return sum(one.count for rank in self.window(number) for batch in rank for one in batch)

    def factors(self) -> dict[str, float]:
        """What a ratio may be called besides powers of W."""
        taken, w, k = len(self.window(self.judged)[0]), self.world, self.steps
        share = self.tokens(self.judged) / sum(one.count for one in self.samples)
        names = {"K": k, "1/K": 1 / k, "W·K": w * k, "1/(W·K)": 1 / (w * k), "W/K": w / k}
        names |= {"K/W": k / w, "1": 1.0, "k": taken, "k/K": taken / k, "1/G": 1 / self.generated}
        return names | {"N/N_G": share, "G·N/N_G": self.generated * share}


def draw() -> list[Sample]:
    """24 samples; two that follow each other have one prompt."""
    draws = random.Random(0)

    def words(count: int) -> tuple[int, ...]:
        return tuple(draws.randrange(FIRST_WORD, VOCABULARY) for _ in range(count))

    samples = []
    for i in range(0, len(LENGTHS), 2):
        prompt = (FIRST_WORD + i, *words(1 + i % 3))
        half = 0.5 + draws.random()  # of the distance between the two rewards
        for length, sign in zip(LENGTHS[i : i + 2], (1, -1), strict=True):
            samples.append(Sample(prompt, (*words(length - 1), EOS), sign * half))
    return samples


def all_cases() -> dict[str, Case]:
    """The deals, by property."""
    samples = tuple(draw())
    half = len(samples) // 2
    unscored = tuple(one._replace(scored=False) for one in samples[half:])
    moved = tuple(one for i in range(half) for one in samples[i * 7 % half * 2 :][:2])
    return {
        "W": Case(2, 1, 12, samples),
        "K": Case(1, 3, 8, samples),
        "WxK": Case(2, 3, 4, samples),
        "order": Case(2, 3, 4, moved, base="WxK"),
        "padding": Case(2, 1, 12, samples, pad=32, base="W"),
        "last-window": Case(1, 3, 4, samples[:20]),
        "generation": Case(1, 3, 4, samples, generated=2),
        "empty-rank": Case(2, 1, 12, samples[:half] + unscored),
        "short-batch": Case(1, 3, 8, samples[:20]),
    }


CASES = all_cases()

# A promise is the weight of each scored token of a sample, among n samples with `tokens` scored
# tokens, in the loss Σ weight · −log p(token). In "p × …", the weight has the token's probability,
# too. In DPO, −log σ has the slope ½ where policy and reference are equal, as they are here, and n
# samples are n/2 pairs. In KTO, σ has the slope ¼.
PROMISES: dict[str, Callable[[Sample, int, int], float]] = {
    "token mean": lambda one, n, tokens: 1 / tokens,
    "p × token mean": lambda one, n, tokens: 1 / tokens,
    "pair mean": lambda one, n, tokens: BETA / n * (1 if one.reward > 0 else -1),
    "signed sample mean": lambda one, n, tokens: BETA / 4 / n * (1 if one.reward > 0 else -1),
    "A × token mean": lambda one, n, tokens: one.reward / tokens,
    "A × sequence mean": lambda one, n, tokens: one.reward / n / len(one.completion),
    "sample mean": lambda one, n, tokens: 1 / n / len(one.completion),
    "A × sequence sum": lambda one, n, tokens: one.reward / n,
    "leave-one-out A × sequence sum": lambda one, n, tokens: 2 * one.reward / n,
    "A × constant": lambda one, n, tokens: one.reward / n / LONGEST,
}


def wanted(case: Case, promise: str) -> dict[str, list[tuple[Sample, float]]]:
    """The weighted samples of the promise, and of the two usual means of means."""
    ranks = case.window(case.judged)
    groups = {
        "wanted": [[one for of_rank in ranks for batch in of_rank for one in batch]],
        "mean of rank means": [[one for batch in of_rank for one in batch] for of_rank in ranks],
        "mean of micro-batch means": [list(batch) for of_rank in ranks for batch in of_rank],
    }
    return {
        name: [
            (one, PROMISES[promise](one, len(group), sum(each.count for each in group)) / len(of))
            for group in of
            for one in group
            if one.scored
        ]
        for name, of in groups.items()
    }


# Samples for losses that do not split into terms of single samples. The promise is the loss of the
# union batch, so a trainer is compared with itself, in one process with all samples: `alone`.
SAMPLES = 12


class Deal(NamedTuple):
    """Which samples each rank gets, in each of so many steps. The first one is judged."""

    ranks: tuple[tuple[int, ...], ...]
    base: str = "alone"
    windows: int = 1

    @property
    def world(self) -> int:
        return len(self.ranks)

    judged = 0
    steps = 1

    def factors(self) -> dict[str, float]:
        """What a ratio may be called besides powers of W."""
        return {}


ALL = tuple(range(SAMPLES))
HALF = SAMPLES // 2
UNION_CASES = {
    "alone": Deal((ALL,), ""),
    "W=2": Deal((ALL[:HALF], ALL[HALF:])),
    "mixed": Deal((ALL[::2], ALL[1::2])),
    "W=3": Deal((ALL[::3], ALL[1::3], ALL[2::3])),
}
