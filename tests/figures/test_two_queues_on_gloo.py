"""The model of two queues against gloo: two real ranks make the calls."""

import pytest
import torch
import torch.distributed as dist
from figures.two_queues import Call, outcome_of, pair_up
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.launch import RanksError, RanksTimeoutError, run_ranks
from labkit.testing.watch import RecordedCollectives

Queue = list[Call]
DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


def grad(name: str, length: int = 2, dtype: str = "float32") -> Call:
    return Call("all_reduce", name, length, dtype)  # type: ignore[arg-type]


def sent(name: str, length: int = 2, dtype: str = "float32") -> Call:
    return Call("broadcast", name, length, dtype)  # type: ignore[arg-type]


BARRIER = Call("barrier")


def make_calls(rank: int, queues: tuple[Queue, Queue]) -> list[list[float]]:
    """Make this rank's calls; each tensor afterwards."""
    after = []
    for one in queues[rank]:
        tensor = torch.full((one.length,), one.value(rank), dtype=getattr(torch, one.dtype))
        if one.op == "all_reduce":
            dist.all_reduce(tensor)
        elif one.op == "broadcast":
            dist.broadcast(tensor, src=0)
        else:
            dist.barrier()
        after.append(tensor.tolist())
    return after


def each_pair(rank: int, pairs: list[tuple[Call, Call]]) -> list[list[float]]:
    return make_calls(rank, ([here for here, _ in pairs], [there for _, there in pairs]))


FINISHES = [
    (grad("a1"), grad("a1")),
    (grad("a1"), grad("b1")),
    (grad("b1", 3), grad("b2", 3)),
    (grad("c", 4, "bfloat16"), grad("b2", 4, "bfloat16")),
    (sent("w"), sent("w")),
    (sent("a1"), sent("b1")),
    (BARRIER, BARRIER),
]


def test_every_pair_that_the_model_lets_pass_gives_these_numbers_on_gloo() -> None:
    of_rank = run_ranks(each_pair, 2, FINISHES, device="cpu")
    for number, pair in enumerate(FINISHES):
        found = outcome_of(*pair)
        assert found.outcome == ("right" if pair[0].name == pair[1].name else "mixed")
        for rank in (0, 1):
            assert set(of_rank[rank][number]) == {found.results[rank]}, pair


GARBLES = [
    (grad("a1", 2, "float16"), grad("a1", 2, "bfloat16")),
    (sent("a1", 2), sent("b1", 3)),
    (sent("a1", 4, "float16"), sent("a1", 2)),
]


def test_a_garbled_pair_passes_without_an_error_and_a_rank_has_neither_sum_nor_copy() -> None:
    of_rank = run_ranks(each_pair, 2, GARBLES, device="cpu")
    for number, (here, there) in enumerate(GARBLES):
        found = outcome_of(here, there)
        assert found.outcome == "garbled"
        right = here.value(0) + (there.value(1) if here.op == "all_reduce" else 0)
        assert set(of_rank[1][number]) != {right}
        if found.results[0] is not None:
            assert set(of_rank[0][number]) == {found.results[0]}


HANGS = {
    "one call too few": ([grad("a1"), grad("b1")], [grad("a1")]),
    "another operation": ([grad("a1")], [sent("a1")]),
    "a barrier against an all-reduce": ([grad("a1"), BARRIER], [BARRIER, grad("a1")]),
    "a broadcast that no rank receives": ([sent("w")], []),
}


@pytest.mark.parametrize("name", HANGS)
def test_where_the_model_hangs_a_rank_waits_in_that_collective(name: str) -> None:
    queues = HANGS[name]
    assert pair_up(*queues).end == "hang"
    with pytest.raises(RanksTimeoutError, match="waits in"):
        run_ranks(make_calls, 2, queues, timeout=2, device="cpu")


MISMATCHES = {
    "lengths": (grad("a1", 2), grad("c", 3)),
    "lengths, the other way round": (grad("c", 3), grad("a1", 2)),
    "many more elements": (grad("a1", 1), grad("a1", 9)),
    "dtypes of different size": (grad("a1", 2), grad("a1", 2, "float16")),
    "as many bytes, in elements of different size": (grad("a1", 2), grad("a1", 4, "float16")),
    "a longer broadcast than its receiver": (sent("c", 3), sent("a1", 2)),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_after_a_mismatch_at_least_one_rank_waits_or_is_aborted(name: str) -> None:
    pair = MISMATCHES[name]
    assert outcome_of(*pair).outcome == "mismatch"
    with pytest.raises((RanksError, RuntimeError)) as caught:
        run_ranks(each_pair, 2, [pair], timeout=2, device="cpu")
    assert "collectives on ranks" not in str(caught.value)


def errors(rank: int, pairs: list[tuple[Call, Call]]) -> list[str]:
    """What DETAIL says of each pair, tried in process groups of their own."""
    said = []
    for pair in pairs:
        group = dist.new_group([0, 1])
        one = pair[rank]
        tensor = torch.full((one.length,), one.value(rank), dtype=getattr(torch, one.dtype))
        try:
            if one.op == "all_reduce":
                dist.all_reduce(tensor, group=group)
            elif one.op == "broadcast":
                dist.broadcast(tensor, src=0, group=group)
            else:
                dist.barrier(group=group)
            said.append("no error")
        except RuntimeError as error:
            said.append(str(error).split(" on ranks")[0])
    return said


def test_detail_reports_every_difference_but_that_of_the_names() -> None:
    pairs = [(grad("a1"), sent("a1")), (grad("a1"), BARRIER)]
    pairs += [pair for pair in (*FINISHES, *GARBLES, *MISMATCHES.values()) if pair[0] != BARRIER]
    wanted = []
    for pair in pairs:
        outcome = outcome_of(*pair, detail=True).outcome
        assert outcome in ("right", "mixed", "error")
        wanted.append("Detected mismatch between collectives" if outcome == "error" else "no error")
    assert run_ranks(errors, 2, pairs, device="cpu", env=DETAIL) == [wanted, wanted]


class WithBuffer(nn.Linear):
    """A layer with a buffer, which the wrapper's forward broadcasts."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("mean", torch.zeros(3))


def step_and_evaluation(rank: int, evaluating: tuple[int, ...]) -> list[str]:
    """The collectives of a step, of an evaluation through the wrapper, and of a barrier."""
    ddp = DistributedDataParallel(WithBuffer())
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    ddp(inputs).square().mean().backward()  # after this one, buckets are rebuilt
    ddp(inputs).square().mean().backward()
    with RecordedCollectives() as watch:
        ddp(inputs).square().mean().backward()
        if rank in evaluating:
            with torch.no_grad():
                ddp(inputs)
        dist.barrier()
    return [one.op for one in watch.launched]


def test_an_evaluation_through_a_wrapper_with_a_buffer_is_one_more_broadcast() -> None:
    nobody = run_ranks(step_and_evaluation, 2, (), device="cpu")
    everybody = run_ranks(step_and_evaluation, 2, (0, 1), device="cpu")
    assert nobody == [["broadcast_", "allreduce_", "barrier"]] * 2
    assert everybody == [["broadcast_", "allreduce_", "broadcast_", "barrier"]] * 2


def test_an_evaluation_on_rank_0_only_hangs_at_the_barrier_behind_it() -> None:
    step = [sent("w"), grad("a1")]
    assert pair_up([*step, sent("w"), BARRIER], [*step, BARRIER]).end == "hang"
    with pytest.raises(RanksTimeoutError, match="rank 1: waits in barrier"):
        run_ranks(step_and_evaluation, 2, (0,), timeout=3, device="cpu")
