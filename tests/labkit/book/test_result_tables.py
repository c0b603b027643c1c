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
        ("1.0000", "0.9997", "turned"),
        ("0.5392", "-0.9647", "turned"),
        ("0.0000", "nan", "absent"),
        ("nan", "nan", "not finite"),
    ],
)
def test_a_glyph_says_how_the_gradient_differs_from_the_right_one(ratio, cosine, said):
    page = shown(table(["variant", "ratio", "cosine"], [["one", ratio, cosine]]))
    glyph = page.select_one("td:first-child svg")
    assert glyph["aria-label"] == said
    assert ("wrong" in glyph["class"]) == (said != "right")


def heads_of(page: BeautifulSoup) -> list[str]:
    return [head.get_text() for head in page.select("th")]


def test_the_verdict_comes_second():
    heads = ["variant", "ranks", "ratio", "cosine", "verdict"]
    page = shown(table(heads, [["one", "all", "0.25", "1.00", "scale bug"]]))
    assert heads_of(page)[:2] == ["variant", "verdict"]


def test_the_verdicts_of_several_groups_are_marks_beside_their_numbers():
    heads = ["step", "rank 0", "equal", "rank 1", "equal"]
    page = shown(table(heads, [["1", "0.5", "yes", "0.7", "no"]]))
    assert heads_of(page) == ["step", "rank 0", "rank 1"]
    assert [cell.get_text() for cell in page.select("tbody td")] == ["1", "0.5✓", "0.7✗"]
    said = [(mark["aria-label"], "wrong" in mark["class"]) for mark in page.select(".agrees")]
    assert said == [("equal: yes", False), ("equal: no", True)]


def test_the_ratios_of_several_pairs_come_together_and_each_cosine_says_whose_it_is():
    heads = ["window", "K", "torch: ratio", "cosine", "ours: ratio", "cosine"]
    page = shown(table(heads, [["1", "4", "1.0", "1.0", "0.5", "1.0"]]))
    wanted = ["window", "torch: ratio", "ours: ratio", "K", "torch: cosine", "ours: cosine"]
    assert heads_of(page) == wanted
    glyphs = [cell.svg["aria-label"] for cell in page.select("tbody td") if cell.svg]
    assert glyphs == ["right", "too short"]


def test_a_pages_own_table_gets_its_verdict_second_and_glyphs_of_what_is_not_right():
    rows = {"one": ["known", "kept", "equal"], "two": ["", "broken", "<b>✗</b> 1.95\u00a0∠ 0.991"]}
    lines = "".join(
        f"<tr><td><p>{name}</p></td>{''.join(f'<td><p>{cell}</p></td>' for cell in cells)}</tr>"
        for name, cells in rows.items()
    )
    page = BeautifulSoup(
        '<article><div class="pst-scrollable-table-container"><table><thead><tr><th>trainer</th>'
        f"<th>note</th><th>verdict</th><th>W</th></tr></thead><tbody>{lines}</tbody></table></div>"
        "</article>",
        "html.parser",
    )
    show_tables(page)
    assert heads_of(page) == ["trainer", "verdict", "note", "W"]
    assert [cell.get_text() for cell in page.select("tbody td")][:3] == ["one", "kept", "known"]
    assert [glyph["aria-label"] for glyph in page.select("svg")] == ["turned"]
    assert page.select_one(".result-table svg").find_parent("td").p.get_text().startswith("✗ 1.95")


def test_two_tables_in_one_output_are_two_and_a_line_across_the_output_is_none():
    one = table(["a", "b"], [["1", "2"]])
    assert len(shown(f"{one}\n{one}").select("table")) == 2
    assert shown(f"title\n{'─' * 40}\nresult  1").select("table") == []
