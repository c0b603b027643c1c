"""What is printed of results: equal up to rounding, and different for everything else."""

import numpy as np
import pytest

from grader.outputs import are_same, observation, text_of

KEY = [
    {"a": np.array([1.0, 2.0], "float32"), "b": None, "count": 3, "said": "as asked"},
    {"a": np.array([3.0, 0.5], "float32"), "b": None, "count": 3, "said": "as asked"},
]


def changed(rank, **values):
    return [own | values if rank == n else own for n, own in enumerate(KEY)]


def test_another_order_of_addition_prints_the_same_even_at_the_edge_of_a_digit():
    edge = [{"x": np.array([0.12345], "float64"), "n": 0.123455}]
    for off in (1e-9, -1e-9):
        moved = [{"x": edge[0]["x"] * (1 + off), "n": edge[0]["n"] * (1 + off)}]
        assert text_of(moved, edge, 1e-4) == text_of(edge, None, 1e-4)
        assert observation(moved, edge, 1e-4) == ""


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"a": np.array([3.0, 6.0], "float32")}, "but is 3 times the right one."),
        ({"a": np.array([0.0, 0.0], "float32")}, "is all zeros."),
        ({"a": np.array([np.nan, 2.0], "float32")}, "not finite."),
        ({"a": np.array([2.0, 1.0], "float32")}, "has another direction (cosine 0.800)"),
        ({"a": np.array([1.0, 2.001], "float32")}, "a has "),
        ({"a": np.array([[1.0, 2.0]], "float32")}, "has the shape 1×2; 2 is right."),
        ({"a": None}, "a is None or missing."),
        ({"b": np.zeros(2)}, "b should be None."),
        ({"count": 4}, "count is 4; 3 is right."),
        ({"count": 3.0}, "count is 3.0; 3 is right."),
        ({"count": True}, "count is True; 3 is right."),
        ({"said": "sent nothing."}, "Rank {} sent nothing."),
        ({"more": 1}, "returned more, which is too much."),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_every_other_difference_is_printed_and_said_on_every_rank(rank, values, said):
    results = changed(rank, **values)
    assert not are_same(results, KEY, 1e-4)
    found = observation(results, KEY, 1e-4)
    assert f"ank {rank}" in found
    if rank == 0 or "a" not in values or values["a"] is None:
        assert said.format(rank) in found


def test_of_several_differences_the_largest_is_said():
    """Gradients that are divided by the length of all: one wrong one changes the others a bit."""
    key = [{"right": np.array([0.60, 0.0]), "wrong": np.array([0.8, 0.0])}]
    own = [{"right": np.array([0.61, 0.0]), "wrong": np.array([0.4, 0.0])}]
    assert "wrong has the right direction, but is 0.5 times" in observation(own, key, 1e-4)


def test_rounding_of_a_small_gradient_is_measured_by_the_large_one_beside_it():
    key = [{"large": np.array([1.0]), "small": np.array([1e-3])}]
    assert are_same([{"large": np.array([1.0]), "small": np.array([1e-3 + 5e-5])}], key, 1e-4)
    assert not are_same([{"large": np.array([1.0]), "small": np.array([1e-3 + 5e-4])}], key, 1e-4)


def test_results_of_another_form_never_print_the_same():
    for other in ([], KEY[:1], [*KEY, KEY[0]], [3, "x"], [None, [[]]]):
        assert not are_same(other, KEY, 1e-4)
