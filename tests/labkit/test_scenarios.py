"""What chapters and labs share: a GPU's random numbers, padded captions, and small models."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.scenarios import sampled_completions as sampled
from labkit.scenarios.cuda_random import MOST_ELEMENTS, philox4x32_10, randn
from labkit.scenarios.padded_captioner import (
    LONGEST,
    PADDING,
    START,
    VOCABULARY,
    count_tokens,
    draw_captions,
    joined,
    micro_batches,
    trained_captioner,
)
from labkit.scenarios.rare_samples import rare_samples

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


@pytest.mark.parametrize("seed", [0, 1004, 2**32, 2**64 - 1])
def test_a_shorter_draw_is_the_beginning_of_a_longer_one(seed):
    longest = randn((MOST_ELEMENTS,), seed)
    for shape in ((), (0,), (1,), (4, 4), (3, 5, 7), (MOST_ELEMENTS - 1,)):
        drawn = randn(shape, seed)
        assert (drawn.shape, drawn.dtype) == (shape, torch.float32)
        assert torch.equal(drawn.flatten(), longest[: drawn.numel()])
    assert not torch.equal(longest, randn((MOST_ELEMENTS,), seed ^ 2**32)), "both halves count"


def test_what_would_be_a_guess_is_refused():
    with pytest.raises(ValueError, match="1025 elements, and only up to 1024"):
        randn((MOST_ELEMENTS + 1,), 0)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=9),
    seed=st.integers(0, 10_000),
    tail=st.sampled_from(["easy", "hard"]),
)
def test_captions_have_the_lengths_asked_for_and_are_read_shifted(lengths, seed, tail):
    captions = draw_captions(len(lengths), seed, tail, lengths)
    assert count_tokens(captions) == sum(lengths)
    assert (captions.tokens[:, 0] == START).all()
    for tokens, targets, n in zip(captions.tokens, captions.targets, lengths, strict=True):
        assert tokens[1:n].tolist() == targets[: n - 1].tolist()
        assert (targets[n:] == PADDING).all()
        assert ((targets[:n] >= 0) & (targets[:n] < VOCABULARY)).all()


@settings(max_examples=30)
@given(number=st.integers(1, 20), size=st.integers(1, 9))
def test_micro_batches_hold_every_caption_once_in_order(number, size):
    captions = draw_captions(number, seed=3)
    parts = micro_batches(captions, size)
    assert all(len(part.tokens) == size for part in parts[:-1])
    assert all(torch.equal(a, b) for a, b in zip(joined(parts), captions, strict=True))


@pytest.mark.parametrize("lengths", [[3], [3, 13], [0, 3]])
def test_lengths_that_do_not_fit_are_refused(lengths):
    with pytest.raises(ValueError, match="2 numbers of 1 to 12"):
        draw_captions(2, seed=0, lengths=lengths)


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


def test_the_problem_is_the_same_in_every_process_and_the_last_rank_holds_the_rare_samples():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    problem, other = rare_samples(), rare_samples(rare_inputs=True)
    assert torch.equal(torch.rand(3), expected)
    assert all(map(torch.equal, problem.model.parameters(), other.model.parameters()))
    covered = [i for rank in range(4) for i in range(16)[problem.rows(rank, 4)]]
    assert covered == list(range(16))
    assert problem.targets[problem.rows(3, 4)].min() > problem.targets[:12].max() - 2


def losses_by_their_formulas(
    policy: sampled.Policy, found: sampled.Completions
) -> dict[str, float]:
    """Each loss of the whole batch, from plain numbers, completion by completion."""
    lengths = found.mask.sum(1).int().tolist()
    with torch.no_grad():
        now = [r[:n] for r, n in zip(policy(*found[:3:2]).tolist(), lengths, strict=True)]
    old = [r[:n] for r, n in zip(found.old.tolist(), lengths, strict=True)]
    rewards = found.rewards.view(-1, 4)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten().tolist()
    spreads = rewards.std(1).repeat_interleave(4).tolist()
    scaled = [a / (s + 1e-4) for a, s in zip(advantages, spreads, strict=True)]

    def surrogate(ratio: float, advantage: float, upper: float = 0.2) -> float:
        return -min(ratio * advantage, min(max(ratio, 0.8), 1 + upper) * advantage)

    def tokens(i: int, advantage: float, upper: float = 0.2) -> list[float]:
        pairs = zip(now[i], old[i], strict=True)
        return [surrogate(math.exp(a - b), advantage, upper) for a, b in pairs]

    every, log_ratio = range(len(lengths)), [sum(a) - sum(b) for a, b in zip(now, old, strict=True)]
    groups = [every[i : i + 4] for i in every[::4]]
    margins = [log_ratio[i] - log_ratio[i + 1] for i in every[::2]]
    dapo = [sum(tokens(i, scaled[i], 0.28)) for i in every]
    of_prompts = [sum(dapo[i] for i in g) / sum(lengths[i] for i in g) for g in groups]
    geometric = [math.exp(log_ratio[i] / lengths[i]) for i in every]
    return {
        "SFT": -sum(map(sum, now)) / sum(lengths),
        "DPO": sum(math.log1p(math.exp(-0.1 * m)) for m in margins) / len(margins),
        "GRPO": sum(sum(tokens(i, scaled[i])) / lengths[i] for i in every) / len(every),
        "Dr. GRPO": sum(sum(tokens(i, advantages[i])) for i in every) / len(every) / 12,
        "DAPO": sum(dapo) / sum(lengths),
        "DAPO, per prompt": sum(of_prompts) / len(groups),
        "GSPO": sum(map(surrogate, geometric, scaled)) / len(every),
    }


def test_each_loss_of_sampled_completions_is_its_sum_over_its_count():
    sampler = sampled.Policy()
    found = sampled.sample_completions(sampler, prompts=6, seed=1)
    policy = sampled.moved_policy(sampler)
    with torch.no_grad():  # far enough that some ratios are clipped
        for parameter in policy.parameters():
            parameter *= 1.3
    wanted = losses_by_their_formulas(policy, found)
    assert list(wanted) == list(sampled.LOSSES)
    for name, (total, count) in sampled.LOSSES.items():
        assert total(policy, found).item() / count(found) == pytest.approx(wanted[name], rel=1e-9)


def test_a_completion_whose_tokens_are_all_masked_adds_nothing_to_any_loss_of_tokens():
    sampler = sampled.Policy()
    found = sampled.sample_completions(sampler, prompts=3, seed=1)
    kept = torch.arange(12) >= 5  # masks a whole group and one completion of the next
    masked = sampled.with_groups(found._replace(mask=found.mask * kept[:, None]))
    policy = sampled.moved_policy(sampler)
    for name in sampled.LOSSES.keys() - {"DPO"}:
        total = sampled.LOSSES[name].total
        without = total(policy, sampled.rows(masked, kept.nonzero().flatten()))
        assert total(policy, masked).item() == pytest.approx(without.item(), rel=1e-9), name


def test_every_micro_batch_of_a_deal_has_a_pair():
    for prompts, seed in ((2, 1), (3, 0), (4, 5)):
        found = sampled.sample_completions(sampled.Policy(), prompts=prompts, seed=seed)
        for parts in range(1, len(found.prompts) // 2 + 1):
            ends = [(part.start, part.stop) for part in sampled.deal(found, parts, "tokens")]
            assert all(first < end for first, end in ends)
            assert [end for _, end in ends] == [first for first, _ in ends[1:]] + [
                len(found.prompts)
            ]
