"""The checks themselves: a right implementation passes; and what is said of a wrong one."""

import copy
import time
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.launch.ranks import run_ranks
from labkit.testing.invariants import (
    INVARIANTS,
    InvariantError,
    assert_gradients_agree,
    assert_gradients_equal,
    assert_replicas_agree,
    communication_overlaps_backward,
    gradients_equal_full_batch,
    violations,
)

EVERY_CHECK = (*INVARIANTS, communication_overlaps_backward)


def errors_of(rank, check, *arguments):
    """What a rank reports: None, or the error's attributes."""
    try:
        check(rank, *arguments)
    except InvariantError as error:
        return error
    return None


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_torchs_ddp_obeys_every_invariant_and_overlaps(world_size):
    def work():
        ddp = partial(DistributedDataParallel, find_unused_parameters=True)
        as_views = partial(ddp, gradient_as_bucket_view=True, bucket_cap_mb=0.0003)
        return [violations(wrap, invariants=EVERY_CHECK) for wrap in (ddp, as_views)]

    assert run_ranks(work, world_size, timeout=120, device="cpu") == [[{}, {}]] * world_size


def test_torchs_ddp_as_it_comes_fails_only_where_parameters_are_unused():
    def work():
        return list(violations(DistributedDataParallel, invariants=EVERY_CHECK))

    assert run_ranks(work, 3, timeout=120, device="cpu") == [["missing_counts_as_zeros"]] * 3


def test_an_implementation_that_raises_on_one_rank_is_reported_on_all_without_a_hang():
    class RaisesOnRank1:
        def __init__(self, module):
            self.module = module

        def __call__(self, inputs):
            if dist.get_rank() == 1:
                raise KeyError("no such thing")
            return self.module(inputs)

        def finish(self):
            for parameter in self.module.parameters():
                dist.all_reduce(parameter.grad)

    def work(rank):
        return errors_of(rank, lambda _: gradients_equal_full_batch(RaisesOnRank1))

    started = time.monotonic()
    errors = run_ranks(work, 3, timeout=90, device="cpu")
    assert time.monotonic() - started < 45
    assert [error.invariant for error in errors] == ["gradients_equal_full_batch"] * 3
    assert "KeyError" in errors[1].found
    assert "rank 1 raised KeyError" in errors[0].found


def test_a_copy_that_is_trained_in_the_place_of_the_module_is_found_out():
    def work(rank):
        def wrap(module):
            return DistributedDataParallel(copy.deepcopy(module))

        return errors_of(rank, lambda _: communication_overlaps_backward(wrap))

    for error in run_ranks(work, 2, device="cpu"):
        assert error.where == "the module that was wrapped"
        assert error.found == "no gradient arrived in it"
        assert "a copy of the module" in error.cause


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    for position, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + position)
    return module


def test_replicas_agree_names_rank_and_tensor_on_every_rank():
    def one_bit(rank):
        module = model(0)
        with torch.no_grad():
            weight = module[2].weight
            weight[1, 2] = (
                torch.nextafter(weight[1, 2], torch.tensor(torch.inf))
                if rank == 2
                else weight[1, 2]
            )
        assert_replicas_agree(module)

    def a_buffer(rank, buffers):
        module = model(0)
        module[1].running_mean += float(rank == 1)
        assert_replicas_agree(module, buffers=buffers)

    def a_shape(rank):
        assert_replicas_agree(nn.Linear(3, 4 + rank))

    def equal_nans(rank):
        module = model(0)
        nn.init.constant_(module[0].weight, torch.nan)
        assert_replicas_agree(module)

    def work(rank):
        return [
            errors_of(rank, one_bit),
            errors_of(rank, a_buffer, True),
            errors_of(rank, a_buffer, False),
            errors_of(rank, a_shape),
            errors_of(rank, equal_nans),
        ]

    for bit, buffer, no_buffer, shape, nans in run_ranks(work, 3, device="cpu"):
        assert (bit.rank, bit.where) == (2, "2.weight")
        assert "1 of 8 elements" in bit.found
        assert (buffer.rank, buffer.where) == (1, "1.running_mean")
        assert "4 of 4 elements differ from rank 0's, by 1 at most" in buffer.found
        assert no_buffer is None
        assert (shape.rank, shape.where, shape.found) == (1, "weight", "a tensor of float32 [5, 3]")
        assert "[4, 3], as on rank 0" in shape.expected
        assert nans is None


def test_gradients_agree_tells_none_from_zeros_and_one_group_from_another():
    def none_on_one(rank):
        module = model(rank)
        module[2].bias.grad = None if rank == 1 else torch.zeros(2)
        assert_gradients_agree(module)

    def only_rank_0_differs(rank, group):
        module = model(0)
        module[0].weight.grad += float(rank == 0)
        if group is None or rank > 0:
            assert_gradients_agree(module, group=group)

    def work(rank):
        group = dist.new_group([1, 2])
        return [
            errors_of(rank, none_on_one),
            errors_of(rank, only_rank_0_differs, None),
            errors_of(rank, only_rank_0_differs, group),
        ]

    for none, everywhere, in_group in run_ranks(work, 3, device="cpu"):
        assert (none.rank, none.where, none.found) == (1, "2.bias.grad", "None")
        assert (everywhere.rank, everywhere.where) == (1, "0.weight.grad")
        assert in_group is None


@pytest.mark.parametrize(
    ("mistake", "ratio", "cosine", "cause"),
    [
        (lambda g, rank: g * 3, 3, 1, "a sum where an average is needed"),
        (lambda g, rank: g / 3, 1 / 3, 1, "divided by the world size twice"),
        (lambda g, rank: g * 1.7, 1.7, 1, "one factor"),
        (lambda g, rank: g.flip(0), 1, None, "direction bug"),
        (lambda g, rank: g * torch.nan, None, None, "not finite"),
        (lambda g, rank: g * 0, None, None, "did backward run"),
        (lambda g, rank: g * (1 + (rank == 2)), 2, 1, "scale bug"),
    ],
    ids=["sum", "divided twice", "some factor", "direction", "nan", "zeros", "on one rank"],
)
def test_gradients_equal_tells_a_scale_bug_from_a_direction_bug(mistake, ratio, cosine, cause):
    def work(rank, mistake):
        module = nn.Linear(3, 2, bias=False)
        right = torch.arange(1.0, 7.0).view(2, 3)
        module.weight.grad = right.clone()
        assert_gradients_equal(module, {"weight": right})
        module.weight.grad = mistake(right, rank)
        return errors_of(rank, lambda _: assert_gradients_equal(module, {"weight": right}))

    for error in run_ranks(work, 3, mistake, device="cpu"):
        assert error.where == "weight.grad"
        assert cause in error.cause
        if ratio is not None:
            assert error.comparison.ratio == pytest.approx(ratio)
        if cosine is not None:
            assert error.comparison.cosine == pytest.approx(cosine)
        elif error.comparison is not None:
            assert not error.comparison.cosine > 0.99


def test_a_true_gradient_without_a_trainable_parameter_is_an_error_that_names_it():
    def work(rank):
        module = nn.Linear(3, 2)
        module.weight.grad, module.bias.grad = torch.ones(2, 3), torch.ones(2)
        true = {name: p.grad.clone() for name, p in module.named_parameters()}
        module.bias.requires_grad_(rank != 1)
        more = {**true, "scale": torch.ones(1)}
        return [
            errors_of(rank, lambda _: assert_gradients_equal(module, true)),
            errors_of(rank, lambda _: assert_gradients_equal(module, more)),
            errors_of(rank, lambda _: assert_gradients_equal(module, {**true, "bias": None})),
        ]

    for frozen, absent, none in run_ranks(work, 2, device="cpu"):
        assert (frozen.rank, frozen.where, frozen.found) == (1, "bias.grad", "a frozen parameter")
        assert (absent.where, absent.found) == ("scale.grad", "no parameter of this name")
        assert "Leave parameters that are frozen on purpose out of `true`" in absent.cause
        assert none.rank == 0, "on rank 1 a frozen parameter may have None"


def test_a_tied_parameter_may_be_among_the_true_gradients_under_both_names():
    def work():
        module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        module[1].weight = module[0].weight
        module[0].weight.grad = torch.ones(2, 2)
        both = module.named_parameters(remove_duplicate=False)
        assert_gradients_equal(module, {name: p.grad.clone() for name, p in both})

    run_ranks(work, 2, device="cpu")


def test_on_one_rank_no_cause_is_a_multiple_of_the_world_size():
    def work(rank):
        module = nn.Linear(3, 2, bias=False)
        right = torch.ones(2, 3)
        module.weight.grad = 1.0005 * right
        return errors_of(rank, lambda _: assert_gradients_equal(module, {"weight": right}))

    (error,) = run_ranks(work, 1, device="cpu")
    assert error.cause.startswith("a scale bug: one factor")


def test_an_error_says_what_where_both_figures_and_why():
    error = InvariantError("it_holds", 2, "head.bias.grad", "1", "2", "a mistake")
    assert str(error).splitlines() == [
        "it_holds does not hold on rank 2: head.bias.grad",
        "  found:    1",
        "  expected: 2",
        "  likely cause: a mistake",
    ]
    assert isinstance(error, AssertionError)


class Named(nn.Module):
    """Buffers of the given names and sizes, registered in the given order."""

    def __init__(self, *sizes: tuple[str, int]) -> None:
        super().__init__()
        for name, size in sizes:
            self.register_buffer(name, torch.arange(float(size)))


def test_replicas_agree_whatever_the_order_of_their_tensors():
    def work(rank):
        sizes = [("a", 2), ("b", 5)]
        assert_replicas_agree(Named(*(sizes if rank == 0 else reversed(sizes))))

    run_ranks(work, 3)


class SwallowsWhatIsRaised:
    """Rank 1 leaves one gradient out; what its collectives raise, no rank lets through."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.module(inputs)

    def finish(self) -> None:
        for index, parameter in enumerate(self.module.parameters()):
            if index != 1 or dist.get_rank() != 1:
                with suppress(BaseException):
                    dist.all_reduce(parameter.grad)


def test_an_implementation_that_swallows_a_mismatch_is_rejected_and_nothing_hangs():
    found = run_ranks(lambda: sorted(violations(SwallowsWhatIsRaised)), 3, timeout=60)
    assert "collectives_match" in found[0]
    assert found == [found[0]] * 3
