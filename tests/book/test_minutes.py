"""The minutes on the pages are those of one rule."""

import json
from pathlib import Path

import nbformat

from labkit.book import minutes
from labkit.launch import project_root

BOOK = project_root() / "book"
TABLE = Path(__file__).with_name("pages.json")


def test_every_page_states_the_minutes_that_the_rule_gives():
    wrong = {}
    for page in minutes.pages_of(BOOK):
        text = page.read_text()
        if minutes.with_minutes(text, page) != text:
            wrong[page.stem] = minutes.minutes(page)
    assert not wrong, f"run: .venv/bin/python -m labkit.book.minutes, which writes {wrong}"


def test_no_page_takes_more_minutes_or_words_than_the_table_allows():
    """`pages.json`: minutes to read, and words with those of exercises; what was reached."""
    allowed = json.loads(TABLE.read_text())
    reached = {
        page.relative_to(BOOK).as_posix(): [
            minutes.minutes(page)[0],
            sum(piece.words for piece in minutes.pieces(page)),
        ]
        for page in minutes.pages_of(BOOK)
    }
    assert allowed.keys() - reached.keys() == set()
    over = {
        page: found
        for page, found in reached.items()
        if any(n > most for n, most in zip(found, allowed.get(page, (0, 0)), strict=True))
    }
    assert over == {}, f"pages.json allows less, or names no such page: {over}"


def test_the_route_of_90_minutes_takes_no_longer():
    _, table = (BOOK / "index.md").read_text().split("### 90 minutes\n")
    ends = [int(end) for _, end in minutes.ROUTE_TIMES.findall(table)]
    assert 75 <= ends[-1] <= 90


def test_what_is_folded_or_hidden_takes_no_time_and_an_exercise_has_its_own(tmp_path: Path):
    words, line = "word " * 20, "pass\n"
    new = nbformat.v4
    code, hidden = new.new_code_cell(line * 3), new.new_code_cell(line * 9)
    code.outputs = [new.new_output("stream", text="a row\n" * 5)]
    hidden.metadata["tags"] = ["hide-input"]
    starter = new.new_code_cell(line)
    starter.metadata["tags"] = ["starter"]
    page = tmp_path / "page.ipynb"
    nbformat.write(
        new.new_notebook(
            cells=[
                new.new_markdown_cell(f"{words}\n:::{{dropdown}} More\n{words}\n:::\n| a | b |"),
                code,
                hidden,
                new.new_markdown_cell(f"```{{exercise}} Build\n:label: ex\n\n{words}\n```"),
                starter,
                new.new_markdown_cell(f"```{{solution-start}} ex\n```\n{words}"),
                new.new_code_cell(line * 50),
                new.new_markdown_cell(f"```{{solution-end}}\n```\n{words}"),
            ]
        ),
        page,
    )
    found = minutes.pieces(page)
    to_read = [piece.seconds for piece in found if not piece.of_exercises]
    to_do = [piece.seconds for piece in found if piece.of_exercises]
    read = 40 * minutes.WORD + 3 * minutes.CODE_LINE + 6 * minutes.TABLE_ROW + 2 * minutes.WORD
    assert sum(to_read) == read
    assert sum(to_do) == minutes.PROGRAM + 20 * minutes.WORD


def test_what_a_survey_has_written_takes_no_time(tmp_path: Path):
    page = tmp_path / "page.md"
    written = "% The next lines are written by a survey.\n| a | b |\n\nmore\n% Until here, by it.\n"
    page.write_text(f"three words here\n\n{written}\nand two\n")
    assert sum(piece.words for piece in minutes.pieces(page)) == 5
