"""The checks themselves: a right implementation passes; and what is said of a wrong one."""

import copy
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
    clipping_equals_full_batch,
    gradients_equal_full_batch,
    initial_state_is_broadcast,
    missing_counts_as_zeros,
    violations,
)
from labkit.testing.museum.parts import AveragingTrainer, Trainer
from labkit.testing.overlap import communication_overlaps_backward
from labkit.testing.watch import WrittenInFlightError, late_collectives
from tests.on_ranks import on_ranks


def error_of(check, *arguments):
    """The error of a check, or None."""
    try:
        check(*arguments)
    except InvariantError as error:
        return error
    return None


def test_torchs_ddp_obeys_every_invariant_and_overlaps():
    def work():
        keywords = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0003}
        ddp = partial(DistributedDataParallel, find_unused_parameters=True, **keywords)
        every = (*INVARIANTS, communication_overlaps_backward)
        plain = violations(DistributedDataParallel, invariants=[missing_counts_as_zeros])
        return list(violations(ddp, invariants=every)), list(plain)

    found = run_ranks(work, 3, timeout=600, device="cpu")
    assert found == [([], ["missing_counts_as_zeros"])] * 3


@on_ranks(3, timeout=300, device="cpu")
def test_an_implementation_that_raises_on_one_rank_is_reported_on_all_without_a_hang(rank):
    class RaisesOnRank1(AveragingTrainer):
        def __call__(self, inputs):
            if dist.get_rank() == 1:
                raise KeyError("no such thing")
            return super().__call__(inputs)

    with pytest.raises(InvariantError) as caught:
        gradients_equal_full_batch(RaisesOnRank1)
    assert caught.value.invariant == "gradients_equal_full_batch"
    assert ("KeyError" if rank == 1 else "rank 1 raised KeyError") in caught.value.found


@on_ranks(2, device="cpu")
def test_a_copy_that_is_trained_in_the_place_of_the_module_is_found_out():
    with pytest.raises(InvariantError) as caught:
        communication_overlaps_backward(lambda m: DistributedDataParallel(copy.deepcopy(m)))
    assert caught.value.where == "the module that was wrapped"
    assert caught.value.found == "no gradient arrived in it"
    assert "a copy of the module" in caught.value.cause


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    for position, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + position)
    return module


@on_ranks(3, device="cpu")
def test_what_differs_is_named_with_its_rank_on_every_rank(rank):
    def one_bit(module, rank):
        weight = module[2].weight.data
        if rank == 2:
            weight[1, 2] = torch.nextafter(weight[1, 2], torch.tensor(torch.inf))

    def a_buffer(module, rank):
        module[1].running_mean += float(rank == 1)

    def equal_nans(module, rank):
        nn.init.constant_(module[0].weight, torch.nan)

    def no_gradient(module, rank):
        module[2].bias.grad = None if rank == 1 else torch.zeros(2)

    def only_rank_0(module, rank):
        module[0].weight.grad += float(rank == 0)

    found = {}
    for change in (one_bit, a_buffer, equal_nans, no_gradient, only_rank_0):
        change(module := model(0), rank)
        checks = (assert_replicas_agree, assert_gradients_agree)
        found[change.__name__] = tuple(error_of(check, module) for check in checks)
    a_buffer(module := model(0), rank)
    assert_replicas_agree(module, buffers=False)
    shape = error_of(assert_replicas_agree, nn.Linear(3, 4 + rank))
    bit, buffer = found["one_bit"][0], found["a_buffer"][0]
    assert (bit.rank, bit.where) == (2, "2.weight")
    assert "1 of 8 elements" in bit.found
    assert (buffer.rank, buffer.where) == (1, "1.running_mean")
    assert "4 of 4 elements differ from rank 0's, by 1 at most" in buffer.found
    assert found["equal_nans"] == (None, None)
    none, one = found["no_gradient"][1], found["only_rank_0"][1]
    assert (none.rank, none.where, none.found) == (1, "2.bias.grad", "None")
    assert (one.rank, one.where) == (1, "0.weight.grad")
    assert (shape.rank, shape.found) == (1, "a tensor of float32 [5, 3]")
    assert "[4, 3], as on rank 0" in shape.expected


@on_ranks(2, device="cpu")
def test_a_true_gradient_without_a_trainable_parameter_is_an_error_that_names_it(rank):
    module = nn.Linear(3, 2)
    module.weight.grad, module.bias.grad = torch.ones(2, 3), torch.ones(2)
    true = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.bias.requires_grad_(rank != 1)
    with pytest.raises(InvariantError) as caught:
        assert_gradients_equal(module, true)
    found = caught.value
    assert (found.rank, found.where, found.found) == (1, "bias.grad", "a frozen parameter")


# What each rank does to the right gradient; then the ratio and the cosine, and a part of the cause.
MISTAKES = {
    "sum": (lambda g, rank: g * 3, 3, 1, "a sum where an average is needed"),
    "divided twice": (lambda g, rank: g / 3, 1 / 3, 1, "divided by the world size twice"),
    "some factor": (lambda g, rank: g * 1.7, 1.7, 1, "one factor"),
    "direction": (lambda g, rank: g.flip(0), 1, None, "direction bug"),
    "nan": (lambda g, rank: g * torch.nan, None, None, "not finite"),
    "zeros": (lambda g, rank: g * 0, None, None, "did backward run"),
    "on one rank": (lambda g, rank: g * (1 + (rank == 2)), 2, 1, "scale bug"),
}


@on_ranks(3, device="cpu")
def test_gradients_equal_tells_a_scale_bug_from_a_direction_bug(rank):
    right = torch.arange(1.0, 7.0).view(2, 3)
    for mistake, ratio, cosine, cause in MISTAKES.values():
        module = nn.Linear(3, 2, bias=False)
        module.weight.grad = right.clone()
        assert_gradients_equal(module, {"weight": right})
        module.weight.grad = mistake(right, rank)
        with pytest.raises(InvariantError) as caught:
            assert_gradients_equal(module, {"weight": right})
        error = caught.value
        assert error.where == "weight.grad"
        assert cause in error.cause
        if ratio is not None:
            assert error.comparison.ratio == pytest.approx(ratio)
        if cosine is not None:
            assert error.comparison.cosine == pytest.approx(cosine)
        elif error.comparison is not None:
            assert not error.comparison.cosine > 0.99


class SwallowsWhatIsRaised(Trainer):
    """Rank 1 leaves one gradient out; what its collectives raise, no rank lets through."""

    def finish(self) -> None:
        for index, parameter in enumerate(self.module.parameters()):
            if index != 1 or dist.get_rank() != 1:
                with suppress(BaseException):
                    dist.all_reduce(parameter.grad)


def test_an_implementation_that_swallows_a_mismatch_is_rejected_and_nothing_hangs():
    found = run_ranks(lambda: sorted(violations(SwallowsWhatIsRaised)), 3, timeout=300)
    assert "collectives_match" in found[0]
    assert found == [found[0]] * 3


class ClipsTheAverage(AveragingTrainer):
    """Right; what follows has one bug each, which no exhibit has."""

    def finish_and_clip(self, max_norm):
        self.finish()
        nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)


class AlwaysRescales(AveragingTrainer):
    def finish_and_clip(self, max_norm):
        self.finish()
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient *= max_norm / (norm + 1e-6)


class ClipsWithoutNaN(ClipsTheAverage):
    def finish_and_clip(self, max_norm):
        super().finish_and_clip(max_norm)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_()


class ChangesEach(ClipsTheAverage):
    def finish(self):
        super().finish()
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                self.change(parameter.grad)


class HidesNaN(ChangesEach):
    def change(self, gradient):
        gradient.nan_to_num_()


class Clamps(ChangesEach):
    def change(self, gradient):
        gradient.clamp_(-10, 10)


class DividesByThree(ChangesEach):
    def change(self, gradient):
        gradient *= dist.get_world_size() / 3


class Unfreezes(ClipsTheAverage):
    def __init__(self, module):
        super().__init__(module.requires_grad_(True))


def test_what_the_invariants_were_blind_to_is_found():
    wrong = {
        AlwaysRescales: clipping_equals_full_batch,
        ClipsWithoutNaN: clipping_equals_full_batch,
        HidesNaN: gradients_equal_full_batch,
        Clamps: gradients_equal_full_batch,
        Unfreezes: initial_state_is_broadcast,
    }

    checks = list(dict.fromkeys(wrong.values()))

    def three() -> tuple[list[dict], list[set[str]]]:
        right = [violations(ClipsTheAverage, invariants=checks)]
        right.append(violations(DividesByThree, invariants=[gradients_equal_full_batch]))
        return right, [set(violations(wrap, invariants=[one])) for wrap, one in wrong.items()]

    def two() -> set[str]:
        return set(violations(DividesByThree, invariants=[gradients_equal_full_batch]))

    caught = [{one.__name__} for one in wrong.values()]
    assert run_ranks(three, 3, timeout=300, device="cpu") == [([{}, {}], caught)] * 3
    assert run_ranks(two, 2, device="cpu") == [{"gradients_equal_full_batch"}] * 2


@on_ranks(2, device="cpu")
def test_a_tensor_that_is_changed_or_freed_before_its_collective_has_ended_is_an_error(rank):
    def written(tensor):
        tensor += 1

    def freed(tensor):
        tensor.untyped_storage().resize_(0)

    with late_collectives():
        for misuse in (written, freed):
            tensor = torch.full((3,), float(rank))
            work = dist.all_reduce(tensor, async_op=True)
            misuse(tensor)
            with pytest.raises(WrittenInFlightError, match="changed or freed"):
                work.wait()
        first, second = torch.ones(2), torch.full((2,), float("nan"))
        works = [dist.all_reduce(each, async_op=True) for each in (first, second)]
        assert first.tolist() == [1, 1]
        works[1].wait()  # carries out both
        works[0].wait()
        assert first.tolist() == [2, 2]
