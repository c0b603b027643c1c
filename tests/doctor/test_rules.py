"""Rules on journals of runs that never ran: what each says, and when it stays silent."""

from typing import Any

from doctor.journals import (
    OWN,
    SAME,
    fact,
    findings,
    journal_of,
    kinds,
    lines,
    projections,
    run_with_steps,
    step,
    window,
)

from ddp_doctor.explain.findings import CATALOG, RULES
from ddp_doctor.explain.rules import explanation_of
from ddp_doctor.facts.journal import Status
from ddp_doctor.facts.merged import Run
from ddp_doctor.facts.types import CollectiveFact, ProcessFact, ReplicaFact, StartFact


def rescaled_step(factor: float, share: float = 1.0) -> list[dict[str, Any]]:
    """The script multiplies what backward left, `SAME`, by a factor before the update."""
    after = {name: factor * value for name, value in SAME.items()}
    windows = [window([4], [share], after, mine, left=projections(SAME)) for mine in OWN]
    for rank, one in enumerate(windows):
        one["backwards"][0]["values"] = [1.0 + rank]
    return windows


def test_a_clip_written_by_hand_is_not_part_of_what_combines_the_ranks() -> None:
    run = run_with_steps([rescaled_step(factor) for factor in (0.5, 0.031, 0.25)])
    assert kinds(run) == ["averaged"] * 3
    assert "scaled by another factor in each step" in lines(run)["gradients"]
    assert findings(run) == {}


def test_a_division_in_every_step_is_part_of_the_gradient() -> None:
    divided = run_with_steps([rescaled_step(0.5)] * 3)
    assert set(findings(divided)) == {"scaled_by_world_size"}
    unscaled = run_with_steps([rescaled_step(1 / 1024, share=1024.0)] * 3)  # an own loss scale
    assert findings(unscaled) == {}


def test_an_all_reduce_of_equal_gradients_is_no_clip() -> None:
    """The data are the same on all ranks, and the all-reduce ends after backward in some steps."""
    call = fact(CollectiveFact, op="all_reduce", what="gradient", numel=2, backwards={"0": 0})
    local = {name: value / 2 for name, value in SAME.items()}
    run = run_with_steps(
        [[window([4], [1.0], SAME, SAME, left=projections(left), collectives=[call]) for _ in OWN]
        for left in (local, SAME, local)]
    )  # fmt: skip
    assert kinds(run) == ["averaged"] * 3


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


def test_steps_that_each_process_took_alone_are_not_steps_of_the_group() -> None:
    """Two Trainers in one script: the first one trains in every process before the ranks join."""
    alone = [window([4], [1.0], mine, mine, world=1) for mine in OWN]
    together = [{**one, "world": 2} for one in step()]
    run = run_with_steps([alone, together, together])
    assert [each.n for each in run.windows] == [1, 2]
    assert findings(run) == {}


def test_a_process_that_a_rank_starts_is_not_taken_for_the_rank() -> None:
    """It inherits the rank's variables, and steps an optimizer of its own, alone and later."""
    now = Status(0.0, 1, True, "ended")
    ranks = [journal_of(rank, 2, now, window=[one]) for rank, one in enumerate(step())]
    process = fact(ProcessFact, started=9.0, environment={"RANK": "0"})
    started = journal_of(0, 2, now, process=[process], group=[], window=step()[:1])
    run = Run.of([*ranks, started])
    assert [(rank.rank, rank.world) for rank in run.ranks] == [(0, 2), (1, 2)]
    assert run.world == 2


def test_what_zero_grad_clears_and_what_it_leaves_is_said() -> None:
    assert "backwards" not in lines(run_with_steps([step()] * 2))
    cleared = lines(run_with_steps([step(cleared=(3, 2)), step()]))["backwards"]
    assert "in 1 of 2 observed steps, zero_grad cleared what 3 earlier backwards" in cleared
    kept = lines(run_with_steps([step(), step(leftover=4), step(leftover=4)]))["backwards"]
    assert "in 2 of 3 observed steps, the gradients of the step before were still there" in kept


def test_an_all_reduce_after_backward_is_early_only_for_an_optimizer_that_never_steps() -> None:
    loss = fact(CollectiveFact, op="all_reduce", what="activation", grad=True, numel=4)
    for ran, found in (({"0": 1, "1": 40}, True), ({"0": 2, "1": 1}, False)):
        call = {**loss, "backwards": ran}
        windows = [window([4, 4], [0.5, 0.5], SAME, mine, collectives=[call]) for mine in OWN]
        assert ("loss_reduced_before_backward" in findings(run_with_steps([windows]))) == found


def test_every_finding_is_explained_by_the_rule_that_raises_it() -> None:
    assert RULES.keys() == CATALOG.keys()
    for code, (_, title, page) in CATALOG.items():
        text = explanation_of(code)
        assert title in text
        assert page in text
    assert "Right if the gradients are combined in another way" in explanation_of(
        "wrapper_bypassed"
    )
