"""The one equation: right with any token counts under torch's DDP; wrong ones fail."""

import importlib
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from labkit.testing.compare import gradients, largest_difference
from miniddp.losses import (
    accumulation_windows,
    global_mean,
    loss_scale,
    token_cross_entropy,
)
from tests.on_ranks import on_ranks

VOCABULARY = 7
PADDING = -100
# Tokens of each sentence, by rank: uneven on purpose; the last rank of three and four has none.
SENTENCES = {
    2: [[1, 9], [12, 2]],
    3: [[5, 1, 2], [11], [0, 0]],
    4: [[3, 1], [8, 8, 1], [2], [0]],
}
Sentences = list[tuple[Tensor, Tensor]]


def language_model() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Linear(6, 8), nn.Tanh())
    return model.append(nn.Linear(8, VOCABULARY)).double()


def sentences_of(rank: int, world_size: int) -> Sentences:
    """(tokens, targets) of each sentence of a rank, padded to 12; other tokens on each rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    sentences = []
    for length in SENTENCES[world_size][rank]:
        tokens = torch.randint(VOCABULARY, (1, 12), generator=generator)
        targets = torch.randint(VOCABULARY, (1, 12), generator=generator)
        # Rank 0 has a skewed vocabulary: ranks whose data were alike would hide a wrong weighting.
        targets[:, ::2] = 0 if rank == 0 else targets[:, ::2]
        targets[:, length:] = PADDING
        sentences.append((tokens, targets))
    return sentences


def batch_of(sentences: Sentences) -> tuple[Tensor, Tensor]:
    tokens, targets = zip(*sentences, strict=True)
    return torch.cat(tokens), torch.cat(targets)


def count_tokens(sentence: tuple[Tensor, Tensor]) -> int:
    return int((sentence[1] != PADDING).sum())


def full_batch(world_size: int) -> tuple[float, list[Tensor]]:
    """Mean loss and gradient of one process that sees everything, by torch's own cross-entropy."""
    everything = [s for rank in range(world_size) for s in sentences_of(rank, world_size)]
    tokens, targets = batch_of(everything)
    model = language_model()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.item(), gradients(model)


def one_batch(rank: int, world_size: int) -> tuple[float, list[Tensor]]:
    """Value and gradient under torch's DDP, the rank's sentences as one batch."""
    tokens, targets = batch_of(sentences_of(rank, world_size))
    ddp = DistributedDataParallel(language_model())
    loss = global_mean(*token_cross_entropy(ddp(tokens), targets))
    loss.backward()
    return loss.item(), gradients(ddp.module)


def accumulated(rank: int, world_size: int) -> tuple[float, list[Tensor]]:
    """One optimizer step, one sentence a micro-batch, the rank's as one window."""
    model = language_model()
    ddp = DistributedDataParallel(model)
    windows = list(accumulation_windows(sentences_of(rank, world_size), 3, count_tokens))
    for window, count in windows:
        scale, size = loss_scale(count), len(window)
        loss_sums = torch.zeros((), dtype=torch.float64)
        for i, (tokens, targets) in enumerate(window):
            with nullcontext() if i == size - 1 else ddp.no_sync():
                loss_sum, _ = token_cross_entropy(ddp(tokens), targets)
                (loss_sum * scale).backward()
            loss_sums += loss_sum.detach()
        logged = global_mean(loss_sums, count).item()
    lengths = SENTENCES[world_size][rank]
    assert [(len(window), count) for window, count in windows] == [(len(lengths), sum(lengths))]
    return logged, gradients(model)


def both_ways(rank: int, world_size: int) -> list[tuple[float, list[Tensor]]]:
    return [one_batch(rank, world_size), accumulated(rank, world_size)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_one_batch_and_micro_batches_give_loss_and_gradient_of_the_full_batch(
    world_size: int,
) -> None:
    loss, true = full_batch(world_size)
    for of_rank in zip(*run_ranks(both_ways, world_size), strict=True):
        for value, found in of_rank:
            assert value == pytest.approx(loss, rel=1e-14)
            assert value == of_rank[0][0]
            assert largest_difference(found, true) < 1e-14


@on_ranks(3)
def test_counts_and_sums_come_in_any_type_and_are_exact_beyond_the_integers_of_float32(
    rank: int,
) -> None:
    n = rank + 1
    counts = [n, float(n), torch.tensor(n), torch.tensor([n], dtype=torch.uint8)]
    counts += [torch.tensor(float(n), dtype=torch.bfloat16)]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for count in counts:
            loss_sum = torch.tensor(10.0 * n, dtype=dtype, requires_grad=True)
            loss = global_mean(loss_sum, count)
            loss.backward()
            assert loss.dtype == dtype
            # 60 in all over 6 items; W/N = 3/6
            assert (loss.item(), loss_sum.grad.item()) == (10.0, 0.5)
    learned = torch.tensor(float(n), requires_grad=True)
    global_mean(torch.tensor(1.0, requires_grad=True), learned).backward()
    assert learned.grad is None
    accuracy = global_mean(torch.tensor(rank), n)
    assert (accuracy.item(), accuracy.dtype) == (0.5, torch.float32)
    many = 2**24
    assert loss_scale(many + rank) == 3 / (3 * many + 3)
    assert global_mean(torch.tensor(float(many), requires_grad=True), many).item() == 1.0


@on_ranks(4)
def test_the_mean_is_over_the_ranks_of_the_group(rank: int) -> None:
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    loss_sum = torch.tensor(float(rank), requires_grad=True)
    loss = global_mean(loss_sum, rank + 1, group)
    loss.backward()
    found = loss.item(), loss_sum.grad.item(), loss_scale(rank + 1, group)
    assert found == pytest.approx((4 / 6, 2 / 6, 2 / 6) if rank % 2 else (2 / 4, 2 / 4, 2 / 4))


@on_ranks(3)
def test_what_makes_no_sense_on_one_rank_is_refused_on_every_rank(rank: int) -> None:
    zero = torch.zeros((), requires_grad=True)
    bad = r"^a negative or infinite count \(or NaN\) on 1 of 3 ranks"
    own = -1 if rank == 1 else 4
    only = rf"^loss_sum requires a gradient on 1 of 3 ranks only \(this one: {rank == 0}\)"
    for said, call in (
        ("^the count is 0 on every rank", lambda: global_mean(zero, 0)),
        ("^the count is 0 on every rank", lambda: loss_scale(torch.tensor(0))),
        (f"{bad}; this one's is {own}", lambda: global_mean(zero, own)),
        (bad, lambda: loss_scale(float("nan") if rank == 0 else 4)),
        (bad, lambda: global_mean(zero, float("inf") if rank == 2 else 4)),
        (only, lambda: global_mean(zero if rank == 0 else zero.detach(), rank + 1)),
        (r"^loss_sum has shape \(3,\): add", lambda: global_mean(torch.zeros(3) + rank, 3)),
        (r"^count has shape \(2,\): pass one", lambda: global_mean(zero, torch.ones(2))),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    dist.barrier()  # nobody was left behind in a collective


@given(
    lengths=st.lists(st.integers(0, 9), max_size=12),
    size=st.integers(1, 5),
)
def test_windows_hold_every_batch_once_in_order_and_count_it(lengths: list[int], size: int) -> None:
    windows = list(accumulation_windows(iter(lengths), size, int))
    assert [batch for window, _ in windows for batch in window] == lengths
    assert all(count == sum(window) for window, count in windows)
    assert all(len(window) == size for window, _ in windows[:-1])
    assert all(1 <= len(window) <= size for window, _ in windows)


def test_a_window_of_no_micro_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="size must be at least 1"):
        next(accumulation_windows([1], 0, int))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_token_cross_entropy_divided_by_its_count_is_torchs_mean(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 5, VOCABULARY, dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCABULARY, (2, 5))
    targets[1, 2:] = PADDING
    loss_sum, count = token_cross_entropy(logits, targets)
    (ours,) = torch.autograd.grad(loss_sum / count, logits)
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    (theirs,) = torch.autograd.grad(wanted, logits)
    assert count == 7
    assert torch.allclose(loss_sum / count, wanted)
    assert torch.allclose(ours, theirs)
    # weights by class, looked up for each token, are what torch's `weight` is
    by_class = torch.rand(VOCABULARY, dtype=dtype)
    loss_sum, count = token_cross_entropy(logits, targets, by_class[targets.clamp(min=0)])
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=by_class)
    assert torch.allclose(loss_sum / count, wanted)


def test_one_token_and_no_token_and_half_precision_are_served() -> None:
    loss_sum, count = token_cross_entropy(torch.zeros(VOCABULARY), torch.tensor(1))
    assert loss_sum.item() == pytest.approx(torch.tensor(float(VOCABULARY)).log().item())
    assert count == 1
    logits = torch.randn(4, VOCABULARY, requires_grad=True)
    loss_sum, count = token_cross_entropy(logits, torch.full((4,), PADDING))
    loss_sum.backward()
    assert (loss_sum.item(), count.item()) == (0.0, 0)
    assert torch.equal(logits.grad, torch.zeros_like(logits))
    many = torch.zeros(3000, VOCABULARY, dtype=torch.bfloat16)
    loss_sum, _ = token_cross_entropy(many, torch.ones(3000, dtype=torch.int64))
    assert loss_sum.item() / 3000 == pytest.approx(torch.tensor(float(VOCABULARY)).log().item())


def test_a_loss_without_bounds_on_one_rank_is_the_same_on_all() -> None:
    def work(rank: int) -> Tensor:
        means = []
        for value in (float("inf"), float("nan"), 1e38):
            factor = torch.tensor(value if rank == 0 else 1.0, requires_grad=True)
            mean = global_mean(factor * 1.0, 1)
            mean.backward()
            assert factor.grad == 1.0  # W/N = 2/2
            means.append(mean.detach())
        return torch.stack(means)

    torch.testing.assert_close(*run_ranks(work, 2), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "tokens"), [(torch.float16, 70_000), (torch.bfloat16, 1003), (torch.int64, 5)]
)
def test_weights_in_half_precision_are_counted_exactly(dtype, tokens) -> None:
    logits = torch.zeros(tokens, 2)
    targets = torch.zeros(tokens, dtype=torch.int64)
    total, count = token_cross_entropy(logits, targets, torch.ones(tokens, dtype=dtype))
    assert count == tokens
    torch.testing.assert_close(total, tokens * torch.tensor(2.0).log())


def test_older_notebooks_find_the_former_names_with_a_warning(monkeypatch) -> None:
    for name in [name for name in sys.modules if name.startswith("miniddp.training")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.warns(DeprecationWarning, match=r"import from miniddp\.losses"):
        former = importlib.import_module("miniddp.training.losses")
    assert former.global_mean is global_mean
    assert importlib.import_module("miniddp.training").global_mean is global_mean
