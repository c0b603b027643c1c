"""Rules on journals of runs that never ran: what each says, and when it stays silent."""

from typing import Any

from doctor.journals import OWN, SAME, fact, findings, run_with_steps, step, window

from ddp_doctor.explain.agreement import agreeing, explaining
from ddp_doctor.explain.equation import equation
from ddp_doctor.explain.findings import CATALOG, finding
from ddp_doctor.explain.rules import examine, explanation_of
from ddp_doctor.explain.rules.loss import scale
from ddp_doctor.explain.rules.micro_batches import partial_window_divided_by_k
from ddp_doctor.facts.certificate import Certificate, Property
from ddp_doctor.facts.merged import Run
from ddp_doctor.facts.types import CollectiveFact, ReplicaFact, ScalingFact, StartFact, WrapperFact


def short(count: int, of: int) -> list[dict[str, Any]]:
    return [window([4] * count, [1 / of] * count, SAME, mine) for mine in OWN]


def test_a_short_last_window_is_a_hint_and_two_halves_of_one_window_are_a_note() -> None:
    run = run_with_steps([short(4, 4), short(4, 4), short(3, 4)])
    assert findings(run)["partial_window_divided_by_k"].severity == "hint"
    run = run_with_steps([short(4, 4), short(4, 4), short(3, 4), short(1, 4)])
    assert findings(run)["partial_window_divided_by_k"].severity == "note"


def test_a_short_window_is_no_factor_of_the_world_size() -> None:
    """Half of a window on two ranks sums to 1/2, as a loss divided by W would."""
    division = fact(ScalingFact, op="/", value=2.0, text="loss / world", operand="world")
    halves = [[{**one, "scaling": [division]} for one in short(count, 2)] for count in (2, 2, 1, 1)]
    run = run_with_steps(halves)
    assert list(scale(run, equation(run))) == []
    assert [each.severity for each in partial_window_divided_by_k(run, equation(run))] == ["note"]


def test_steps_of_one_micro_batch_that_are_divided_by_the_accumulation_steps_are_a_hint() -> None:
    division = fact(ScalingFact, op="/", value=4.0, text="loss / accum", operand="accum")
    for scaling, severities in (([division], ["hint"]), ([], [])):
        run = run_with_steps([[{**one, "scaling": scaling} for one in short(1, 4)]] * 2)
        found = partial_window_divided_by_k(run, equation(run))
        assert [each.severity for each in found] == severities


def rescaled_step(factor: float, share: float = 1.0) -> list[dict[str, Any]]:
    """The script multiplies what backward left, `SAME`, by a factor before the update."""
    after = {name: factor * value for name, value in SAME.items()}
    windows = [window([4], [share], after, mine, left=SAME) for mine in OWN]
    for rank, one in enumerate(windows):
        one["backwards"][0]["values"] = [1.0 + rank]
    return windows


def test_a_clip_written_by_hand_is_not_part_of_what_combines_the_ranks() -> None:
    run = run_with_steps([rescaled_step(factor) for factor in (0.5, 0.031, 0.25)])
    found = equation(run)
    assert found.right
    assert [each.combination.kind for each in found.steps] == ["averaged"] * 3
    assert findings(run) == {}


def test_an_all_reduce_of_equal_gradients_is_no_clip() -> None:
    """The data are the same on all ranks, and the all-reduce ends after backward in some steps."""
    call = fact(CollectiveFact, op="all_reduce", what="gradient", numel=2, backwards={"0": 0})
    local = {name: value / 2 for name, value in SAME.items()}
    run = run_with_steps(
        [[window([4], [1.0], SAME, SAME, left=left, collectives=[call]) for _ in OWN]
        for left in (local, SAME, local)]
    )  # fmt: skip
    assert [each.combination.kind for each in equation(run).steps] == ["averaged"] * 3


def test_a_division_in_every_step_is_part_of_the_gradient() -> None:
    divided = run_with_steps([rescaled_step(0.5)] * 3)
    assert set(findings(divided)) == {"scaled_by_world_size"}
    unscaled = run_with_steps(
        [rescaled_step(1 / 1024, share=1024.0)] * 3
    )  # a loss scale of one's own
    assert equation(unscaled).right
    assert findings(unscaled) == {}


def test_random_numbers_are_the_same_only_if_some_are_drawn() -> None:
    def steps(*states: int, other: int = 0) -> Run:
        return run_with_steps([step(random=([each], [each + other])) for each in states])

    assert "same_random_numbers" in findings(steps(1, 2, 3))
    assert findings(steps(1, 1, 1)) == {}  # nothing is drawn between the steps
    assert findings(steps(1, 2, 3, other=10)) == {}  # each rank has a seed of its own
    dropout = run_with_steps([step(random=[5], dropout=1)] * 2)
    assert "one mask instead of 2" in findings(dropout)["same_random_numbers"].evidence


def test_scores_that_are_gathered_for_a_metric_are_no_contrastive_loss() -> None:
    gathered = fact(CollectiveFact, op="all_gather", shape=[5, 10], numel=50, what="activation")
    windows = step(collectives=[gathered])
    for one in windows:
        one["backwards"][0]["terms"][0] |= {"square": [5, 10, 0], "shape": [5, 10]}
    assert findings(run_with_steps([windows] * 2)) == {}


def test_replicas_of_a_second_optimizers_model_diverge_while_the_firsts_stay_equal() -> None:
    def stepped(optimizer: int, *differ: int) -> list[dict[str, Any]]:
        name = "GD"[optimizer]
        held = [fact(ReplicaFact, parameters={name: one}, values={name: one}) for one in differ]
        return step(optimizer=optimizer, after=tuple(held))

    run = run_with_steps([stepped(0, 5, 5), stepped(1, 5, 6)] * 2)
    for rank in run.ranks:
        rank.facts["start"] = [fact(StartFact, parameters={"G": 1, "D": 1})]
    assert "1 parameters differ between the ranks, first D" in (
        findings(run)["replicas_drift"].evidence
    )


def test_a_gather_that_keeps_its_own_ranks_gradient_is_named_and_one_that_sums_is_not() -> None:
    def codes(*more: CollectiveFact) -> dict[str, str]:
        calls = [gather, *more]
        windows = step(collectives=calls)
        for one in windows:
            one["backwards"][0]["terms"][0] |= {"square": [8, 8, 1], "shape": [8, 8]}
        return {code: one.severity for code, one in findings(run_with_steps([windows] * 2)).items()}

    gather = fact(CollectiveFact, op="all_gather", shape=[4, 2], numel=8, through_autograd=True)
    assert codes() == {"gather_without_gradient": "note"}
    assert codes(gather | {"op": "all_reduce", "in_backward": True}) == {}


def test_batches_are_uneven_only_if_a_loader_ended_and_not_if_a_rank_stopped_early() -> None:
    run = run_with_steps([step()], wrapper=[fact(WrapperFact, world=2, of=2)])
    for rank, backwards in zip(run.ranks, (6, 7), strict=True):
        rank.facts["totals"][0]["backwards"] = backwards
    error = {"type": "RuntimeError", "text": "Connection reset by peer", "place": "train.py:9"}
    run.ranks[1].facts["end"][0] |= {"error": error, "during": "backward at train.py:9"}
    assert set(findings(run)) == {"hang_missing_rank"}
    run.ranks[0].facts["loader_ended"] = [{"backwards": 6}]
    assert set(findings(run)) == {"hang_missing_rank", "uneven_batches"}


def test_steps_that_each_process_took_alone_are_not_steps_of_the_group() -> None:
    """Two Trainers in one script: the first one trains in every process before the ranks join."""
    alone = [window([4], [1.0], mine, mine, world=1) for mine in OWN]
    together = [{**one, "world": 2} for one in step()]
    run = run_with_steps([alone, together, together])
    assert [each.n for each in run.windows] == [1, 2]
    assert findings(run) == {}


def test_every_finding_is_explained_by_the_rule_that_raises_it() -> None:
    for code, (_, title, page) in CATALOG.items():
        text = explanation_of(code)
        assert title in text
        assert page in text
    assert "Right if the gradients are combined in another way" in explanation_of(
        "wrapper_bypassed"
    )


def measured(whole: str, ratio: float) -> Certificate:
    """A certificate with this verdict over all samples, and this ratio for copies of one batch."""
    copies = Property("P3", "equal" if ratio == 1 else "scaled", "", ratio, 1.0)
    return Certificate(whole, "", properties=[Property("P1", whole, "", ratio, 1.0), copies])


def test_what_contradicts_a_certificate_is_left_out_and_the_measured_factor_is_shown() -> None:
    unequal = [window([n], [1.0], SAME, mine) for n, mine in zip((2, 6), OWN, strict=True)]
    run = run_with_steps([unequal, unequal])
    said = equation(run)
    found = [one for one in examine(run, said) if one.code == "unequal_denominators"]
    assert [one.severity for one in found] == ["hint"]
    (explained_,) = explaining(measured("different", 1.0), found)  # what is measured has a cause
    assert explained_.severity == "error"
    assert explaining(measured("equal", 1.0), found) == found
    assert agreeing(measured("different", 1.0), said, found) == (said, found)
    other, left = agreeing(measured("scaled", 2.0), said, found)
    assert left == []
    assert other.lines[-1] == "measured  the gradient is 2 times that of one process"
    assert "sum_of_weights" not in other.as_json()
    lost = finding("gather_without_gradient", "", "", "")  # which may leave the direction alone
    assert agreeing(measured("scaled", 0.5), said, [lost])[1] == [lost]
    assert agreeing(measured("equal", 1.0), said, [lost])[1] == []
    elsewhere = Property("P3", "different", "", 1.3, 0.8)  # no factor repairs another direction
    assert agreeing(Certificate("different", "", properties=[elsewhere]), said, found)[0] == said
