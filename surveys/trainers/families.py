"""Families of trainers, and the properties that are tried on each.

A family has data, ways to deal them (its cases), and a reference: one backward of one process that
gives the gradient of each promise. A trainer of the family has an adapter of about ten lines: it
gets a case and a rank, trains, and returns the gradient that its optimizer got. So another trainer
needs an adapter and a line in `trainers.py`, and another kind of data needs a family.

A case has at least `world`, `base`, and `factors()`: see `cases.Case`.
"""

from typing import Any, NamedTuple

from surveys.trainers.cases import CASES, UNION_CASES


class Family(NamedTuple):
    """`reference`, "file:function", gets a case and a promise. It returns gradients by name: the
    one that is wanted, and what trainers are known to compute instead. It is empty where a trainer
    is only compared with itself. `chapter` is what the page of the book says of the family.
    """

    title: str
    cases: dict[str, Any]
    reference: str
    chapter: str

    @property
    def columns(self) -> list[str]:
        """Its properties. The other cases are only compared with."""
        return [name for name in self.cases if name in PROPERTIES]


# What is tried, and where the book explains what can go wrong.
PROPERTIES = {
    "W": ("2 ranks, one micro-batch each", "the-well-known-fix"),
    "K": ("1 process, 3 micro-batches", "ways-equal"),
    "WxK": ("2 ranks, 3 micro-batches each", "count-the-step"),
    "order": ("as WxK with the samples dealt differently: compared with its own WxK", "ways-equal"),
    "padding": ("as W, padded to 32 tokens: compared with its own W", "which-counts"),
    "last-window": (
        "1 process; the last step has 2 micro-batches instead of 3",
        "the-last-window",
    ),
    "generation": (
        "1 process; samples are generated for two steps at once (reinforcement learning)",
        "generation-window",
    ),
    "short-batch": (
        "as K, but the third micro-batch has 4 samples instead of 8",
        "the-last-window",
    ),
    "W=2": ("2 ranks", "gathered-items-averaged"),
    "W=3": ("3 ranks", "gathered-items-averaged"),
    "mixed": ("2 ranks; each has every second sample", "gathered-items-averaged"),
    "empty-rank": ("as W, and no sample of rank 1 has a scored token", "count-the-step"),
}


def some(*names: str) -> dict[str, Any]:
    return {name: CASES[name] for name in names}


EVERYWHERE = "W", "K", "WxK", "order", "padding"
FAMILIES = {
    "tokens": Family(
        "Token means",
        some(*EVERYWHERE, "last-window", "empty-rank"),
        "tiny:references",
        "Fine-tuning on completions of 1 to 15 tokens. p is the probability of a token under the"
        " model; it multiplies the token's loss and carries no gradient."
        " [Which mean?](../surprises/which_mean.ipynb) and"
        " [Mean of means](../puzzles/mean_of_means.ipynb) explain what goes wrong.",
    ),
    "rl": Family(
        "Preferences and reinforcement learning",
        some(*EVERYWHERE, "generation", "empty-rank"),
        "tiny:references",
        "The same completions, as pairs or as groups of two. A is the advantage. The rows from"
        " trl-grpo to trl-vespo are values of `loss_type` in TRL's GRPOTrainer, except trl-rloo,"
        " which is TRL's RLOOTrainer. [Six losses](six-losses) has the formulas.",
    ),
    "pairs": Family(
        "Losses over the batch",
        UNION_CASES,
        "",
        "Contrastive and other losses that are not a sum over samples, on 12 samples with two"
        " views each. Whatever the trainer promises, its gradient is compared with the gradient of"
        " the same loss in one process with all samples (the *union batch*)."
        " [The loss sees samples of all ranks](gathered-items-averaged) explains what goes wrong.",
    ),
    "counts": Family(
        "Detection: losses over boxes",
        UNION_CASES,
        "",
        "12 images with 0 to 6 boxes each. The gradient is compared with the gradient of the same"
        " loss in one process with all images. [Reports](report-detection) has more.",
    ),
    "loops": Family(
        "General loops",
        some("W", "K", "WxK", "order", "last-window", "short-batch"),
        "tiny:references",
        "The loss is the mean over the samples of a micro-batch, as users write it. A sample's own"
        " loss is its token mean. So micro-batches with equally many samples have equal counts.",
    ),
}


def properties() -> list[str]:
    """All properties of all families."""
    return list(dict.fromkeys(name for family in FAMILIES.values() for name in family.columns))
