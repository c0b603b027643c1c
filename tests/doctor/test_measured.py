"""An error is measured, a hint is recognized, and what was not checked is said.

Most cases are what public reports have shown: a right script that looks wrong, and a wrong one.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from doctor.journals import (
    OWN,
    SAME,
    fact,
    findings,
    run_of,
    run_with_steps,
    step,
    window,
    with_backward,
)
from doctor.test_groups import data_and_tensor, sharded
from doctor.test_intended import scaled_by

from ddp_doctor.explain import rules
from ddp_doctor.explain.agreement import agreeing
from ddp_doctor.explain.equation import equation
from ddp_doctor.explain.rules import examine
from ddp_doctor.facts.certificate import Certificate, Property
from ddp_doctor.facts.merged import Run
from ddp_doctor.facts.types import (
    ClipFact,
    CollectiveFact,
    EndFact,
    FailedFact,
    FsdpFact,
    ReplicaFact,
    SamplerFact,
    SnapshotFact,
    StartFact,
    TermFact,
    WrapperFact,
)
from ddp_doctor.observe.data import _content
from ddp_doctor.observe.losses import _arrived, fact_of
from ddp_doctor.report.report import Report


def conclusion(run: Run) -> str:
    said = equation(run)
    return Report(run, said, examine(run, said)).conclusion


def test_all_is_well_only_if_all_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert conclusion(run_with_steps([step()])) == "No error and no warning."

    def broken(run: Run, equation: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(rules, "RULES", (broken,))
    assert "rule broken failed" in conclusion(run_with_steps([step()]))
    monkeypatch.setattr(rules, "RULES", ())
    without = run_with_steps([step()])
    del without.ranks[1]
    cut = run_with_steps([step()], end=[fact(EndFact, cut=True)])
    stopped = run_with_steps([step()], failed=[fact(FailedFact, error="KeyError")])
    inside = run_with_steps([step(combined_in_step="opt.py:3", snapshot=fact(SnapshotFact))])
    flat = run_with_steps([step(sharded=True)])
    for run in (without, cut, stopped, inside, flat):
        assert conclusion(run).startswith("Not everything was checked: ")
        assert "No error" not in conclusion(run)


def test_a_factor_that_is_only_recognized_is_a_hint() -> None:
    """It names the line, also in a run that no certificate can measure."""
    half = [window([4], [0.5], SAME, mine, scaling=[scaled_by("/", 2, "world")]) for mine in OWN]
    run = run_with_steps([half])
    (hint,) = findings(run).values()
    assert (hint.code, hint.severity) == ("scaled_by_world_size", "hint")
    assert hint.where == "train.py:8"
    assert conclusion(run).startswith("1 hint, not measured"), "not that all is well"


def test_a_rank_without_items_in_one_step_hides_no_missing_factor() -> None:
    def masked(*counts: int) -> list[Any]:
        shares = [count / sum(counts) for count in counts]
        return [
            window([count], [share], SAME, mine)
            for count, share, mine in zip(counts, shares, OWN, strict=True)
        ]

    steps = [masked(*counts) for counts in ((4, 8), (0, 6), (8, 4))]
    for windows in steps:
        for one in windows:
            one["backwards"][0]["terms"][0]["reduction"] = "none"
    assert "missing_world_size_factor" in findings(run_with_steps(steps))


def test_a_rank_without_items_that_counts_in_the_average_is_named() -> None:
    """It skips its batch, and adds zeros to the all-reduce."""
    run = run_with_steps([step()] * 3)
    assert findings(run) == {}
    run.ranks[1].windows[1]["backwards"] = []
    found = findings(run)["unequal_denominators"]
    assert (found.severity, "rank 1 has no items" in found.evidence) == ("hint", True)
    equal = Certificate("equal", "", properties=[Property("P1", "equal", "", 1.0, 1.0)])
    assert agreeing(equal, equation(run), [found])[1] == [found], "the first step does not show it"
    assert agreeing(equal, equation(run), [replace(found, later=False)])[1] == []
    for one in run.ranks[1].windows:  # a rank that never has a loss, as of a pipeline
        one["backwards"] = []
    assert findings(run) == {}


def test_each_loss_of_several_is_looked_at_for_counts_of_its_own() -> None:
    """In DETR, boxes are divided by the count of all ranks, and classes by each rank's own."""
    windows = []
    for count, mine in zip((2, 6), OWN, strict=True):
        one = window([count], [count / 8 * 10], SAME, mine)  # the larger part of the loss
        classes = window([count], [1.0], SAME, mine)["backwards"][0]["terms"]
        one["backwards"][0]["terms"] += [classes[0] | {"place": "train.py:4"}]
        windows.append(one)
    found = findings(run_with_steps([windows] * 2))["unequal_denominators"]
    assert found.where == "train.py:4"


def test_a_loss_of_all_rows_that_carries_ones_own_gradient_is_multiplied_by_the_ranks() -> None:
    gather = fact(CollectiveFact, op="all_gather", shape=[4, 2], numel=8, what="activation")
    times = scaled_by("*", 2.0, "world")

    def codes(*calls: Any) -> set[str]:
        windows = [
            window([4], [2.0], SAME, mine, scaling=[times], collectives=[*calls]) for mine in OWN
        ]
        return set(findings(run_with_steps([windows])))

    assert codes() == {"scaled_by_world_size"}
    assert codes(gather) == set()


def test_ranks_that_cut_one_batch_by_its_length_and_average_are_not_weighed() -> None:
    """Sequence parallelism under fully_shard: the same text, whether the trunk is right or not."""
    gather = fact(CollectiveFact, op="all_gather", shape=[4, 2], through_autograd=True)
    run = sharded(1, share=2.0)
    for rank in run.ranks:
        for one in rank.windows:
            one["collectives"] = [gather]
            for backward in one["backwards"]:
                backward["terms"][0] |= {"target": 3, "input": 1}
    assert run.readers == [[0, 1]]
    assert findings(run) == {}
    assert set(findings(sharded(1, share=2.0))) != set()  # ranks with data of their own


def test_losses_of_which_ranks_have_other_numbers_are_not_weighed_by_one_of_them() -> None:
    """Each policy has a loss that is divided by its own count; one rank trains both."""
    windows = step()
    windows[0]["backwards"][0]["terms"] *= 2
    for one in windows:
        one["snapshot"] |= {"grads": {"weight": 3.0, "bias": -4.0}}  # the sum over the ranks
    assert findings(run_with_steps([windows] * 2)) == {}


def test_a_mean_of_what_an_uneven_loss_has_become_is_not_divided_by_the_accumulation() -> None:
    """As of preferences: a token weighs by the margin of its pair, and a pair by 1 of a batch."""

    def found(share: float) -> bool:
        windows = []
        for mine in OWN:
            one = window([8, 8], [0.7, 0.2], SAME, mine)
            for backward in one["backwards"]:
                mean = backward["terms"][0] | {"function": "mean", "loss": False, "factor": share}
                backward["terms"][0] |= {"reduction": "none", "spread": [0.1, 0.4]}
                backward["terms"] += [mean | {"place": "train.py:9", "count": 4}]
            windows.append(one)
        return "loss_not_divided_by_accumulation" in findings(run_with_steps([windows] * 2))

    assert (found(1.0), found(0.5)) == (True, False)


def test_parts_of_a_gradient_that_are_summed_over_a_tensor_group_are_no_wrong_factor() -> None:
    """A norm that is applied to each rank's own heads has a part of its gradient on each."""
    run = data_and_tensor()
    for rank in run.ranks:
        rank.facts["start"][0]["parameters"]["head"] = 4
        for n, one in enumerate(rank.windows):
            batch, half = divmod(rank.rank, 2)
            one["snapshot"]["local"]["norm"] = (1.0 + 0.2 * half + batch) * (n + 1)
            one["snapshot"]["grads"]["norm"] = (2.2 + 1.0) * (n + 1)  # the average of two sums
            one["snapshot"]["hashes"]["norm"] = n
            one["snapshot"]["local"]["head"] = 1.0 + batch  # which each rank computes alike
            one["snapshot"]["grads"]["head"] = 1.5
            one["snapshot"]["hashes"]["head"] = 7
    assert findings(run) == {}
    for rank in run.ranks:  # half of the parts' sum: no other gradient is wrong
        for n, one in enumerate(rank.windows):
            one["snapshot"]["grads"] |= {"norm": 1.6 * (n + 1)}
    (wrong,) = findings(run).values()
    assert "norm: × 0.25" in wrong.evidence


def test_a_norm_that_drifts_between_ranks_of_one_batch_is_named() -> None:
    run = data_and_tensor()
    for rank in run.ranks:
        rank.facts["start"][0] |= {"constant": ["scale"], "values": {"scale": 8.0}}
        rank.facts["start"][0]["parameters"]["scale"] = 3  # the same bits
        for n, one in enumerate(rank.windows):
            one["after"] = fact(ReplicaFact, parameters={"scale": 10 * n + rank.rank % 2})
    assert "scale" in findings(run)["replicas_drift"].evidence


@pytest.mark.parametrize(("off", "severity"), [(1e-9, "note"), (1e-3, "error")])
def test_replicas_that_start_apart_by_rounding_are_a_note(off: float, severity: str) -> None:
    """A step that adds and subtracts a number, as SAM does, leaves the last bit."""
    run = run_with_steps([step(after=fact(ReplicaFact))] * 2)
    for rank in run.ranks:
        start = fact(StartFact, parameters={"weight": rank.rank + 1, "bias": rank.rank + 1})
        start["values"] = {"weight": 1.0 + off * rank.rank, "bias": 2.0 + off * rank.rank}
        rank.facts["start"] = [start]
    assert findings(run)["replicas_differ_at_start"].severity == severity


def test_replicas_of_local_steps_that_never_had_one_start_are_found() -> None:
    """Nothing is equal on two ranks, but all ranks average tensors like each parameter."""
    averages = fact(CollectiveFact, op="all_reduce", what="flat", numel=6)

    def apart(**more: Any) -> Run:
        windows = [window([4], [1.0], mine, mine, after=fact(ReplicaFact), **more) for mine in OWN]
        run = run_with_steps([windows] * 2)
        for rank in run.ranks:
            own = {"weight": rank.rank + 1.0, "bias": rank.rank + 1.0}
            held = {"weight": rank.rank + 1, "bias": rank.rank + 1}
            start = fact(
                StartFact, parameters=held, values=own, shapes={"weight": [3], "bias": [3]}
            )
            rank.facts["start"] = [start]
        return run

    assert "replicas_differ_at_start" in findings(apart(collectives=[averages]))
    assert "replicas_differ_at_start" not in findings(apart())  # models of their own


def tasks(labels: list[int], padded: bool = False, counts: list[int] | None = None) -> TermFact:
    """A loss per item of two tasks, with so many labels: each is divided by its own count."""
    rows = torch.arange(24)
    mask = torch.stack([rows < n if padded else rows % (24 // n) == 0 for n in labels], 1)
    term = fact(TermFact, function="bce", reduction="none", place="train.py:8", loss=True, rows=24)
    seen = {**term, "hit": False, "hits": 0.0}
    _arrived(seen, mask / torch.tensor(counts or labels) / 2)
    return fact_of(seen)


def test_columns_that_each_rank_divides_by_its_own_count_are_named() -> None:
    def found(first: TermFact, second: TermFact) -> Any:
        windows = step()
        for one, term in zip(windows, (first, second), strict=True):
            with_backward(one, terms=[term])
        return findings(run_with_steps([windows])).get("unequal_denominators")

    own = found(tasks([8, 6]), tasks([4, 6]))
    assert own.severity == "hint"
    assert own.where == "train.py:8"
    assert "column 0, rank 0 has 8, rank 1 has 4 items" in own.evidence
    assert "2.00 times" in own.evidence
    assert found(tasks([8, 6], counts=[6, 6]), tasks([4, 6], counts=[6, 6])) is None  # all ranks'
    assert found(tasks([8, 6]), tasks([8, 6])) is None
    # A column may be one sample, which counts as much as another, however long it is.
    assert found(tasks([8, 6], padded=True), tasks([4, 6], padded=True)) is None


def test_saved_buffers_that_differ_are_a_warning_with_the_step() -> None:
    def after(rank: int, n: int) -> ReplicaFact:
        buffers = {"steps": n, "running_mean": 7 + rank * (n >= 2), "codes": 5}
        return fact(ReplicaFact, parameters=dict.fromkeys(SAME, n), buffers=buffers)

    steps = [step(after=(after(0, n), after(1, n))) for n in range(4)]
    start = fact(StartFact, parameters={"weight": 1, "bias": 2})
    found = findings(run_with_steps(steps, start=[start]))["buffers_differ"]
    assert found.severity == "warning"
    assert "1 buffers differ between the ranks, first running_mean, since step 2." in found.evidence
    # The wrapper overwrites the statistics with rank 0's before each forward.
    wrapper = fact(WrapperFact, world=2, of=2, broadcast_buffers=True)
    assert "buffers_differ" not in findings(run_with_steps(steps, start=[start], wrapper=[wrapper]))


def test_parts_of_a_model_beside_norms_that_are_combined_are_no_replicas() -> None:
    """Ranks that split a sequence hold pieces of the layers, and sum the gradients of the norms."""
    shapes = {"norm": [8], "up": [16, 8], "down": [8, 16]}

    def reduced(*names: str) -> list[str]:
        calls = [
            fact(CollectiveFact, op="all_reduce", what="like a gradient", shape=shapes[name])
            for name in names
        ]
        windows = [window([4], [1.0], mine, mine, collectives=calls) for mine in OWN]
        run = run_with_steps([windows] * 2)
        for rank in run.ranks:
            held = {"norm": 5, "up": rank.rank + 1, "down": rank.rank + 1}
            values = {name: float(value) for name, value in held.items()}
            start = fact(StartFact, parameters=held, values=values, constant=["norm"])
            rank.facts["start"] = [{**start, "shapes": shapes}]
        found = findings(run)
        return [found[code].evidence for code in found if code == "replicas_differ_at_start"]

    assert reduced("norm") == []
    assert reduced("norm", "up") == []
    assert "2 of 3 parameters differ" in reduced("norm", "up", "down")[0]


def test_replicas_that_are_reduced_before_the_last_micro_batch_are_named_with_their_flag() -> None:
    def reduced(all_reduce: int) -> Run:
        scatters = [
            fact(FsdpFact, op="reduce_scatter_tensor", reduce="avg", backwards={"0": micro})
            for micro in range(2)
        ]
        last = fact(FsdpFact, op="all_reduce", reduce="avg", backwards={"0": all_reduce})
        windows = [window([4, 4], [0.5, 0.5], SAME, mine, fsdp=[*scatters, last]) for mine in OWN]
        return run_with_steps([windows] * 2)

    assert "last_micro_batch_unsynced" not in findings(reduced(1))
    assert "set_requires_all_reduce" in findings(reduced(0))["last_micro_batch_unsynced"].fix


def test_gradients_that_a_script_reduces_at_every_chunk_are_not_their_average() -> None:
    def reduced(*moments: int) -> Run:
        calls = [
            fact(CollectiveFact, op="all_reduce", what="gradient", name=name, backwards={"0": at})
            for at in moments
            for name in ("weight", "bias")
        ]
        weights = {"weight": 5.0, "bias": 1.0} if len(moments) > 1 else SAME
        windows = [window([4, 4], [0.5, 0.5], weights, mine, collectives=calls) for mine in OWN]
        return run_with_steps([windows] * 2)

    assert "other_than_average" not in findings(reduced(2))
    found = findings(reduced(1, 2))["other_than_average"]
    assert found.severity == "error"
    assert "weight is all-reduced 2 times" in found.evidence


def test_a_clip_of_gradients_that_carry_the_loss_scale_is_found() -> None:
    clip = fact(ClipFact, kind="norm", norm=3506.0, limit=1.0, scale=4096.0)
    halved = {name: value / 2 for name, value in SAME.items()}

    def found(**more: Any) -> bool:
        run = run_with_steps([step(clips=[clip], **more)])
        return "clipped_before_unscale" in findings(run)

    assert found(left=SAME)
    assert not found(left=halved)  # the script has divided them itself
    clip |= {"scale": 1.0}
    assert not found(left=SAME)


def test_samplers_with_other_seeds_on_the_ranks_are_found() -> None:
    def sampling(*seeds: int, shuffle: bool = True) -> set[str]:
        run = run_of(step())
        for rank, seed in zip(run.ranks, seeds, strict=True):
            rank.facts["sampler"] = [
                fact(SamplerFact, seed=seed, shuffle=shuffle, replicas=2, length=64)
            ]
        return set(findings(run))

    assert sampling(1, 2) == {"sampler_seeds_differ"}
    assert sampling(1, 1) == set()
    assert sampling(1, 2, shuffle=False) == set()


def test_the_order_of_samples_that_are_dictionaries_is_part_of_a_data_set() -> None:
    class Instructions:
        def __init__(self, rows: list[dict[str, Any]]) -> None:
            self.rows = rows

    rows = [{"prompt": f"add {at}", "ids": [at, at + 1]} for at in range(2000)]
    assert _content(Instructions(rows)) == _content(Instructions([*rows]))
    assert _content(Instructions(rows)) != _content(Instructions(rows[::-1]))
    assert _content(rows) != _content(rows[::-1])
