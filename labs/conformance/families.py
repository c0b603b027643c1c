"""Families of trainers, and the properties that are tried on each.

A family has data, ways to deal them (its cases), and a reference: one backward of one process that
gives the gradient of each promise. A trainer of the family has an adapter of about ten lines: it
gets a case and a rank, trains, and returns the gradient that its optimizer got. So another trainer
needs an adapter and a line in `trainers.py`, and another kind of data needs a family.

A case has at least `world`, `base`, and `factors()`: see `cases.Case`.
"""

from typing import Any, NamedTuple

from cases import CASES


class Family(NamedTuple):
    """`reference`, "file:function", gets a case and a promise. It returns gradients by name: the
    one that is wanted, and what trainers are known to compute instead.

    `chapter` is what the page of the book says of it.
    """

    title: str
    cases: dict[str, Any]
    reference: str
    chapter: str


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
        "Fine-tuning on completions of 1 to 15 tokens. [Which mean?](../surprises/which_mean.ipynb)"
        " and [Mean of means](../puzzles/mean_of_means.ipynb) explain what goes wrong.",
    ),
    "rl": Family(
        "Preferences and reinforcement learning",
        some(*EVERYWHERE, "generation", "empty-rank"),
        "tiny:references",
        "The same completions, as pairs or as groups of two. A is the advantage."
        " [Six losses](six-losses) has the formulas.",
    ),
}


def properties() -> list[str]:
    """All properties of all families."""
    return list(dict.fromkeys(name for family in FAMILIES.values() for name in family.cases))
