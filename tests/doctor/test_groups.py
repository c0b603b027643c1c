"""Meshes, on journals of runs that never ran: over which ranks a gradient is combined."""

from collections.abc import Callable
from typing import Any

from doctor.journals import SAME, fact, findings, first_step, kinds, run_with_steps, step, window

from ddp_doctor.facts.merged import Run
from ddp_doctor.facts.types import (
    CollectiveFact,
    FsdpFact,
    ReducedFact,
    ReplicaFact,
    StartFact,
    WindowFact,
)

Windows = list[WindowFact]


def data_and_tensor(
    final: Callable[[int, int], dict[str, float]] | None = None,
    share: float = 1.0,
    norm: Any = 5,
    steps: int = 4,
    **more: Callable[[int, int], Any],
) -> Run:
    """Ranks 0 and 1 hold halves of `up` and copies of `norm`, and read one batch; 2 and 3 as well.

    `final` gives the gradients of a rank at the update, averaged over the two batches by default.
    `more` gives other facts of a step from its number and the rank.
    """
    batches = []
    for n in range(steps):
        ranks = []
        for rank in range(4):
            data, half = divmod(rank, 2)
            local = {"norm": (1.0 + data) * (n + 1), "up": (2.0 + half) * (1 + data)}
            right = {"norm": 1.5 * (n + 1), "up": (2.0 + half) * 1.5}
            combined = {**right, **(final(n, rank) if final else {})}
            one = window([4], [share], combined, local)
            one |= {name: value(n, rank) for name, value in more.items()}
            one["backwards"][0]["terms"][0] |= {"target": 7 + data, "input": 90 + 10 * n + data}
            ranks.append(one)
        batches.append(ranks)
    run = run_with_steps(batches)
    for rank in run.ranks:
        half = rank.rank % 2
        row = [rank.rank - half, rank.rank - half + 1]
        start = fact(StartFact, shards={"up": [half]}, rows=[row], constant=["norm"])
        start["parameters"] = {"norm": norm, "up": 6 + half}
        rank.facts["start"] = [start]
    return run


def test_ranks_of_a_tensor_group_count_their_items_once_and_need_equal_data() -> None:
    run = data_and_tensor(random=lambda n, rank: [n])  # the generators are in one state, too
    assert findings(data_and_tensor()) == {}
    assert kinds(run) == ["averaged"] * 4
    assert first_step(run).terms[0].items == 8
    assert run.readers == [[0, 1], [2, 3]]
    assert {name: len(groups) for name, groups in run.copies.items()} == {"norm": 1, "up": 2}


def test_equal_data_along_the_data_dimension_are_found_beside_a_tensor_dimension() -> None:
    run = data_and_tensor()
    for rank in run.ranks:
        for one in rank.windows:
            one["backwards"][0]["terms"][0] |= {"target": 7, "input": 9}
    assert "same_data_on_ranks" in findings(run)


def twice(*names: str) -> Callable[[int, int], dict[str, float]]:
    """The right gradients of a rank, with these twice too large."""

    def final(n: int, rank: int) -> dict[str, float]:
        right = {"norm": 1.5 * (n + 1), "up": (2.0 + rank % 2) * 1.5}
        return {name: 2 * right[name] for name in names}

    return final


def test_a_gradient_that_is_summed_over_one_dimension_too_many_is_named() -> None:
    for name in ("norm", "up"):
        wrong = findings(data_and_tensor(twice(name)))
        assert set(wrong) == {"wrong_group"}
        assert f"{name}: × 1" in wrong["wrong_group"].evidence


def test_a_gradient_that_each_rank_computes_as_a_whole_is_complete_without_a_sum() -> None:
    """As of embeddings before Megatron's sequence is scattered, beside norms that are summed."""
    batches = []
    for n in range(3):
        halves = (0.5 * n + 1, 2.0 * n + 3)
        whole = {"embedding": n + 1.0, "norm": sum(halves)}
        ranks = [
            window([4], [1.0], whole | {"up": h}, whole | {"norm": h, "up": h}) for h in halves
        ]
        for rank, one in enumerate(ranks):
            one["backwards"][0]["terms"][0] |= {"target": 7 + rank, "input": 9 + rank}
        batches.append(ranks)
    run = run_with_steps(batches)
    for rank in run.ranks:
        start = fact(StartFact, shards={"up": [rank.rank]}, constant=["embedding", "norm"])
        start["parameters"] = {"embedding": 1, "norm": 2, "up": 3 + rank.rank}
        rank.facts["start"] = [start]
    assert findings(run) == {}


def test_copies_that_are_not_summed_along_the_tensor_dimension_diverge() -> None:
    def after(n: int, rank: int) -> dict[str, Any]:
        held = {"norm": 10 * n + rank % 2, "up": 70 + 10 * n + rank % 2}
        values = {"norm": 1.0 + rank % 2, "up": 3.0 + rank % 2}
        return {"parameters": held, "values": values, "buffers": {}}

    def diverging(constant: list[str]) -> set[str]:
        run = data_and_tensor(lambda n, rank: {"norm": 1.0 + n + rank % 2}, after=after)
        for rank in run.ranks:
            rank.facts["start"][0]["constant"] = constant
        return set(findings(run))

    assert diverging([]) == {"replicas_drift"}
    assert diverging(["norm"]) == set()  # ones: perhaps different halves of a vector


def test_a_shard_that_starts_like_another_one_is_no_copy_of_it() -> None:
    run = data_and_tensor()
    for rank in run.ranks:
        rank.facts["start"][0]["parameters"]["up"] = 0
        rank.facts["start"][0]["constant"] = ["norm", "up"]  # zeros
    assert len(run.copies["up"]) == 2
    assert findings(run) == {}


def test_a_factor_that_all_ranks_have_is_no_clip_and_one_of_its_own_on_each_rank_is() -> None:
    assert findings(data_and_tensor(rescaled=lambda n, rank: 0.5)) == {}
    found = findings(data_and_tensor(rescaled=lambda n, rank: 0.5 + 0.1 * (rank % 2)))
    assert set(found) == {"clipped_local_shards"}
    assert "0.5, 0.6, 0.5, 0.6" in found["clipped_local_shards"].evidence


def sharded(last: int, share: float = 1.0, reduce: str = "avg") -> Run:
    """Two ranks with fully_shard and two micro-batches; `last` is the last one that is reduced."""
    steps = []
    for n in range(3):
        ranks = []
        for rank in range(2):
            gradients = {"weight": 1.0 + rank + n}
            one = window([4, 4], [share / 2, share / 2], gradients, {}, sharded=True, dtensors=True)
            call = fact(FsdpFact, op="reduce_scatter_tensor", reduce=reduce, group=[0, 1])
            one["fsdp"] = [call | {"backwards": {"0": micro}} for micro in range(last + 1)]
            for micro, backward in enumerate(one["backwards"]):
                backward["prepared"] = {}  # there is no wrapper
                backward["terms"][0] |= {"target": 10 * n + micro + 5 * rank + 1, "input": 1}
            ranks.append(one)
        steps.append(ranks)
    run = run_with_steps(steps)
    for rank in run.ranks:
        start = fact(StartFact, shards={"weight": [rank.rank]}, rows=[[0, 1]])
        start["parameters"] = {"weight": 8 + rank.rank}
        rank.facts["start"] = [start]
    return run


def test_the_average_of_fully_shard_is_read_from_its_own_collectives() -> None:
    assert findings(sharded(1)) == {}
    assert kinds(sharded(1)) == ["averaged"] * 3
    assert first_step(sharded(1, share=0.5)).terms[0].total == 0.5
    assert set(kinds(sharded(1, reduce="sum"))) == {"unknown"}  # another factor may follow


def test_a_clip_that_differs_between_steps_is_no_factor_of_fully_shard() -> None:
    run = sharded(1)
    for rank in run.ranks:
        for n, one in enumerate(rank.windows):
            one["left"] = {"weight": one["snapshot"]["grads"]["weight"] * (n + 2)}
    assert kinds(run) == ["averaged"] * 3


def test_a_last_micro_batch_that_fully_shard_does_not_reduce_is_found() -> None:
    assert set(findings(sharded(0))) == {"last_micro_batch_unsynced"}


def test_ranks_that_shard_a_model_and_read_the_same_data_do_the_work_of_one() -> None:
    run = sharded(1)
    for rank in run.ranks:
        for one in rank.windows:
            for backward in one["backwards"]:
                backward["terms"][0]["target"] = 3
    assert "same_data_on_ranks" in findings(run)


def test_equal_data_of_some_ranks_are_found() -> None:
    """As with a sampler that is given LOCAL_RANK: two hosts read the same."""
    steps = [[*step(), *step()] for _ in range(3)]
    for n, windows in enumerate(steps):
        for rank, one in enumerate(windows):
            one["backwards"][0]["terms"][0] |= {"target": 7 + 10 * n + rank % 2, "input": 4}
    evidence = findings(run_with_steps(steps))["same_data_on_ranks"].evidence
    assert "ranks 0, 2 and ranks 1, 3 computed the loss from bitwise equal inputs" in evidence
    assert "4 ranks do the work of 2" in evidence


def test_equal_data_of_ranks_that_exchange_activations_are_a_hint_unless_each_has_a_part() -> None:
    """Parts of one sequence or one graph give parts of one gradient."""
    call = fact(CollectiveFact, op="all_gather", through_autograd=True, what="activation")

    def said(calls: list[Any], parts: bool) -> list[str]:
        steps = [step(collectives=[*calls]) for _ in range(3)]
        for windows in steps:
            for one in windows:
                one["backwards"][0]["terms"][0] |= {"target": 3, "input": 4}
                if not parts:
                    one["snapshot"]["local"] = SAME
        return [one.severity for one in findings(run_with_steps(steps)).values()]

    assert said([], parts=True) == ["error"]
    assert said([call], parts=False) == ["hint"]
    assert said([call], parts=True) == []


def test_parameters_that_no_reduction_of_the_script_contains_are_said_to_be_in_none() -> None:
    reduced = {"weight": fact(ReducedFact, sent=1.0, got=1.0, local=1.0, pieces=1, times=1)}
    after = tuple(fact(ReplicaFact, parameters={"weight": 5, "bias": 6 + n}) for n in (0, 1))
    start = fact(
        StartFact, parameters={"weight": 3, "bias": 4}, values={"weight": 1.0, "bias": 1.0}
    )
    hashes = tuple({"weight": 1, "bias": 2 + n} for n in (0, 1))
    steps = [step(reduced=reduced, after=after) for _ in range(2)]
    for windows in steps:
        for one, own in zip(windows, hashes, strict=True):
            one["snapshot"]["hashes"] = own
    run = run_with_steps(steps, start=[start])
    assert "others, and these in no call" in findings(run)["replicas_drift"].evidence


def test_a_sharded_model_whose_gradients_are_never_combined_has_none() -> None:
    run = sharded(1)
    for rank in run.ranks:
        for one in rank.windows:
            one["snapshot"] = {"grads": {}, "hashes": {}, "local": {}, "missing": ["weight"]}
            one["dtensors"] = True
    found = findings(run)["optimizer_on_other_parameters"]
    assert "set_requires_gradient_sync(True)" in found.fix
    for rank in run.ranks:  # they move: their gradients are elsewhere than in .grad
        rank.windows[-1]["after"]["parameters"] = {"weight": 99}
    assert findings(run) == {}
