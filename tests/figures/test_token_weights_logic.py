"""What a token weighs in "What a token weighs" is the gradient of the same means in torch."""

import random
from itertools import chain

import pytest
import torch
from figures.node import call

CASES = 600
LONGEST = 12


def own_mean(mean: str, losses: list[torch.Tensor], group_tokens: list[int]) -> torch.Tensor:
    """The mean of some completions' losses, each of shape (tokens,), as a trainer writes it."""
    if mean == "token":
        return torch.cat(losses).mean()
    if mean == "sequence":
        return torch.stack([each.mean() for each in losses]).mean()
    if mean == "constant":
        return torch.stack([each.sum() / LONGEST for each in losses]).mean()
    shares = [each.sum() / n for each, n in zip(losses, group_tokens, strict=True)]
    return torch.stack(shares).sum() / (len(shares) / 2)


def weights_by_autograd(case: dict) -> list[tuple[float, float]]:
    """(found, right) of each completion's tokens."""
    lengths, w, k = case["lengths"], case["w"], case["k"]
    losses = [torch.ones(n, dtype=torch.float64, requires_grad=True) for n in lengths]
    groups = [lengths[i - i % 2] + lengths[i - i % 2 + 1] for i in range(len(lengths))]

    def gradient(loss: torch.Tensor) -> list[float]:
        return [g[0].item() for g in torch.autograd.grad(loss, losses)]

    def mean_of(chosen: list[int]) -> torch.Tensor:
        if not chosen:
            return torch.zeros((), dtype=torch.float64)
        of_groups = [groups[i] for i in chosen]
        return own_mean(case["mean"], [losses[i] for i in chosen], of_groups)

    everything = list(range(len(lengths)))
    right = gradient(mean_of(everything))
    if case["by"] == "all":
        return list(zip(right, right, strict=True))
    cells = [[i for i in everything if case["cells"][i] == cell] for cell in range(w * k)]
    ranks = [cells[rank * k : rank * k + k] for rank in range(w)]
    if case["by"] == "rank":
        total = sum(mean_of([*chain(*own)]) for own in ranks) / w
    else:
        total = sum(sum(mean_of(cell) for cell in own) / k for own in ranks) / w
    return list(zip(gradient(total), right, strict=True))


def test_a_tokens_weight_is_the_gradient_of_the_mean():
    draws = random.Random(3)
    cases = []
    for _ in range(CASES):
        w, k = draws.randint(1, 2), draws.randint(1, 2)
        cases.append(
            {
                "w": w,
                "k": k,
                "mean": draws.choice(["token", "sequence", "prompt", "constant"]),
                "by": draws.choice(["micro", "rank", "all"]),
                "lengths": [draws.randint(1, LONGEST) for _ in range(8)],
                "cells": [draws.randrange(w * k) for _ in range(8)],
            }
        )
    for case, rows in zip(
        cases, call("token_weights", "weights", [(c,) for c in cases]), strict=True
    ):
        for row, wanted in zip(rows, weights_by_autograd(case), strict=True):
            assert (row["found"], row["right"]) == pytest.approx(wanted, rel=1e-9), case
