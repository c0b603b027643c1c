"""What looks like a mistake and is meant: rules on journals of runs that never ran."""

from typing import Any

from doctor.journals import (
    OWN,
    SAME,
    fact,
    findings,
    kinds,
    lines,
    run_of,
    run_with_steps,
    step,
    window,
)

from ddp_doctor.facts.merged import Run
from ddp_doctor.facts.types import (
    BatchFact,
    ForwardFact,
    LoaderFact,
    ReplicaFact,
    SamplerFact,
    ScalingFact,
    ScheduleFact,
    StartFact,
    WrapperFact,
)

LOADER = fact(LoaderFact, length=96, grad=True, usual=True, place="train.py:4")


def wrapper(world: int) -> WrapperFact:
    return fact(WrapperFact, world=world, of=4, broadcast_buffers=True, place="train.py:3")


def scaled_by(op: str, value: float, operand: str, place: str = "train.py:8") -> ScalingFact:
    text = f"loss {op} {operand}"
    return fact(ScalingFact, op=op, value=value, operand=operand, text=text, place=place)


def parts_of_a_model(world: int) -> Run:
    """Four ranks: two groups of two replicas, or four replicas that differ by mistake."""
    windows = []
    for rank in range(4):
        half = {"weight": 1.0 + rank // 2, "bias": -2.0}
        held = {"weight": rank // 2, "bias": rank // 2}
        replica = fact(ReplicaFact, parameters=held, values=half)
        windows.append(window([4], [1.0], half, half, after=replica))
    run = run_of(windows, wrapper=[wrapper(world)])
    for rank in run.ranks:
        weight = {"weight": 5 + rank.rank // 2, "bias": 0}  # a zero bias is equal on all ranks
        rank.facts["start"] = [fact(StartFact, parameters=weight)]
    return run


def test_groups_that_hold_other_parts_of_a_model_are_no_replicas() -> None:
    """Tensor or pipeline parallelism, and experts: the wrapper's group is smaller than the run."""
    assert {"replicas_differ_at_start", "replicas_drift"} <= set(findings(parts_of_a_model(4)))
    run = parts_of_a_model(2)
    assert findings(run) == {}
    for rank in run.ranks:  # the schedule of a pipeline calls what is inside of the wrapper
        rank.windows[0]["backwards"][0]["prepared"] = {"0": None}
    assert findings(run) == {}
    assert kinds(run) == ["in parts"]
    assert "gradients" not in lines(run)


def test_lightnings_manual_optimization_needs_its_own_backward() -> None:
    for manual, fix in ((False, "model(batch)"), (True, "self.manual_backward(loss)")):
        run = run_of([window([4], [1.0], mine, mine) for mine in OWN])
        for rank in run.ranks:
            rank.facts["wrapper"] = [wrapper(2) | {"of": 2, "manual": manual}]
            rank.windows[0]["backwards"][0]["prepared"] = {"0": None}
        assert fix in findings(run)["wrapper_bypassed"].fix


def two_losses(calls: list[int], syncs: list[bool], counts: list[int]) -> Run:
    windows = []
    for mine in OWN:
        one = window(counts, [1.0] * len(counts), SAME, mine)
        for number_, (backward, call) in enumerate(zip(one["backwards"], calls, strict=True)):
            backward |= {"call": call, "values": [mine["weight"] + number_]}
        one["forwards"] = [fact(ForwardFact, sync=each, place="train.py:7") for each in syncs]
        windows.append(one)
    return run_with_steps([windows] * 3)


def test_losses_from_two_calls_of_one_helper_are_added_on_purpose() -> None:
    """A discriminator's backward for real samples, and then for generated ones."""
    run = two_losses([1, 2], [True, True], [4, 6])
    assert findings(run) == {}
    in_a_loop = two_losses([1, 1], [True, True], [4, 4])
    assert "loss_not_divided_by_accumulation" in findings(in_a_loop)
    last_outside = two_losses([1, 1, 1, 2], [True] * 4, [4] * 4)
    assert "loss_not_divided_by_accumulation" in findings(last_outside)
    under_no_sync = two_losses([1, 2], [False, True], [4, 4])
    assert "loss_not_divided_by_accumulation" in findings(under_no_sync)


def seen_by(
    inputs: tuple[Any, Any],
    target: int | None = None,
    term_input: tuple[int, int] = (5, 6),
    **more: Any,
) -> Run:
    windows = step(inputs=inputs, **more)
    for one, hash_ in zip(windows, term_input, strict=True):
        one["backwards"][0]["values"] = [2.0]
        if target is not None:
            one["backwards"][0]["terms"][0] |= {"target": target, "input": hash_}
    return run_with_steps([windows] * 2)


def test_tensors_that_cannot_be_read_are_not_the_same_data() -> None:
    unread = ([[[0, 8, [2, 4]]]],) * 2
    assert findings(seen_by(unread, target=3)) == {}
    assert findings(seen_by(([], []), target=0, term_input=(0, 0))) == {}


def test_a_batch_without_a_tensor_that_is_found_is_compared_by_what_the_loss_is_given() -> None:
    """The targets of a contrastive loss are 0, 1, … on every rank."""
    assert findings(seen_by(([[]], [[]]), target=3)) == {}
    assert "same_data_on_ranks" in findings(seen_by(([[]], [[]]), target=3, term_input=(5, 5)))


def reading(rows: list[list[int]], size: int, used: int, **loader: Any) -> Run:
    """Each rank reads rows in batches of `size`, and its forward is given `used` of a batch."""
    windows = step(inputs=([[[1, 8, [used, 4]]]], [[[2, 8, [used, 4]]]]))
    run = run_with_steps([windows] * 2, loader=[LOADER | loader])
    for rank, mine in zip(run.ranks, rows, strict=True):
        rank.facts["batch"] = [
            fact(BatchFact, size=size, rows=mine[at * size : (at + 1) * size])
            for at in range(len(mine) // size)
        ]
    return run


def test_a_global_batch_that_each_rank_slices_is_no_batch_that_all_train_on() -> None:
    rows = [list(range(96)), list(range(96))]
    assert "same_data_on_ranks" in findings(reading(rows, size=16, used=16))
    assert findings(reading(rows, size=16, used=8)) == {}
    assert findings(reading([rows[0], [each + 96 for each in rows[1]]], size=16, used=16)) == {}


def test_a_shuffled_loader_without_a_sampler_is_found_in_the_first_rows_of_many() -> None:
    """4000 of 50,000 rows on each of two ranks: about 320 are the same."""
    rows = [list(range(4000)), list(range(3680, 7680))]
    found = findings(reading(rows, 16, 16, length=50_000))["same_data_on_ranks"]
    assert found.severity == "warning"
    assert "320 of the first 4000 rows" in found.evidence
    parts = [list(range(4000)), list(range(25_000, 29_000))]
    assert findings(reading(parts, 16, 16, length=50_000)) == {}
    assert findings(reading(rows, 16, 16, length=50_000, usual=False)) == {}
    few_values = [[each % 500 for each in mine] for mine in rows]
    assert findings(reading(few_values, 16, 16, length=50_000)) == {}


def sampling(seeds: list[int], epochs: list[int]) -> Run:
    facts = [
        fact(
            SamplerFact, epoch=epoch, seed=seed, shuffle=True, replicas=2, length=96, grad=True,
            backwards=6 * at,
        )
        for at, (seed, epoch) in enumerate(zip(seeds, epochs, strict=True))
    ]  # fmt: skip
    return run_with_steps([step()] * 2, sampler=facts)


def test_an_order_that_changes_with_the_samplers_seed_does_not_repeat() -> None:
    assert "epoch_order_repeats" in findings(sampling([0, 0, 0], [0, 0, 0]))
    assert findings(sampling([0, 1, 2], [0, 0, 0])) == {}
    assert findings(sampling([0, 0, 0], [0, 1, 2])) == {}


def scheduling(calls_per_step: int, apart: bool, steps: int, dense: int = 10**9) -> Run:
    """A schedule of as many calls as the run has steps, called more often than that."""
    facts = [
        fact(
            ScheduleFact, count=count, steps=(count - 1) // calls_per_step + 1,
            backwards=count if apart else 4 * ((count - 1) // calls_per_step + 1),
            rate=max(0.0, 1 - count / steps),
        )
        for count in range(1, steps * calls_per_step + 1)
        if count <= dense or count % 10 ** (len(str(count)) - 2) == 0
    ]  # fmt: skip
    run = run_of([window([4], [1.0], SAME, SAME) for _ in range(4)], schedule=facts)
    for rank in run.ranks:
        rank.facts["totals"][0]["steps"] = {"0": steps}
    return run


def test_a_scheduler_that_steps_per_micro_batch_does_not_step_once_per_rank() -> None:
    assert "scheduler_steps_per_rank" in findings(scheduling(4, apart=False, steps=20))
    assert "scheduler_steps_per_rank" not in findings(scheduling(4, apart=True, steps=20))


def test_a_scheduler_that_steps_once_per_rank_is_found_in_a_long_run() -> None:
    found = findings(scheduling(4, apart=False, steps=5000, dense=200))
    assert "20000 times in 5000" in found["scheduler_steps_per_rank"].evidence
    assert findings(scheduling(1, apart=False, steps=5000, dense=200)) == {}
