"""The captioner of the chapter on the mean of means, and the digits beside it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.scenarios.digits import draw_digits
from labkit.scenarios.padded_captioner import (
    LONGEST,
    PADDING,
    START,
    VOCABULARY,
    Captioner,
    count_tokens,
    draw_captions,
    joined,
    loss_of_knowing_nothing,
    micro_batches,
    seeded_captioner,
    trained_captioner,
)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=9),
    seed=st.integers(0, 10_000),
    tail=st.sampled_from(["easy", "hard"]),
)
def test_captions_have_the_lengths_asked_for_and_are_read_shifted(lengths, seed, tail):
    captions = draw_captions(len(lengths), seed, tail, lengths)
    counted = captions.targets != PADDING
    assert counted.sum(dim=1).tolist() == lengths
    assert count_tokens(captions) == sum(lengths)
    assert (captions.tokens[:, 0] == START).all()
    for tokens, targets, n in zip(captions.tokens, captions.targets, lengths, strict=True):
        assert tokens[1:n].tolist() == targets[: n - 1].tolist()
        assert (targets[n:] == PADDING).all()
        assert ((targets[:n] >= 0) & (targets[:n] < VOCABULARY)).all()
    again = draw_captions(len(lengths), seed, tail, lengths)
    assert all(torch.equal(a, b) for a, b in zip(captions, again, strict=True))


@settings(max_examples=30)
@given(number=st.integers(1, 20), size=st.integers(1, 9))
def test_micro_batches_hold_every_caption_once_in_order(number, size):
    captions = draw_captions(number, seed=3)
    parts = micro_batches(captions, size)
    assert all(len(part.tokens) == size for part in parts[:-1])
    assert all(torch.equal(a, b) for a, b in zip(joined(parts), captions, strict=True))
    assert sum(map(count_tokens, parts)) == count_tokens(captions)


def test_without_lengths_captions_have_2_to_12_tokens_and_another_seed_draws_others():
    captions = draw_captions(200, seed=0)
    lengths = (captions.targets != PADDING).sum(dim=1)
    assert (lengths.min(), lengths.max()) == (2, LONGEST)
    assert not torch.equal(captions.targets, draw_captions(200, seed=1).targets)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"lengths": [3]}, "2 numbers of 1 to 12"),
        ({"lengths": [3, 13]}, "2 numbers of 1 to 12"),
        ({"lengths": [0, 3]}, "2 numbers of 1 to 12"),
        ({"tail": "odd"}, "'easy' or 'hard', got 'odd'"),
    ],
)
def test_captions_that_cannot_be_drawn_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        draw_captions(2, seed=0, **arguments)


def test_a_score_depends_on_its_picture_and_the_tokens_before_it_and_on_nothing_else():
    model = trained_captioner().double()
    captions = draw_captions(3, seed=4)
    pixels, tokens = captions.pixels.double(), captions.tokens
    scores = model(pixels, tokens)
    later = tokens.clone()
    later[:, 5:] = (later[:, 5:] + 1) % VOCABULARY
    assert torch.allclose(model(pixels, later)[:, :5], scores[:, :5], atol=1e-12)
    assert not torch.allclose(model(pixels, later)[:, 5:], scores[:, 5:], atol=1e-3)
    assert not torch.allclose(model(pixels.flip(0), tokens), scores, atol=1e-3)
    alone = model(pixels[:1], tokens[:1])
    assert torch.allclose(alone, scores[:1], atol=1e-12), "no mixing within the batch"


def test_every_parameter_takes_part():
    model = seeded_captioner()
    captions = draw_captions(8, seed=0)
    model(captions.pixels, captions.tokens).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name


def mean_loss(model: Captioner, tail: str, longest: int) -> float:
    captions = draw_captions(200, seed=9, tail=tail, lengths=[longest] * 200)
    with torch.no_grad():
        scores = model(captions.pixels, captions.tokens)
    return F.cross_entropy(scores.flatten(0, 1), captions.targets.flatten()).item()


def test_a_trained_captioner_has_learned_what_its_tail_says_and_carries_no_gradient():
    for tail in ("easy", "hard"):
        model = trained_captioner(tail)
        short, long = (mean_loss(model, tail, n) for n in (2, 12))
        assert (short > long + 0.5) if tail == "easy" else (long > short + 0.5)
        assert long < loss_of_knowing_nothing()
        assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    same = zip(trained_captioner().parameters(), trained_captioner().parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    other = copy.deepcopy(trained_captioner(seed=1))
    assert not torch.equal(other.embedding.weight, trained_captioner().embedding.weight)


def test_digits_are_ten_different_shapes_and_the_same_for_the_same_seed():
    pictures, digits = draw_digits(300, seed=0, noise=0)
    shapes = {}
    for picture, digit in zip(pictures, digits.tolist(), strict=True):
        assert torch.equal(shapes.setdefault(digit, picture), picture)
    assert sorted(shapes) == list(range(10))
    assert len({tuple(shape.flatten().tolist()) for shape in shapes.values()}) == 10
    assert shapes[8].sum() > max(shapes[d].sum() for d in shapes if d != 8)
    assert all(torch.equal(a, b) for a, b in zip(draw_digits(5, 1), draw_digits(5, 1), strict=True))
    assert not torch.equal(draw_digits(5, 1)[0], draw_digits(5, 2)[0])
