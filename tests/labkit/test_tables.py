"""Tables and differences, as they are compared character by character."""

import numpy as np
import pytest
import torch

from labkit.tables import bitwise_difference, bound, table


def test_a_table_aligns_figures_right_and_words_left():
    text = table(
        ["name", "ratio", "n", "ok"], [["a", 0.25, 3, True], ["long name", -1.0, 12, False]]
    )
    assert text.splitlines() == [
        "name         ratio   n  ok",
        "─────────  ───────  ──  ───",
        "a           0.2500   3  yes",
        "long name  -1.0000  12  no",
    ]


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="a row has 1 cells under 2 headers"):
        table(["a", "b"], [["only one"]])


@pytest.mark.parametrize(
    ("difference", "shown"),
    [
        (0.0, "< 1e-06"),
        (3e-8, "< 1e-06"),
        (-3e-8, "< 1e-06"),
        (1e-6, "1.0e-06"),
        (-0.02, "-2.0e-02"),
    ],
)
def test_a_difference_of_rounding_size_is_shown_as_a_bound(difference, shown):
    assert bound(difference) == shown


def test_bitwise_equality_is_shown_only_for_an_exact_zero_and_a_nan_as_what_it_is():
    assert [*map(bitwise_difference, (0.0, 1e-30, float("nan")))] == ["none", "1.0e-30", "nan"]
    assert bound(float("nan")) == "nan"


def test_numbers_of_numpy_are_numbers_and_a_small_negative_one_is_no_minus_zero():
    assert table(["x"], [[np.float32(1.23456)], [-1e-5]]).splitlines()[2:] == ["1.2346", "0.0000"]


def test_a_cell_that_is_neither_text_nor_number_is_refused():
    with pytest.raises(TypeError, match=r"got Tensor: call \.item\(\)"):
        table(["x"], [[torch.tensor(1.0)]])
