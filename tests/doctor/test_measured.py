"""An error is measured, a hint predicts, a certificate answers, and what was not measured is said.

Most cases are what public reports have shown: a right script that looks wrong, and a wrong one.
"""

from typing import Any

import pytest
from doctor.journals import (
    OWN,
    SAME,
    fact,
    findings,
    projections,
    run_of,
    run_with_steps,
    step,
    window,
)
from doctor.test_intended import scaled_by

from ddp_doctor.explain.answers import with_answers
from ddp_doctor.explain.findings import RULES, Prediction, finding
from ddp_doctor.explain.observed import observed
from ddp_doctor.explain.rules import examine
from ddp_doctor.explain.steps import steps_of
from ddp_doctor.facts.certificate import Certificate, Property
from ddp_doctor.facts.merged import Run
from ddp_doctor.facts.types import (
    CollectiveFact,
    EndFact,
    FailedFact,
    ReplicaFact,
    SamplerFact,
    ScaleFact,
    SnapshotFact,
    StartFact,
    WrapperFact,
)
from ddp_doctor.observe.data import _content
from ddp_doctor.report.report import Report


def report_of(run: Run, certificate: Certificate | None = None) -> Report:
    steps = steps_of(run)
    found = examine(run, steps)
    found = found if certificate is None else with_answers(certificate, found)
    return Report(run, observed(run, steps), found, certificate)


def test_what_was_not_checked_or_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    (last,) = report_of(run_with_steps([step()])).conclusion
    assert "whether each rank's loss is divided by the right number" in last

    def broken(run: Run, steps: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setitem(RULES, "replicas_drift", broken)
    assert "rule broken failed" in report_of(run_with_steps([step()])).conclusion[0]
    monkeypatch.undo()
    without = run_with_steps([step()])
    del without.ranks[1]
    cut = run_with_steps([step()], end=[fact(EndFact, cut=True)])
    stopped = run_with_steps([step()], failed=[fact(FailedFact, error="KeyError")])
    inside = run_with_steps([step(combined_in_step="opt.py:3", snapshot=fact(SnapshotFact))])
    for run in (without, cut, stopped, inside):
        assert report_of(run).conclusion[0].startswith("Not everything was checked: ")
    assert "how the ranks are combined" in report_of(run_with_steps([step(sharded=True)])).as_text()


def certified(verdict: str, ratio: float, p3: str = "equal", **measured: Any) -> Certificate:
    properties = [Property("P1", verdict, "", ratio, 1.0), Property("P3", p3, "", ratio, 1.0)]
    return Certificate(verdict, "", properties=properties, **measured)


def answer(predicts: Prediction, certificate: Certificate) -> tuple[str, str]:
    """The first word of what a certificate says of a hint, and the severity that it gets."""
    hint = finding("scaled_by_world_size", "", "", "", predicts=predicts)
    (found,) = with_answers(certificate, [hint])
    return found.answer.split(":")[0], found.severity


def test_a_ratio_is_the_cause_only_if_just_that_was_measured() -> None:
    twice = Prediction("W", 2.0)
    assert answer(twice, certified("scaled", 2.004)) == ("measured", "error")
    assert answer(twice, certified("scaled", 2.05)) == ("contradicted", "note")
    assert answer(twice, certified("equal", 1.0)) == ("contradicted", "note")
    assert answer(twice, certified("not judged", 2.0, "scaled")) == ("measured", "error")
    assert answer(twice, certified("not judged", 2.0, "not judged"))[0] == "not decided"
    assert answer(twice, certified("scaled", 2.0, loss_is_a="sum"))[0] == "not decided"
    undivided = Prediction("W", 2.0, undivided=True)
    known = certified("not judged", 2.0, loss_is_a="sum")
    assert answer(undivided, known) == ("measured", "error")


def test_shares_are_the_cause_only_if_one_process_weighs_the_ranks_by_them() -> None:
    predicts = Prediction("", shares=(0.25, 0.75))
    assert answer(predicts, certified("different", 0.9, shares=(0.252, 0.748)))[0] == "measured"
    assert answer(predicts, certified("different", 0.9, shares=(0.4, 0.6)))[0] == "contradicted"
    assert answer(predicts, certified("equal", 1.0))[0] == "contradicted"
    assert answer(predicts, certified("different", 0.9))[0] == "not decided"


def test_the_number_of_micro_batches_is_said_to_be_outside() -> None:
    outside = Prediction("", 4.0, outside="the number of micro-batches")
    assert answer(outside, certified("equal", 1.0)) == (
        "outside of what --certify measures",
        "hint",
    )


def test_a_different_gradient_that_no_rule_explains_is_said_to_have_no_cause() -> None:
    run = run_with_steps([step()])
    assert "No rule names the cause." in report_of(run, certified("different", 0.9)).conclusion
    assert "whether each rank's loss" not in report_of(run, certified("equal", 1.0)).as_text()


def test_a_factor_that_is_only_recognized_is_a_hint() -> None:
    """It names the line, also in a run that no certificate can measure."""
    half = [window([4], [0.5], SAME, mine, scaling=[scaled_by("/", 2, "world")]) for mine in OWN]
    (hint,) = findings(run_with_steps([half])).values()
    assert (hint.code, hint.severity) == ("scaled_by_world_size", "hint")
    assert hint.where == "train.py:8"
    assert hint.predicts is not None
    assert hint.predicts.ratio == 0.5


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


def test_losses_of_which_ranks_have_other_numbers_are_not_weighed_by_one_of_them() -> None:
    """Each policy has a loss that is divided by its own count; one rank trains both."""
    windows = step()
    windows[0]["backwards"][0]["terms"] *= 2
    for one in windows:
        one["snapshot"] |= {
            "grads": projections({"weight": 3.0, "bias": -4.0})
        }  # the sum over the ranks
    assert findings(run_with_steps([windows] * 2)) == {}


@pytest.mark.parametrize(("off", "severity"), [(1e-9, "note"), (1e-3, "error")])
def test_replicas_that_start_apart_by_rounding_are_a_note(off: float, severity: str) -> None:
    """A step that adds and subtracts a number, as SAM does, leaves the last bit."""
    run = run_with_steps([step(after=fact(ReplicaFact))] * 2)
    for rank in run.ranks:
        start = fact(StartFact, parameters={"weight": rank.rank + 1, "bias": rank.rank + 1})
        start["values"] = {"weight": 1.0 + off * rank.rank, "bias": 2.0 + off * rank.rank}
        rank.facts["start"] = [start]
    assert findings(run)["replicas_differ_at_start"].severity == severity


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


def test_loss_scales_that_differ_are_the_cause_and_the_optimizers_do_not_get_the_average() -> None:
    held = [fact(ReplicaFact, parameters={"weight": n}, values={"weight": n}) for n in (5, 6)]
    reports = {}
    for scale in (1024.0, 65536.0):
        run = run_with_steps([step(after=tuple(held))])
        for rank, its in zip(run.ranks, (1024.0, scale), strict=True):
            rank.facts["start"] = [fact(StartFact, parameters={"weight": 1})]
            rank.facts["scale"] = [fact(ScaleFact, n=0, scale=its)]
        reports[scale] = report_of(run)
    assert [found.code for found in reports[1024.0].findings] == ["replicas_drift"]
    assert "own loss scale" not in reports[1024.0].observed.lines[0].text
    assert [found.code for found in reports[65536.0].findings] == ["scaler_scales_differ"]
    assert "own loss scale" in reports[65536.0].observed.lines[0].text
