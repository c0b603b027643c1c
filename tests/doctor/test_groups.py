"""Ranks that hold parts of a model, on journals of runs that never ran: what is still compared."""

from collections.abc import Callable
from typing import Any

from doctor.journals import fact, findings, kinds, lines, run_of, run_with_steps, step, window

from ddp_doctor.facts.merged import Run
from ddp_doctor.facts.types import CollectiveFact, ReplicaFact, StartFact, WrapperFact


def data_and_tensor(**more: Callable[[int, int], Any]) -> Run:
    """Ranks 0 and 1 hold halves of `up` and copies of `norm`, and read one batch; 2 and 3 as well.

    `more` gives facts of a step from its number and the rank.
    """
    batches = []
    for n in range(4):
        ranks = []
        for rank in range(4):
            data, half = divmod(rank, 2)
            local = {"norm": (1.0 + data) * (n + 1), "up": (2.0 + half) * (1 + data)}
            averaged = {"norm": 1.5 * (n + 1), "up": (2.0 + half) * 1.5}
            one = window([4], [1.0], averaged, local)
            one |= {name: value(n, rank) for name, value in more.items()}
            one["backwards"][0]["terms"][0] |= {"target": 7 + data, "input": 90 + 10 * n + data}
            ranks.append(one)
        batches.append(ranks)
    run = run_with_steps(batches)
    for rank in run.ranks:
        half = rank.rank % 2
        held = {"norm": 5, "up": 6 + half}
        rank.facts["start"] = [fact(StartFact, shards={"up": [half]}, parameters=held)]
    return run


def test_ranks_that_split_layers_may_read_one_batch_and_what_all_hold_is_measured() -> None:
    run = data_and_tensor()
    assert findings(run) == {}
    assert run.copies == {"norm": [[0, 1, 2, 3]], "up": [[0, 2], [1, 3]]}
    assert kinds(run) == ["averaged"] * 4
    assert "those that only some ranks step were not compared" in lines(run)["gradients"]


def test_parameters_that_the_ranks_optimizers_share_out_are_not_compared() -> None:
    windows = [window([4], [1.0], {name: 1.0}, {name: 2.0}) for name in ("weight", "bias")]
    for one, name in zip(windows, ("weight", "bias"), strict=True):
        one["after"] = fact(ReplicaFact, parameters={name: 5})
    run = run_of(windows)
    for rank, name in zip(run.ranks, ("weight", "bias"), strict=True):
        rank.facts["start"] = [fact(StartFact, parameters={name: 4}, values={name: 1.0})]
        rank.facts["wrapper"] = [fact(WrapperFact, world=2, of=2)]
    assert findings(run) == {}
    assert kinds(run) == ["in parts"]
    assert "differ" not in lines(run)["replicas"]


def test_copies_of_one_shard_that_diverge_are_found() -> None:
    def after(n: int, rank: int) -> dict[str, Any]:
        held = {"norm": n, "up": 10 * n + rank}
        return fact(ReplicaFact, parameters=held, values={"norm": 1.0, "up": 1.0 + rank})

    assert (
        "1 parameters differ" in findings(data_and_tensor(after=after))["replicas_drift"].evidence
    )


def test_constants_that_are_equal_may_be_parts_of_a_split_model() -> None:
    """Zero biases, and norms that are ones: perhaps different halves of a vector."""
    run = data_and_tensor(after=lambda n, rank: fact(ReplicaFact, parameters={"norm": rank}))
    for rank in run.ranks:
        rank.facts["start"][0]["constant"] = ["norm"]
    assert findings(run) == {}


def sharded(snapshot: Callable[[int, int], dict[str, Any]], **more: Any) -> Run:
    """Two ranks with halves of one parameter under fully_shard, in three steps."""
    steps = []
    for n in range(3):
        ranks = []
        for rank in range(2):
            one = window([4], [1.0], {}, {}, sharded=True, **more)
            one["snapshot"] |= snapshot(n, rank)
            one["backwards"][0] |= {"prepared": {}}  # there is no wrapper
            one["backwards"][0]["terms"][0] |= {"target": 10 * n + 5 * rank + 1, "input": 1}
            ranks.append(one)
        steps.append(ranks)
    run = run_with_steps(steps)
    for rank in run.ranks:
        held = {"weight": 8 + rank.rank}
        rank.facts["start"] = [fact(StartFact, shards={"weight": [rank.rank]}, parameters=held)]
    return run


def in_pieces(n: int, rank: int, factor: float = 0.5) -> dict[str, Any]:
    """Both ranks compute the whole gradient; each has its shard of what was combined."""
    local, final = 2.0 + rank + n, factor * (1.5 + rank + n)
    return {
        "grads": {"weight": [final]},
        "hashes": {"weight": 3 + rank},
        "local": {"weight": [local]},
        "pieces": {"weight": 2},
    }


def test_the_average_of_fully_shard_is_measured_from_the_shards_of_all_ranks() -> None:
    """In step n, the ranks compute 2 + n and 3 + n; the shards have (4 + 2n) / 2 and the rest."""

    def shards(n: int, rank: int) -> dict[str, Any]:
        total = 5.0 + 2 * n
        return in_pieces(n, rank) | {"grads": {"weight": [total / 8 if rank else 3 * total / 8]}}

    assert kinds(sharded(shards)) == ["averaged"] * 3
    assert findings(sharded(shards)) == {}


def test_shards_that_each_rank_scales_by_a_factor_of_its_own_are_found() -> None:
    def clipped(*factors: float) -> set[str]:
        run = sharded(in_pieces)
        for rank, factor in zip(run.ranks, factors, strict=True):
            for one in rank.windows:
                final = one["snapshot"]["grads"]["weight"] or []
                one["left"] = {"weight": [number / factor for number in final]}
        return set(findings(run))

    assert "clipped_local_shards" not in clipped(0.5, 0.5)
    assert "clipped_local_shards" in clipped(0.5, 0.6)


def test_gradients_that_fully_shard_keeps_for_a_later_backward_are_found() -> None:
    found = findings(sharded(in_pieces, waiting=1))["last_micro_batch_unsynced"]
    assert "set_requires_gradient_sync(True)" in found.fix


def test_a_sharded_model_whose_gradients_are_never_combined_has_none() -> None:
    nothing = {"grads": {}, "hashes": {}, "local": {}, "missing": ["weight"]}
    run = sharded(lambda n, rank: nothing)
    assert "set_requires_gradient_sync(True)" in findings(run)["optimizer_on_other_parameters"].fix
    for rank in run.ranks:  # they move: their gradients are elsewhere than in .grad
        for one, held in zip(rank.windows, (8, 8, 99), strict=True):
            one["after"]["parameters"] = {"weight": held}
    assert findings(run) == {}


def test_equal_data_of_some_ranks_are_found_unless_they_may_have_parts_of_one_batch() -> None:
    """As with a sampler that is given LOCAL_RANK: two hosts read the same."""

    def said(*calls: Any) -> list[str]:
        steps = [[*step(collectives=[*calls]), *step(collectives=[*calls])] for _ in range(3)]
        for n, windows in enumerate(steps):
            for rank, one in enumerate(windows):
                one["backwards"][0]["terms"][0] |= {"target": 7 + 10 * n + rank % 2, "input": 4}
        return [one.evidence for one in findings(run_with_steps(steps)).values()]

    [evidence] = said()
    assert "ranks 0, 2 and ranks 1, 3 computed the loss from equal data" in evidence
    assert "4 ranks do the work of 2" in evidence
    call = fact(CollectiveFact, op="all_gather", through_autograd=True, what="activation")
    assert said(call) == []
