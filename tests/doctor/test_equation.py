"""The equation: factors, counts, and the weight of each item."""

import pytest
from doctor.journals import fact, findings, run_of, window
from hypothesis import given
from hypothesis import strategies as st

from ddp_doctor.explain.combination import combination
from ddp_doctor.explain.equation import equation
from ddp_doctor.explain.rules import examine
from ddp_doctor.facts.types import CollectiveFact, ScalingFact

counts = st.integers(1, 4096)
gradient = st.floats(0.1, 10.0)


def gradients(world: int, factor: float) -> tuple[dict[str, float], list[dict[str, float]]]:
    """What every rank holds, and what each rank's hooks saw before."""
    local = [{"weight": 1.5 + rank, "bias": -0.25 * rank - 1} for rank in range(world)]
    combined = {name: factor * sum(each[name] for each in local) for name in ("weight", "bias")}
    return combined, local


def codes(windows: list[dict[str, object]]) -> set[str]:
    run = run_of(windows)
    return {each.code for each in examine(run, equation(run)) if each.severity != "note"}


@given(st.lists(counts, min_size=2, max_size=6))
def test_a_mean_on_every_rank_weighs_an_item_by_its_own_ranks_count(sizes: list[int]) -> None:
    world = len(sizes)
    combined, local = gradients(world, 1 / world)
    windows = [window([n], [1.0], combined, mine) for n, mine in zip(sizes, local, strict=True)]
    found = equation(run_of(windows))
    assert found.step is not None
    assert found.step.total == pytest.approx(1.0)
    for entry, weight in found.step.weights():
        assert weight == pytest.approx(sum(sizes) / world / entry.count)
    assert found.right == (max(sizes) <= min(sizes) * 1.01)
    if max(sizes) > min(sizes) * 1.02:
        assert codes(windows) == {"unequal_denominators"}
    if max(sizes) == min(sizes):
        assert codes(windows) == set()


def test_a_loss_that_is_minus_a_mean_is_weighed_like_a_mean() -> None:
    combined, local = gradients(2, 1 / 2)
    for sizes, wrong in (((4, 4), set()), ((4, 12), {"unequal_denominators"})):
        windows = [
            window([n], [-1.0], combined, mine) for n, mine in zip(sizes, local, strict=True)
        ]
        assert codes(windows) == wrong
        assert equation(run_of(windows)).right == (not wrong)


@given(st.lists(counts, min_size=2, max_size=6))
def test_a_sum_times_w_over_the_global_count_is_right_for_all_counts(sizes: list[int]) -> None:
    world, total = len(sizes), sum(sizes)
    combined, local = gradients(world, 1 / world)
    windows = [
        window([n], [world * n / total], combined, mine)
        for n, mine in zip(sizes, local, strict=True)
    ]
    assert equation(run_of(windows)).right
    assert codes(windows) == set()


@pytest.mark.parametrize(
    ("factor", "kind"), [(1 / 3, "averaged"), (1.0, "summed"), (0.2, "scaled")]
)
def test_the_factor_of_the_combination_is_measured(factor: float, kind: str) -> None:
    combined, local = gradients(3, factor)
    run = run_of([window([4], [1.0], combined, mine) for mine in local])
    found = combination(run.complete[0])
    assert found.kind == kind
    assert found.factor == pytest.approx(factor)


def test_items_with_weights_of_their_own_are_not_said_to_weigh_the_same() -> None:
    combined, local = gradients(2, 0.5)
    windows = [window([4], [1.0], combined, mine) for mine in local]
    assert equation(run_of(windows)).weights == ["weight    every item weighs 1/N"]
    for one in windows:
        one["backwards"][0]["terms"][0]["weighted"] = True
    assert "times the weight" in equation(run_of(windows)).weights[0]


def test_the_items_of_two_calls_of_one_loss_add_up_to_n() -> None:
    combined, local = gradients(2, 0.5)
    windows = [window([4], [1.0], combined, mine) for mine in local]
    for one in windows:
        one["backwards"][0]["terms"] *= 2
    assert equation(run_of(windows)).about[0].endswith("8 items = N = 16 items per step")


def test_a_rank_that_gets_the_weights_of_another_one_has_to_take_no_steps() -> None:
    combined, local = gradients(2, 0.5)
    sent = fact(CollectiveFact, op="broadcast", what="parameter")
    for collectives, found in (([], True), ([sent], False)):
        windows = [window([4], [1.0], combined, mine, collectives=collectives) for mine in local]
        run = run_of(windows)
        run.ranks[1].facts["totals"][0]["steps"] = {"0": 0}
        assert ("rank_skipped_step" in findings(run)) == found


def test_an_optimizer_that_steps_in_backward_with_reduced_gradients_is_no_mistake() -> None:
    combined, local = gradients(2, 1.0)
    for final, found in (([combined] * 2, False), (local, True)):
        windows = [
            window([4], [1.0], given, mine, stepped_in_backward="train.py:7")
            for given, mine in zip(final, local, strict=True)
        ]
        assert ("optimizer_in_backward" in codes(windows)) == found


def test_a_gradient_that_is_no_sum_of_the_local_ones_is_not_given_a_factor() -> None:
    _, local = gradients(2, 0.5)
    run = run_of([window([4], [1.0], {"weight": 3.0, "bias": 8.0}, mine) for mine in local])
    assert combination(run.complete[0]).kind == "unknown"


def test_gradients_that_differ_between_ranks_are_not_combined() -> None:
    _, local = gradients(2, 0.5)
    run = run_of([window([4], [1.0], mine, mine) for mine in local])
    assert combination(run.complete[0]).kind == "not combined"
    assert not equation(run).right


@given(st.integers(2, 9), st.integers(2, 5))
def test_k_undivided_micro_batches_are_named_whatever_the_world_size(k: int, world: int) -> None:
    combined, local = gradients(world, 1 / world)
    windows = [window([4] * k, [1.0] * k, combined, mine) for mine in local]
    assert codes(windows) == {"loss_not_divided_by_accumulation"}
    assert codes([window([4] * k, [1.0 / k] * k, combined, mine) for mine in local]) == set()


def test_summed_gradients_of_means_are_w_times_too_large_and_of_divided_means_are_right() -> None:
    combined, local = gradients(2, 1.0)
    assert codes([window([4], [1.0], combined, m) for m in local]) == {"own_reduction_sums"}
    assert codes([window([4], [0.5], combined, m) for m in local]) == set()


def test_a_coefficient_that_the_code_writes_as_a_number_is_no_world_size() -> None:
    combined, local = gradients(2, 0.5)
    half = fact(ScalingFact, op="*", value=0.5, text="0.5 * loss", operand="0.5")
    world = fact(ScalingFact, op="/", value=2.0, text="loss / world", operand="world")
    for scaling, expected in ((half, set()), (world, {"scaled_by_world_size"})):
        windows = [window([4], [0.5], combined, m, scaling=[scaling]) for m in local]
        assert codes(windows) == expected


@given(gradient, gradient)
def test_the_weights_do_not_depend_on_the_size_of_the_gradients(one: float, other: float) -> None:
    local = [{"weight": one}, {"weight": other}]
    combined = {"weight": (one + other) / 2}
    found = equation(run_of([window([2], [1.0], combined, mine) for mine in local]))
    assert found.right
