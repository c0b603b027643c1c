"""Denominators, gradients on ranks, and the excess of the mean of means."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from labkit.scenarios import caption_means, padded_captioner
from labkit.testing.compare import gradients, largest_difference

GRIDS = st.integers(1, 4).flatmap(
    lambda parts: st.lists(
        st.lists(st.integers(1, 50), min_size=parts, max_size=parts), min_size=1, max_size=4
    )
)


@given(counts=GRIDS)
def test_only_n_over_w_gives_every_token_the_same_share_of_the_gradient(counts):
    items, world_size = sum(map(sum, counts)), len(counts)
    for way in caption_means.WAYS:
        shares = [
            tokens / (world_size * denominator)
            for own, divide_by in zip(counts, caption_means.denominators(way, counts), strict=True)
            for tokens, denominator in zip(own, divide_by, strict=True)
        ]
        assert sum(shares) == pytest.approx(1)  # each way is a mean of something
    [[*weights], *_] = caption_means.denominators("N / W", counts)
    assert {items / (world_size * weight) for weight in weights} == {1.0}


def test_an_unknown_way_is_refused_by_name():
    with pytest.raises(ValueError, match=r"way must be one of .*got 'median'"):
        caption_means.denominators("median", [[1]])


def test_on_ranks_the_right_denominators_give_the_full_batchs_gradient_on_every_rank():
    model = padded_captioner.seeded_captioner()
    captions = padded_captioner.draw_captions(4, seed=1, lengths=[1, 9, 12, 2])
    shares = padded_captioner.cut(captions, ranks=2, parts=2)
    divide_by = caption_means.denominators("N / W", [[1, 9], [12, 2]])
    found = caption_means.gradients_on_ranks(model, shares, divide_by, DistributedDataParallel)
    (padded_captioner.summed_loss(model, captions) / 24).backward()
    assert max(largest_difference(one, gradients(model)) for one in found) < 1e-6


def test_steps_take_windows_in_order_and_the_last_takes_what_is_left():
    model = padded_captioner.seeded_captioner()
    parts = [padded_captioner.draw_captions(1, seed, lengths=[1 + seed]) for seed in range(5)]

    def count(_, window):
        return torch.tensor(float(sum(map(padded_captioner.count_tokens, window))))

    ranks = caption_means.steps_on_ranks(count, model, [parts, parts[::-1]], 2, torch.nn.Identity)
    assert [logged for logged, _ in ranks[0]] == [3, 7, 5]
    assert [logged for logged, _ in ranks[1]] == [9, 5, 1]


def test_the_excess_is_zero_for_one_step_and_minus_the_covariance_over_the_mean_length():
    sums, counts = torch.tensor([6.0, 2.0, 2.0, 2.0]), torch.tensor([2.0, 4.0, 4.0, 2.0])
    excess = caption_means.excess(sums.double(), counts.double(), steps=[1, 4], orders=3)
    assert excess.shape == (3, 2)
    assert excess[:, 0].abs().max() < 1e-12
    means = sums / counts
    covariance = (counts * means).mean() - counts.mean() * means.mean()
    torch.testing.assert_close(excess[:, 1], -(covariance / counts.mean()).double().expand(3))
