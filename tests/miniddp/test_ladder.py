"""One loop runs every rung against one process with the whole batch, and against torch's DDP."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.launch.ranks import run_ranks
from labkit.testing.invariants import INVARIANTS, communication_overlaps_backward, violations
from labkit.testing.watch import RecordedCollectives
from miniddp.ladder import (
    RUNGS,
    Bucketed,
    BucketedOverlapped,
    Flat,
    OverlappedPerParameter,
    PerParameter,
)
from tests.on_ranks import on_ranks

OVERLAPPED = (OverlappedPerParameter, BucketedOverlapped)


def test_every_rung_obeys_the_invariants_and_two_overlap():
    # Rungs leave the loss and the clipping to the caller; other bits would part the replicas, too.
    elsewhere = {"uneven_items_equal_full_batch", "clipping_equals_full_batch"}
    elsewhere |= {"gradients_are_identical"}
    # What a rung that does nothing during backward cannot get wrong.
    of_hooks = {"accumulation_equals_full_batch", "collectives_match", "survives_an_exception"}

    def work():
        found = []
        for rung in RUNGS:
            left_out = elsewhere if rung.overlaps else elsewhere | of_hooks
            checks = [one for one in INVARIANTS if one.__name__ not in left_out]
            checks.append(communication_overlaps_backward)
            found.append(list(violations(rung, invariants=checks)))
        return found

    expected = [[] if r in OVERLAPPED else ["communication_overlaps_backward"] for r in RUNGS]
    assert run_ranks(work, 3, timeout=600, device="cpu") == [expected] * 3


@on_ranks(2, device="cpu")
def test_each_rung_launches_as_many_collectives_of_as_many_bytes_as_its_docstring_says(rank):
    weight, bias, flag = 16 * 16 * 4, 16 * 4, 4
    layers = [bias, weight] * 4
    # Of 1 KiB or a little more, with a flag for each of the two parameters.
    buckets, kib = [bias + weight + 2 * flag] * 4, 1 / 1024
    for wrap, launched_in_backward, sent in (
        (PerParameter, 0, [8, *[weight, bias] * 4]),
        (Flat, 0, [sum(layers) + 8 * flag]),
        (OverlappedPerParameter, 8, [*layers, 8 * flag]),
        (partial(Bucketed, bucket_cap_mb=kib), 0, buckets),
        (partial(BucketedOverlapped, bucket_cap_mb=kib), 4, buckets),
    ):
        module = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
        rung = wrap(module)
        with RecordedCollectives() as watch:
            module(torch.full((2, 16), 1.0 + rank)).sum().backward()
            assert len(watch.launched) == launched_in_backward
            rung.finish()
        assert {launch.op for launch in watch.launched} == {"allreduce_"}
        assert [launch.bytes for launch in watch.launched] == sent


@on_ranks(2, device="cpu")
def test_gradients_may_be_of_several_dtypes_and_parameters_empty(rank):
    for wrap in RUNGS:
        values = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(0)]
        values += [torch.zeros(2, dtype=torch.complex64), torch.zeros(4, dtype=torch.bfloat16)]
        module = nn.ParameterList(values)
        rung = wrap(module)
        for number, parameter in enumerate(module, start=1):
            (parameter * (number + rank)).sum().real.backward()
        rung.finish()
        for number, parameter in enumerate(module, start=1):
            assert torch.equal(parameter.grad, torch.full_like(parameter, number + 0.5))


@on_ranks(2, device="cpu")
def test_gradients_that_are_negated_or_conjugated_lazily_are_averaged_by_their_values(rank):
    for wrap in RUNGS:
        module = nn.ParameterDict(
            {name: torch.tensor(1.0) for name in ("real", "imaginary")}
            | {"whole": torch.tensor(1 + 2j)}
        )
        rung = wrap(module)
        turned = torch.complex(module["real"], module["imaginary"]).conj()
        ((turned + module["whole"].conj()) * (2 + rank + 4j)).real.backward()
        if not rung.overlaps:  # those that do have already divided it
            assert module["imaginary"].grad.is_neg()
            assert module["whole"].grad.is_conj()
        rung.finish()
        # PyTorch's gradient of Re(conj(z)·c) with respect to z is c.
        right = {"real": 2.5, "imaginary": 4.0, "whole": 2.5 + 4j}
        assert {name: p.grad.item() for name, p in module.items()} == right


@on_ranks(3, device="cpu")
def test_a_rung_on_a_group_leaves_the_other_ranks_alone(rank):
    group = dist.new_group([1, 2])
    for wrap in RUNGS if rank else ():
        module = nn.Linear(2, 1, bias=False)
        nn.init.constant_(module.weight, float(rank))
        rung = wrap(module, group)
        module(torch.tensor([[1.0, 10.0]]) * rank).sum().backward()
        rung.finish()
        assert module.weight.tolist() == [[1.0, 1.0]]
        assert module.weight.grad.tolist() == [[1.5, 15.0]]


@on_ranks(2, device="cpu")
def test_a_second_backward_before_finish_is_refused_with_the_next_action(rank):
    for wrap in OVERLAPPED:
        rung = wrap(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
        x = torch.full((1, 3), 1.0 + rank)
        rung(x).sum().backward()
        said = r"^the gradient of 1\.bias arrived a second time before.*finish\(\).*no_sync\(\)"
        with pytest.raises(RuntimeError, match=f"(?s){said}"):
            rung(x).sum().backward()


@on_ranks(2)
def test_a_module_with_nothing_to_average_on_one_rank_raises_on_every_rank(rank):
    module = nn.Linear(2, 2)
    module.requires_grad_(rank == 0)
    said = "(?s)^Some ranks cannot take part.*rank 1: ValueError" if rank == 0 else ""
    with pytest.raises(RuntimeError if rank == 0 else ValueError, match=said):
        Flat(module)


@on_ranks(2, device="cpu")
def test_no_sync_ends_also_when_the_pass_raises(rank):
    rung = BucketedOverlapped(nn.Linear(2, 2))
    with pytest.raises(KeyError), rung.no_sync():
        raise KeyError
    with rung.no_sync():
        with rung.no_sync():
            pass
        assert rung.accumulating
    assert not rung.accumulating
