"""Variants of one gradient on ranks: what is compared, what is shown, and what is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.testing import Held, gradient_of, gradients, rows_of_ranks, try_variants, under_ddp

torch.manual_seed(0)
INPUTS, TARGETS = torch.randn(8, 3), torch.randn(8, 1)
MODEL = nn.Linear(3, 1)


def mean(model, rows=slice(None)):
    return (model(INPUTS[rows]) - TARGETS[rows]).square().mean()


def over_all(model, rows):
    return mean(model, rows) * len(INPUTS[rows]) / 8


TRUTH = gradient_of(MODEL, mean)


def own_with_rank(module: nn.Module, rows: slice) -> Held:
    mean(module, rows).backward()
    return Held(gradients(module), (dist.get_rank(),))


def equal_with_rank(module: nn.Module, rows: slice) -> Held:
    under_ddp(mean)(module, rows)
    return Held(gradients(module), (dist.get_rank(),))


def test_rows_of_ranks_cover_every_sample_once_in_rank_order():
    rows = rows_of_ranks([1, 0, 5, 2])
    assert [list(range(8))[own] for own in rows] == [[0], [], [1, 2, 3, 4, 5], [6, 7]]


@pytest.mark.parametrize(("counts", "of_means"), [([4, 4], "right"), ([1, 7], "direction bug")])
def test_each_loss_gets_its_verdict_on_every_rank_and_the_model_is_left_alone(counts, of_means):
    before = [p.detach().clone() for p in MODEL.parameters()]
    losses = {"mean": mean, "over all": over_all, "times W": lambda m, r: 2 * over_all(m, r)}
    variants = {name: under_ddp(loss) for name, loss in losses.items()}
    judged = try_variants(MODEL, variants, TRUTH, counts)
    assert [v.kind for v in judged] == [of_means, "scale bug", "right"]
    assert all(v.ranks == "all" for v in judged)
    assert judged[1].comparison.ratio == pytest.approx(0.5, abs=1e-5)
    assert all(torch.equal(p, q) for p, q in zip(MODEL.parameters(), before, strict=True))
    assert all(p.grad is None for p in MODEL.parameters())


def test_local_gradients_get_one_line_per_rank_with_its_own_notes():
    tried = try_variants(MODEL, [own_with_rank], TRUTH, [4, 4])
    assert [v.ranks for v in tried] == ["rank 0", "rank 1"]
    assert [v.variant for v in tried] == ["own with rank"] * 2
    assert [v.notes for v in tried] == [(0,), (1,)]
    assert {v.kind for v in tried} == {"direction bug"}


def test_equal_gradients_with_different_notes_are_refused():
    with pytest.raises(ValueError, match="equal with rank: equal tensors on all ranks, but notes"):
        try_variants(MODEL, [equal_with_rank], TRUTH, [4, 4])


def test_every_variant_starts_from_the_models_own_weights():
    """The first variant changes its replica; the second must not see that."""

    def spoils(module: nn.Module, rows: slice) -> None:
        under_ddp(mean)(module, rows)
        for parameter in module.parameters():
            parameter.data.zero_()

    tried = try_variants(MODEL, {"spoils": spoils, "mean": under_ddp(mean)}, TRUTH, [4, 4])
    assert [v.kind for v in tried] == ["right", "right"]
