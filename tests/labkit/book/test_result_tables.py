"""A printed table becomes one on the page, with the same cells and with glyphs."""

import pytest
from bs4 import BeautifulSoup
from hypothesis import given
from hypothesis import strategies as st

from labkit.book.result_tables import show_tables
from labkit.tables import table

WORDS = st.text("abcxyz ×_.-1", min_size=1, max_size=12).map(
    lambda text: " ".join(text.split()) or "x"
)


def shown(printed: str) -> BeautifulSoup:
    page = BeautifulSoup(
        '<div class="cell_output"><div class="output stream"><div class="highlight"><pre></pre>'
        "</div></div></div>",
        "html.parser",
    )
    page.pre.string = printed
    show_tables(page)
    return page


@given(
    st.integers(2, 5).flatmap(
        lambda n: st.lists(st.lists(WORDS, min_size=n, max_size=n), min_size=2, max_size=5)
    )
)
def test_every_cell_of_a_printed_table_is_on_the_page_and_the_first_column_stays_first(rows):
    page = shown(f"before\n{table(rows[0], rows[1:])}\n\nafter\n")
    found = [[cell.get_text() for cell in row.find_all(["th", "td"])] for row in page.select("tr")]
    assert [sorted(row) for row in found] == [sorted(row) for row in rows]
    assert [row[0] for row in found] == [row[0] for row in rows]
    assert [pre.get_text() for pre in page.select(".output pre")] == ["before", "after"]


@pytest.mark.parametrize(
    ("ratio", "cosine", "said"),
    [
        ("1.0000", "1.0000", "right"),
        ("1.004", "0.9999", "right"),
        ("0.2500", "1.0000", "too short"),
        ("4.0000", "1.0000", "too long"),
        ("1.0000", "0.9997", "another direction"),
        ("0.5392", "-0.9647", "another direction"),
        ("0.0000", "nan", "zero"),
        ("nan", "nan", "not finite"),
    ],
)
def test_a_glyph_says_how_the_gradient_differs_from_the_right_one(ratio, cosine, said):
    page = shown(table(["variant", "ratio", "cosine"], [["one", ratio, cosine]]))
    glyph = page.select_one("td:first-child svg")
    assert glyph["aria-label"] == said
    assert ("wrong" in glyph["class"]) == (said != "right")


def test_the_verdict_comes_second_unless_it_belongs_to_one_of_several_groups():
    heads = ["variant", "ranks", "ratio", "cosine", "verdict"]
    page = shown(table(heads, [["one", "all", "0.25", "1.00", "scale bug"]]))
    assert [th.get_text() for th in page.select("th")][:2] == ["variant", "verdict"]
    heads = ["step", "rank 0", "equal", "rank 1", "equal"]
    page = shown(table(heads, [["1", "a", "yes", "b", "no"]]))
    assert [th.get_text() for th in page.select("th")] == heads


def test_two_tables_in_one_output_are_two_and_a_line_across_the_output_is_none():
    one = table(["a", "b"], [["1", "2"]])
    assert len(shown(f"{one}\n{one}").select("table")) == 2
    assert shown(f"title\n{'─' * 40}\nresult  1").select("table") == []
