"""The pages of the assignments in the book: they are current, and show no solution."""

import pytest
from grader_notebooks import ASSIGNMENTS, FIRST

from grader.__main__ import main
from grader.preview import preview
from grader.source import read_assignment
from labkit.launch.scripts import project_root

PAGES = project_root() / "book" / "teach" / "assignments"
SOURCES = sorted(ASSIGNMENTS.glob("*.ipynb"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_page_is_what_the_source_notebook_says_now(source):
    current = preview(read_assignment(source), source, PAGES)
    assert (PAGES / f"{source.stem}.md").read_text() == current, (
        "run: python -m grader preview labs/assignments/*.ipynb book/teach/assignments"
    )
    assert len(list(PAGES.iterdir())) == len(SOURCES)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_page_shows_stubs_and_points_and_no_line_of_a_solution(source):
    assignment = read_assignment(source)
    page = (PAGES / f"{source.stem}.md").read_text()
    lines = {line.strip() for line in page.splitlines()}
    assert all(stub.strip() in page for stub in assignment.stubs().values())
    shown = {line.strip() for text in assignment.stubs().values() for line in text.splitlines()}
    shown |= {line.strip() for text in assignment.givens for line in text.splitlines()}
    keys = {line.strip() for key in assignment.keys().values() for line in key.splitlines()}
    assert len(keys - shown) >= 3
    assert not (keys - shown) & lines
    for check in assignment.checks:
        assert (check.concept in page) == check.visible
    assert f"{assignment.points:g} points" in page
    for wrong in assignment.wrong_answers:
        assert wrong.name not in page


def test_links_lead_from_the_page_to_the_chapter_wherever_the_page_is(tmp_path):
    assert main(["preview", str(FIRST), str(tmp_path / "pages")]) == 0
    page = (tmp_path / "pages" / "01_average_gradients.md").read_text()
    (link,) = [part.partition(")")[0] for part in page.split("](")[1:]]
    chapter = project_root() / "book" / "start" / "what_is_averaged.ipynb"
    assert (tmp_path / "pages" / link).resolve() == chapter


def test_a_notebook_that_says_no_times_is_refused_in_a_sentence(tmp_path, capfd):
    text = FIRST.read_text()
    assert '"reading_minutes"' in text
    source = tmp_path / "untimed.ipynb"
    source.write_text(text.replace('"reading_minutes"', '"read"'))
    assert main(["preview", str(source), str(tmp_path)]) == 2
    assert "needs 'reading_minutes'" in capfd.readouterr().err
