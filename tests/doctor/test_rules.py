"""Rules on journals of runs that never ran: what each says, and when it stays silent."""

from typing import Any

import pytest
from doctor.journals import OWN, SAME, findings, run_of, run_with_steps, step, window

from ddp_doctor.equation import combination, equation
from ddp_doctor.findings import CATALOG
from ddp_doctor.merged import Run
from ddp_doctor.places import operand
from ddp_doctor.rules.loss import partial_window_divided_by_k, scale


@pytest.mark.parametrize(
    ("text", "left", "factor"),
    [
        ("loss * world_size", False, "world_size"),
        ("world_size * loss", True, "world_size"),
        ("0.5 * loss", True, "0.5"),
        ("total / (k * w)", False, "k * w"),
        ("loss.mul(w)", False, "w"),
        ("loss /= steps", False, "steps"),
        ("backward(", False, "backward("),
    ],
)
def test_the_factor_is_the_side_that_is_not_the_loss(text: str, left: bool, factor: str) -> None:
    assert operand(text, left) == factor


def test_a_correct_run_has_no_finding_at_all() -> None:
    assert findings(run_with_steps([step(), step(), step()])) == {}


@pytest.mark.parametrize(("grads", "severity"), [(True, "note"), (False, "error")])
def test_no_sync_with_a_static_graph_is_an_error_only_if_gradients_differ(
    grads: bool, severity: str
) -> None:
    wrapper = {
        "kind": "wrapper", "index": 0, "type": "DDP", "module": "Net", "world": 2, "of": 2,
        "find_unused": False, "static_graph": True, "broadcast_buffers": True, "bucket_cap": None,
        "bytes": 8, "parameters": 2, "place": "train.py:3",
    }  # fmt: skip
    forward = [{"wrapper": 0, "sync": False, "place": "train.py:7"}]
    windows = [window([4], [1.0], SAME if grads else mine, mine, forwards=forward) for mine in OWN]
    found = findings(run_of(windows, every=[wrapper]))
    assert found["static_graph_with_no_sync"].severity == severity


@pytest.mark.parametrize(
    ("prepared", "retained", "code"),
    [
        ((True, None), (True, False), "two_backwards"),
        ((True, None), (False, False), "wrapper_bypassed"),
        ((None, None), (True, False), "wrapper_bypassed"),
    ],
)
def test_a_backward_without_a_forward_of_its_own_is_the_second_of_a_forward_or_bypasses_the_wrapper(
    prepared: tuple[bool | None, ...], retained: tuple[bool, ...], code: str
) -> None:
    wrapper = {
        "kind": "wrapper", "index": 0, "static_graph": False, "bytes": 8, "place": "train.py:3",
        "type": "DistributedDataParallel", "module": "Linear", "world": 2, "of": 2, "parameters": 2,
        "find_unused": False, "broadcast_buffers": True, "init_sync": True, "bucket_cap": None,
    }  # fmt: skip
    windows = []
    for mine in OWN:
        one = window([4, 4], [0.5, 0.5], mine, mine)
        for backward, was, kept in zip(one["backwards"], prepared, retained, strict=True):
            backward |= {"prepared": {"0": was}, "retained": kept}
        windows.append(one)
    found = findings(run_of(windows, every=[wrapper]))
    assert {"two_backwards", "wrapper_bypassed"} & set(found) == {code}


def short(count: int, of: int) -> list[dict[str, Any]]:
    return [window([4] * count, [1 / of] * count, SAME, mine) for mine in OWN]


def test_a_short_last_window_is_a_warning_and_two_halves_of_one_window_are_a_note() -> None:
    run = run_with_steps([short(4, 4), short(4, 4), short(3, 4)])
    assert findings(run)["partial_window_divided_by_k"].severity == "warning"
    run = run_with_steps([short(4, 4), short(4, 4), short(3, 4), short(1, 4)])
    assert findings(run)["partial_window_divided_by_k"].severity == "note"


def test_a_short_window_is_no_factor_of_the_world_size() -> None:
    """Half of a window on two ranks sums to 1/2, as a loss divided by W would."""
    division = {
        "op": "/", "value": 2.0, "text": "loss / n", "meaning": "dist.get_world_size()",
        "place": "train.py:7",
    }  # fmt: skip
    halves = [[{**one, "scaling": [division]} for one in short(count, 2)] for count in (2, 2, 1, 1)]
    run = run_with_steps(halves)
    assert list(scale(run, equation(run))) == []
    assert [each.severity for each in partial_window_divided_by_k(run, equation(run))] == ["note"]


def test_averaging_parameters_explains_gradients_and_replicas_that_differ() -> None:
    """Local SGD between two averages looks like a wrapper that is never called."""
    windows = [
        window(
            [4], [1.0], mine, mine,
            after={"parameters": {"weight": rank}, "values": {"weight": 1.0 + rank}, "buffers": {}},
        )
        for rank, mine in enumerate(OWN)
    ]  # fmt: skip
    start = {"kind": "start", "parameters": {"weight": 7}, "values": {}, "buffers": {}}
    assert {"wrapper_lost", "replicas_drift"} & set(findings(run_of(windows, every=[start])))
    average = {"kind": "average", "n": 12, "place": "train.py:30"}
    assert findings(run_of(windows, every=[start, average])) == {}


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


def test_a_division_in_every_step_is_part_of_the_gradient() -> None:
    divided = run_with_steps([rescaled_step(0.5)] * 3)
    assert set(findings(divided)) == {"scaled_by_world_size"}
    unscaled = run_with_steps(
        [rescaled_step(1 / 1024, share=1024.0)] * 3
    )  # a loss scale of one's own
    assert equation(unscaled).right
    assert findings(unscaled) == {}


def test_an_all_reduce_after_backward_is_no_rescaling() -> None:
    windows = [window([4], [1.0], SAME, mine, left=mine) for mine in OWN]
    assert combination(run_of(windows).complete[0]).factor == pytest.approx(0.5)


def test_shards_scaled_by_factors_of_their_own_are_a_local_clip() -> None:
    def sharded(*factors: float) -> list[dict[str, Any]]:
        return step(sharded=True, norm=tuple([3.0, 3.0 * each] for each in factors))

    assert "clipped_local_shards" in findings(run_of(sharded(0.2, 0.3)))
    assert findings(run_of(sharded(0.2, 0.2))) == {}


def test_random_numbers_are_the_same_only_if_some_are_drawn() -> None:
    def steps(*states: int, other: int = 0) -> Run:
        return run_with_steps([step(random=([each], [each + other])) for each in states])

    assert "same_random_numbers" in findings(steps(1, 2, 3))
    assert findings(steps(1, 1, 1)) == {}  # nothing is drawn between the steps
    assert findings(steps(1, 2, 3, other=10)) == {}  # each rank has a seed of its own
    dropout = run_with_steps([step(random=[5], modules={"dropout": 1})] * 2)
    assert "one mask instead of 2" in findings(dropout)["same_random_numbers"].evidence


def logging_step(readers: tuple[int, ...], losses: tuple[float, float], **more: Any) -> Any:
    windows = step(
        reads=tuple(
            [[each, "train.py:12"]] if r in readers else [] for r, each in enumerate(losses)
        ),
        **more,
    )
    for one, loss in zip(windows, losses, strict=True):
        one["backwards"][0]["values"] = [loss]
    return windows


def test_a_loss_that_only_rank_0_reads_is_noted_unless_it_is_averaged() -> None:
    run = run_with_steps([logging_step((0,), (2.0, 3.0))] * 2)
    noted = findings(run)["logged_value_is_local"]
    assert noted.severity == "note"
    assert noted.where == "train.py:12"
    assert "Only rank 0 reads" in noted.evidence
    assert "rank 0: 2, rank 1: 3" in noted.evidence
    reduced = [
        {
            "op": "all_reduce",
            "what": "other",
            "numel": 1,
            "place": "train.py:11",
            "backwards": {"0": 1},
        }
    ]
    assert findings(run_with_steps([logging_step((0,), (2.0, 3.0), collectives=reduced)] * 2)) == {}
    equal = findings(run_with_steps([logging_step((0,), (2.0, 2.0))] * 2))
    assert "logged_value_is_local" not in equal
    assert findings(run_with_steps([logging_step((), (2.0, 3.0))] * 2)) == {}


def contrastive_step(square: list[int], shape: list[int], input_: list[int]) -> Any:
    gathered = {
        "op": "all_gather", "shape": shape, "numel": shape[0] * shape[1], "what": "activation",
        "through_autograd": False, "place": "train.py:5", "backwards": {},
    }  # fmt: skip
    windows = step(collectives=[gathered])
    for one in windows:
        one["backwards"][0]["terms"][0] |= {"square": square, "shape": input_}
    return windows


def test_gathered_columns_need_no_targets_in_order() -> None:
    """NT-Xent's positives are a permutation; its two views are gathered one after the other."""
    run = run_with_steps([contrastive_step([12, 24, 0], [6, 16], [12, 24])] * 2)
    assert "gather_without_gradient" in findings(run)


def test_scores_that_are_gathered_for_a_metric_are_no_contrastive_loss() -> None:
    run = run_with_steps([contrastive_step([5, 10, 0], [5, 10], [5, 10])] * 2)
    assert findings(run) == {}


def test_every_code_has_a_rule_that_can_report_it() -> None:
    import inspect

    from ddp_doctor import rules

    source = "".join(
        inspect.getsource(getattr(rules, family))
        for family in ("cost", "data", "hangs", "loss", "replicas", "synchronization", "wrapper")
    )
    assert [code for code in CATALOG if f'"{code}"' not in source] == []


def test_steps_that_each_process_took_alone_are_not_steps_of_the_group() -> None:
    """Two Trainers in one script: the first one trains in every process before the ranks join."""
    alone = [window([4], [1.0], mine, mine, world=1) for mine in OWN]
    together = [{**one, "world": 2} for one in step()]
    run = run_with_steps([alone, together, together])
    assert [each.n for each in run.windows] == [1, 2]
    assert findings(run) == {}
