"""The rule of the book: DDP delivers the gradient of (1/W) Σ L_r, so choose Σ L_r = W · L.

It holds as long as every path between ranks carries gradient. Each special case that the chapters
state is computed here on real ranks with different data, and compared with one process that has
the whole batch: under torch's DDP and under MiniDDP, on two and three ranks, on every rank.
"""

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.launch import run_ranks
from labkit.testing import gradient_of, gradients, largest_difference, ratio_and_cosine
from miniddp import MiniDDP
from miniddp.collectives import differentiable

WRAPPERS = {"torch": DistributedDataParallel, "miniddp": MiniDDP}
WORLD_SIZES = [2, 3]
EQUAL = {2: [3, 3], 3: [3, 3, 3]}
UNEQUAL = {2: [1, 5], 3: [1, 2, 6]}
Loss = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class Encoder(nn.Module):
    """Outputs (n, 4), and a scale that belongs to the loss, as the temperature of CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
        self.log_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x), self.log_scale.exp()


def encoder_and_data(samples: int) -> tuple[Encoder, Tensor, Tensor]:
    torch.manual_seed(11)
    model = Encoder().double()
    return model, torch.randn(samples, 3).double(), torch.randn(samples, 4).double()


def own_samples(rank: int, counts: list[int]) -> slice:
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])


# Losses of one process. A regression is a sum of terms of one sample each; in a contrastive loss
# every row compares one target with the outputs of all samples.


def regression_terms(outputs: Tensor, scale: Tensor, targets: Tensor) -> Tensor:
    return (scale * outputs - targets).square().sum(dim=1)


def contrastive_rows(rows: Tensor, outputs: Tensor, scale: Tensor, first_row: int = 0) -> Tensor:
    labels = first_row + torch.arange(len(rows))
    return F.cross_entropy(scale * rows @ outputs.T, labels, reduction="none")


def regression(outputs: Tensor, scale: Tensor, targets: Tensor) -> Tensor:
    return regression_terms(outputs, scale, targets).mean()


def summed_regression(outputs: Tensor, scale: Tensor, targets: Tensor) -> Tensor:
    return regression_terms(outputs, scale, targets).sum()


def contrastive(outputs: Tensor, scale: Tensor, targets: Tensor) -> Tensor:
    return contrastive_rows(targets, outputs, scale).mean()


# What a rank back-propagates: of its own outputs and targets, and N, the samples on all ranks.


def own_terms_over_global_count(outputs: Tensor, scale: Tensor, targets: Tensor, n: int) -> Tensor:
    return regression_terms(outputs, scale, targets).sum() / n


def own_terms_over_own_count(outputs: Tensor, scale: Tensor, targets: Tensor, n: int) -> Tensor:
    return regression_terms(outputs, scale, targets).mean()


def summed_terms(outputs: Tensor, scale: Tensor, targets: Tensor, n: int) -> Tensor:
    return regression_terms(outputs, scale, targets).sum()


def whole_loss(outputs: Tensor, scale: Tensor, targets: Tensor, n: int) -> Tensor:
    everything = differentiable.all_gather(outputs)
    return contrastive(everything, scale, plain_gather(targets))


def own_rows_over_global_count(outputs: Tensor, scale: Tensor, targets: Tensor, n: int) -> Tensor:
    columns = differentiable.all_gather(outputs)
    first_row = dist.get_rank() * len(targets)
    return contrastive_rows(targets, columns, scale, first_row).sum() / n


def own_rows_over_own_count(outputs: Tensor, scale: Tensor, targets: Tensor, n: int) -> Tensor:
    columns = differentiable.all_gather(outputs)
    return contrastive_rows(targets, columns, scale, dist.get_rank() * len(targets)).mean()


def own_rows_of_a_plain_gather(outputs: Tensor, scale: Tensor, targets: Tensor, n: int) -> Tensor:
    columns = plain_gather(outputs, own=outputs)
    return contrastive_rows(targets, columns, scale, dist.get_rank() * len(targets)).mean()


def whole_loss_of_a_plain_gather(outputs: Tensor, scale: Tensor, targets: Tensor, n: int) -> Tensor:
    return contrastive(plain_gather(outputs, own=outputs), scale, plain_gather(targets))


def plain_gather(tensor: Tensor, own: Tensor | None = None) -> Tensor:
    """`dist.all_gather`, which autograd does not see; with `own`, this rank's slice reinserted."""
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, tensor.detach())
    if own is not None:
        pieces[dist.get_rank()] = own
    return torch.cat(pieces)


# Each special case: the loss that is meant, what a rank computes, its counts, the right factor.
CASES = {
    "own terms, summed": (summed_regression, summed_terms, UNEQUAL, "W"),
    "own terms ÷ N": (regression, own_terms_over_global_count, UNEQUAL, "W"),
    "own terms ÷ own count": (regression, own_terms_over_own_count, EQUAL, "1"),
    "the whole loss": (contrastive, whole_loss, EQUAL, "1"),
    "own rows ÷ N": (contrastive, own_rows_over_global_count, EQUAL, "W"),
    "own rows ÷ own count": (contrastive, own_rows_over_own_count, EQUAL, "1"),
}


@cache
def truth(case_loss: Callable[..., Tensor], samples: int) -> list[Tensor]:
    """The gradient of the loss that is meant, in one process that has every sample."""
    model, inputs, targets = encoder_and_data(samples)
    return gradient_of(model, lambda m: case_loss(*m(inputs), targets))


@cache
def on_ranks(wrapper: str, loss: Loss, counts: tuple[int, ...]) -> list[dict[str, list[Tensor]]]:
    """[rank][factor] → the gradient after backward of `factor · loss`, one run for all factors."""
    world_size, samples = len(counts), sum(counts)
    model, inputs, targets = encoder_and_data(samples)

    def work(rank: int) -> dict[str, list[Tensor]]:
        mine, found = own_samples(rank, list(counts)), {}
        for name, factor in (("1", 1.0), ("W", world_size), ("1/W", 1 / world_size)):
            ddp = WRAPPERS[wrapper](copy.deepcopy(model))
            outputs, scale = ddp(inputs[mine])
            (factor * loss(outputs, scale, targets[mine], samples)).backward()
            found[name] = gradients(ddp)
        return found

    return run_ranks(work, world_size, device="cpu")


def under_both(test: Callable[..., None]) -> Callable[..., None]:
    of_each = pytest.mark.parametrize("wrapper", WRAPPERS)(test)
    return pytest.mark.parametrize("world_size", WORLD_SIZES)(of_each)


@under_both
@pytest.mark.parametrize("case", CASES)
def test_one_factor_is_right_on_every_rank_and_the_others_are_wrong(case, world_size, wrapper):
    meant, loss, counts, right = CASES[case]
    true = truth(meant, sum(counts[world_size]))
    for of_rank in on_ranks(wrapper, loss, tuple(counts[world_size])):
        agreeing = [f for f, found in of_rank.items() if largest_difference(found, true) < 1e-11]
        assert agreeing == [right]


NO_FACTOR = {
    "own terms ÷ unequal own counts": (regression, own_terms_over_own_count, UNEQUAL),
    "own rows of a plain gather": (contrastive, own_rows_of_a_plain_gather, EQUAL),
}


@under_both
@pytest.mark.parametrize("case", NO_FACTOR)
def test_no_factor_repairs_another_direction(case, world_size, wrapper):
    meant, loss, counts = NO_FACTOR[case]
    true = truth(meant, sum(counts[world_size]))
    for of_rank in on_ranks(wrapper, loss, tuple(counts[world_size])):
        assert abs(ratio_and_cosine(of_rank["1"], true).cosine) < 0.99


@under_both
def test_no_one_factor_repairs_the_whole_loss_of_a_plain_gather(world_size, wrapper):
    """The encoder's gradient needs W, and the loss's own scale needs 1: the rule does not apply."""
    counts = EQUAL[world_size]
    true_scale, *true_layers = truth(contrastive, sum(counts))
    for of_rank in on_ranks(wrapper, whole_loss_of_a_plain_gather, tuple(counts)):
        scale, *_ = of_rank["1"]
        _, *layers = of_rank["W"]
        assert largest_difference([scale], [true_scale]) < 1e-12
        assert largest_difference(layers, true_layers) < 1e-12


@settings(max_examples=6)
@given(
    world_size=st.sampled_from(WORLD_SIZES),
    wrapper=st.sampled_from(list(WRAPPERS)),
    seed=st.integers(0, 2**31),
)
def test_ddp_delivers_the_gradient_of_the_mean_of_any_local_losses(world_size, wrapper, seed):
    """Every rank weighs the outputs of all ranks as it likes, and not even as the others do."""
    samples = 2 * world_size
    model, inputs, _ = encoder_and_data(samples)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(world_size, samples, 4, generator=generator).double()

    def local_loss(outputs: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        return (weight * outputs).sum().tanh() * scale

    def work(rank: int) -> list[Tensor]:
        ddp = WRAPPERS[wrapper](copy.deepcopy(model))
        outputs, scale = ddp(inputs[2 * rank : 2 * rank + 2])
        local_loss(differentiable.all_gather(outputs), scale, weights[rank]).backward()
        return gradients(ddp)

    def mean_loss(model: nn.Module) -> Tensor:
        outputs, scale = model(inputs)
        return torch.stack([local_loss(outputs, scale, weight) for weight in weights]).mean()

    true = gradient_of(model, mean_loss)
    for found in run_ranks(work, world_size, device="cpu"):
        assert largest_difference(found, true) < 1e-12
