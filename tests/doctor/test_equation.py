"""P0 and factors: what the optimizer got of what the ranks computed, and what is seen of losses."""

import pytest
import torch
from doctor.journals import (
    fact,
    findings,
    first_step,
    kinds,
    lines,
    numbers,
    run_of,
    run_with_steps,
    window,
)
from hypothesis import given
from hypothesis import strategies as st

from ddp_doctor.facts.types import CollectiveFact, ScalingFact, WindowFact

counts = st.integers(1, 4096)


def gradients(world: int, factor: float) -> tuple[dict[str, float], list[dict[str, float]]]:
    """What every rank holds, and what each rank's hooks saw before."""
    local = [{"weight": 1.5 + rank, "bias": -0.25 * rank - 1} for rank in range(world)]
    combined = {name: factor * sum(each[name] for each in local) for name in ("weight", "bias")}
    return combined, local


def codes(windows: list[dict[str, object]]) -> set[str]:
    return {code for code, one in findings(run_of(windows)).items() if one.severity != "note"}


@given(st.lists(counts, min_size=2, max_size=6), st.sampled_from([1.0, -1.0]))
def test_means_over_other_counts_predict_the_ranks_shares(sizes: list[int], sign: float) -> None:
    """Also of a loss that is minus a mean."""
    world = len(sizes)
    combined, local = gradients(world, 1 / world)
    windows = [window([n], [sign], combined, mine) for n, mine in zip(sizes, local, strict=True)]
    found = findings(run_of(windows)).get("unequal_denominators")
    if max(sizes) > min(sizes) * 1.02:
        assert found is not None
        assert found.severity == "hint"
        assert found.predicts is not None
        assert found.predicts.shares == pytest.approx([n / sum(sizes) for n in sizes])
    if max(sizes) == min(sizes):
        assert found is None


@given(st.lists(counts, min_size=2, max_size=6))
def test_a_sum_times_w_over_the_global_count_is_right_for_all_counts(sizes: list[int]) -> None:
    world, total = len(sizes), sum(sizes)
    combined, local = gradients(world, 1 / world)
    windows = [
        window([n], [world * n / total], combined, mine)
        for n, mine in zip(sizes, local, strict=True)
    ]
    assert codes(windows) == set()


@pytest.mark.parametrize(
    ("factor", "kind", "said"),
    [
        (1 / 3, "averaged", "the average of what the 3 ranks computed"),
        (1.0, "summed", "the sum of what the 3 ranks computed, and not their average"),
        (0.2, "scaled", "times 0.2"),
    ],
)
def test_the_factor_of_the_combination_is_measured(factor: float, kind: str, said: str) -> None:
    combined, local = gradients(3, factor)
    run = run_of([window([4], [1.0], combined, mine) for mine in local])
    assert first_step(run).combination.factor == pytest.approx(factor)
    assert kinds(run) == [kind]
    assert said in lines(run)["gradients"]


def test_gradients_that_an_all_reduce_inside_of_backward_has_made_equal_have_no_known_factor() -> (
    None
):
    """Whether it was a sum or an average: what each rank computed before was not seen."""
    combined, _ = gradients(2, 1.0)
    call = fact(CollectiveFact, op="all_reduce", through_autograd=True, in_backward=True, place="a")
    windows = [window([4], [1.0], combined, combined, collectives=[call]) for _ in range(2)]
    run = run_of(windows)
    assert kinds(run) == ["in backward"]
    assert "gradients" not in lines(run)


def test_one_gradient_of_several_that_is_not_combined_is_counted() -> None:
    combined, local = gradients(2, 0.5)
    windows = [window([4], [1.0], combined | {"scale": mine["bias"]}, mine) for mine in local]
    said = lines(run_of(windows))["gradients"]
    assert said.startswith("the average of what the 2 ranks computed; of 1 others, first scale")


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
    assert kinds(run) == ["no multiple"]
    assert "no multiple of the sum" in lines(run)["gradients"]


def test_a_mean_of_gradients_that_each_rank_has_clipped_is_no_multiple_of_their_sum() -> None:
    """One parameter is by far the largest, as in most models: its own numbers have to tell."""
    gen = torch.Generator().manual_seed(0)
    seen = []
    for _ in range(40):
        whole = torch.randn(2, 64, generator=gen) * torch.tensor([[1.0], [3.0]])
        whole[:, 60:] /= 50
        clipped = (whole / whole.norm(dim=1, keepdim=True)).mean(0)
        combined, *local = (
            {"weight": numbers(one[:60]), "bias": numbers(one[60:])} for one in (clipped, *whole)
        )
        seen += kinds(run_of([window([4], [1.0], combined, mine) for mine in local]))
    assert seen == ["no multiple"] * 40


@pytest.mark.parametrize(("final", "kind"), [(1.25, "averaged"), (2.5, "summed"), (3.0, "unknown")])
def test_the_one_number_of_a_single_parameter_fits_any_factor_and_shows_none(
    final: float, kind: str
) -> None:
    local = [{"weight": [1.0]}, {"weight": [1.5]}]
    run = run_of([window([4], [1.0], {"weight": [final]}, mine) for mine in local])
    assert kinds(run) == [kind]
    assert "times" not in lines(run).get("gradients", "")


@given(st.integers(2, 9), st.integers(2, 5))
def test_k_undivided_means_are_named_whatever_the_world_size(k: int, world: int) -> None:
    combined, local = gradients(world, 1 / world)
    windows = [window([4] * k, [1.0] * k, combined, mine) for mine in local]
    assert codes(windows) == {"loss_not_divided_by_accumulation"}
    assert codes([window([4] * k, [1.0 / k] * k, combined, mine) for mine in local]) == set()
    for one in windows:  # the unit of a sum is not known: an element may be no item
        for backward in one["backwards"]:
            backward["terms"][0] |= {"reduction": "sum", "factor": 1 / 4}
    assert codes(windows) == set()


def test_summed_gradients_of_means_are_w_times_too_large_and_of_divided_means_are_right() -> None:
    combined, local = gradients(2, 1.0)
    assert codes([window([4], [1.0], combined, m) for m in local]) == {"own_reduction_sums"}
    assert codes([window([4], [0.5], combined, m) for m in local]) == set()
    assert codes([window([4], [0.25], combined, m) for m in local]) == set()  # half a square


def test_a_coefficient_that_the_code_writes_as_a_number_is_no_world_size() -> None:
    combined, local = gradients(2, 0.5)
    half = fact(ScalingFact, op="*", value=0.5, text="0.5 * loss", operand="0.5")
    world = fact(ScalingFact, op="/", value=2.0, text="loss / world", operand="world")
    for scaling, expected in ((half, set()), (world, {"scaled_by_world_size"})):
        windows = [window([4], [0.5], combined, m, scaling=[scaling]) for m in local]
        assert codes(windows) == expected


def of_all(divisor: float, *sizes: int, factor: float = 1.0) -> set[str]:
    """A sum over a rank's items, divided by a count that an all-reduce has summed."""
    combined, local = gradients(2, 0.5)
    by = fact(ScalingFact, op="/", value=divisor, text="loss / norm", operand="norm", place="a:1")
    windows = []
    for n, mine in zip(sizes, local, strict=True):
        one = window([n], [factor / divisor], combined, mine, scaling=[by])
        term = one["backwards"][0]["terms"][0]
        term |= {"reduction": "sum", "count": n, "rows": n}
        windows.append(one)
    return codes(windows)


def test_a_sum_divided_by_the_count_of_all_ranks_is_divided_twice_if_it_is_averaged() -> None:
    assert of_all(12, 4, 8) == {"missing_world_size_factor"}
    assert of_all(6, 4, 8) == set()  # the mean of the ranks' counts
    assert of_all(8, 8, 8) == set()  # a rank's own count
    assert of_all(12, 4, 8, factor=2.0) == set()  # an all-reduce that carries gradient


def test_a_rank_may_divide_by_a_count_of_its_own_that_includes_more_than_the_loss_does() -> None:
    """Such as the label that a shift drops."""
    combined, local = gradients(2, 0.5)
    windows = []
    for n, mine in zip((4, 8), local, strict=True):
        by = fact(ScalingFact, op="/", value=n + 1.0, text="loss / n", operand="n", place="a:1")
        windows.append(window([n], [n / (n + 1)], combined, mine, scaling=[by]))
    assert codes(windows) == {"unequal_denominators"}


def test_a_sum_divided_by_a_ranks_own_count_of_the_step_is_right_though_a_pass_has_as_many() -> (
    None
):
    combined, local = gradients(2, 0.5)
    by = fact(ScalingFact, op="/", value=8.0, text="loss / SIZE", operand="SIZE", place="a:1")
    windows = [window([4, 4], [1 / 8] * 2, combined, mine, scaling=[by]) for mine in local]
    for one in windows:
        for backward in one["backwards"]:
            backward["terms"][0] |= {"reduction": "sum", "count": 4, "rows": 4}
    assert codes(windows) == set()


def test_shares_are_predicted_of_the_first_step_which_a_certificate_measures() -> None:
    combined, local = gradients(2, 0.5)

    def step(*sizes: int) -> list[WindowFact]:
        return [window([n], [1.0], combined, m) for n, m in zip(sizes, local, strict=True)]

    predicts = findings(run_with_steps([step(4, 5), step(1, 9)]))["unequal_denominators"].predicts
    assert predicts is not None
    assert predicts.shares == pytest.approx([4 / 9, 5 / 9])
    predicts = findings(run_with_steps([step(4, 4), step(1, 9)]))["unequal_denominators"].predicts
    assert predicts is not None
    assert predicts.outside == "later steps"
