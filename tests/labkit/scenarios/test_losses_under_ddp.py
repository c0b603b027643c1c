"""`judge` finds the factor that a loss lacks, on equal and on unequal shares."""

import pytest
import torch
from torch import nn

from labkit.scenarios.losses_under_ddp import judge, rows_of_ranks

torch.manual_seed(0)
INPUTS, TARGETS = torch.randn(8, 3), torch.randn(8, 1)


def errors(model, rows):
    return (model(INPUTS[rows]) - TARGETS[rows]).square()


def mean(model, rows):
    return errors(model, rows).mean()


def over_all(model, rows):
    return errors(model, rows).sum() / 8


def test_rows_of_ranks_cover_every_sample_once_in_rank_order():
    rows = rows_of_ranks([1, 0, 5, 2])
    assert [list(range(8))[own] for own in rows] == [[0], [], [1, 2, 3, 4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("counts", "kinds"),
    [
        ([4, 4], {"mean": "right", "over all": "scale bug", "times W": "right"}),
        ([1, 7], {"mean": "direction bug", "over all": "scale bug", "times W": "right"}),
    ],
)
def test_each_loss_gets_its_verdict_on_every_rank(counts, kinds):
    model = nn.Linear(3, 1)
    before = [p.detach().clone() for p in model.parameters()]
    losses = {
        "mean": mean,
        "over all": over_all,
        "times W": lambda model, rows: 2 * over_all(model, rows),
    }
    judged = judge(model, losses, meant=mean, counts=counts)
    assert {v.variant: v.kind for v in judged} == kinds
    assert all(v.ranks == "all" for v in judged)
    ratio = next(v.comparison.ratio for v in judged if v.variant == "over all")
    assert ratio == pytest.approx(0.5, abs=1e-5)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_only_selects_the_gradients_that_are_compared():
    judged = judge(
        nn.Linear(3, 1),
        {"weight times 2": lambda m, rows: mean(m, rows) + m.module.weight.sum()},
        meant=mean,
        counts=[4, 4],
        only=lambda gradient: gradient.dim() == 1,
    )
    assert [v.kind for v in judged] == ["right"]
