"""Reading a source notebook, and what of it reaches the students."""

import json
from dataclasses import asdict

import nbformat
import pytest
from grader_notebooks import ASSIGNMENTS, FIRST, cell, first_assignment

from grader.release import release
from grader.source import SourceError, kind_of, make_key, make_stub, read_assignment, source_of

SOURCES = sorted(ASSIGNMENTS.glob("*.ipynb"))


def changed(tmp_path, change):
    """The first assignment's notebook, changed, as a file."""
    notebook = json.loads(FIRST.read_text())
    change(notebook)
    path = tmp_path / "changed.ipynb"
    path.write_text(json.dumps(notebook))
    return path


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_source_notebook_is_valid_and_all_its_cells_have_names(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for one in notebook.cells:
        nbgrader = one.metadata.get("nbgrader")
        if nbgrader:
            assert nbgrader.schema_version == 3
            assert nbgrader.grade_id == one.id


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_an_assignment_says_points_time_what_is_handed_in_and_its_chapter(path):
    assignment = read_assignment(path)
    first = source_of(assignment.notebook["cells"][0])
    assert f"**{assignment.points:g} points" in first
    assert "hour" in first or "minutes" in first
    assert "**You hand in**" in first
    assert "../../book/" in first
    visible = sum(check.points for check in assignment.checks if check.visible)
    assert 0 < visible < assignment.points


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_check_catches_wrong_answers_and_no_two_checks_catch_the_same_ones(path):
    assignment = read_assignment(path)
    caught = {
        check.name: {wrong.name for wrong in assignment.wrong_answers if check.name in wrong.loses}
        for check in assignment.checks
    }
    assert all(caught.values())
    assert len({frozenset(names) for names in caught.values()}) == len(caught)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_release_holds_no_solution_no_hidden_check_and_no_wrong_answer(path):
    assignment = read_assignment(path)
    visible = [{"check": asdict(check)} for check in assignment.checks if check.visible]
    released = release(assignment, visible)
    nbformat.validate(nbformat.from_dict(released))
    text = json.dumps(released, ensure_ascii=False)
    given = {line.strip() for source in assignment.givens for line in source.splitlines()}
    for solution in assignment.solutions.values():
        shown = given | {line.strip() for line in solution.stub.splitlines()}
        for line in {line.strip() for line in solution.key.splitlines()} - shown:
            if len(line) > 25:
                assert json.dumps(line, ensure_ascii=False)[1:-1] not in text
    for check in assignment.checks:
        if not check.visible:
            assert json.dumps(check.concept, ensure_ascii=False)[1:-1] not in text
    for wrong in assignment.wrong_answers:
        assert wrong.name not in text


def test_a_release_keeps_nbgraders_metadata_and_the_points():
    assignment = first_assignment()
    cells = release(assignment, [])["cells"]
    graded = [c["metadata"]["nbgrader"] for c in cells if "nbgrader" in c["metadata"]]
    assert {one["schema_version"] for one in graded} == {3}
    assert sum(one.get("points", 0) for one in graded) == assignment.points
    assert sum(one["solution"] for one in graded) == len(assignment.solutions)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_what_only_its_author_reads_is_folded_in_the_source_and_nothing_in_the_release(path):
    assignment = read_assignment(path)
    for one in assignment.notebook["cells"]:
        own = kind_of(one) in ("tools", "common", "check", "wrong answer")
        assert one["metadata"].get("jupyter", {}).get("source_hidden", False) == own
        assert ("hide-input" in one["metadata"].get("tags", [])) == own
    for one in release(assignment, [])["cells"]:
        assert {"jupyter", "tags"}.isdisjoint(one["metadata"])


def test_links_to_chapters_lead_to_the_built_book_where_its_address_is_given():
    released = release(first_assignment(), [], book="https://book.invalid")
    text = json.dumps(released)
    assert "https://book.invalid/start/what_is_averaged.html" in text
    assert "../../book/" not in text


def test_without_a_book_a_release_names_the_chapter_and_links_nothing():
    released = release(first_assignment(), [])
    text = "".join(source_of(one) for one in released["cells"])
    assert "Read first:\nWhat is averaged. Checks" in text
    assert ".ipynb" not in text


def test_a_stub_keeps_what_is_outside_the_marks_and_the_indentation():
    key = (
        "def f():\n    x = 1\n    ### BEGIN SOLUTION\n    y = 2\n    ### END SOLUTION\n    return x"
    )
    assert make_stub(key).splitlines() == [
        "def f():",
        "    x = 1",
        "    # Your code here.",
        "    raise NotImplementedError",
        "    return x",
    ]


def test_a_stub_may_be_broken_code_to_mend():
    key = (
        "def f():\n    ### BEGIN SOLUTION\n    return 1\n    ### RELEASED AS\n"
        "    # for x in y:\n    #     return 2\n    ### END SOLUTION"
    )
    assert make_stub(key) == "def f():\n    for x in y:\n        return 2"
    assert make_key(key) == "def f():\n    return 1"


@pytest.mark.parametrize("key", ["x = 1", "### BEGIN SOLUTION\nx = 1", "### END SOLUTION"])
def test_a_solution_without_both_marks_is_refused(key):
    with pytest.raises(SourceError, match="BEGIN SOLUTION"):
        make_stub(key)


def _no_points(notebook):
    del cell(notebook, "each_average")["metadata"]["nbgrader"]["points"]


def _twice(notebook):
    notebook["cells"].append(cell(notebook, "each"))


def _no_python(notebook):
    one = cell(notebook, "each")
    one["source"] = source_of(one).replace("def average_each", "def average each")


def _no_concept(notebook):
    cell(notebook, "each_average")["source"] = "%%check each_average\nSOLUTIONS = ['each']"


def _no_draw(notebook):
    one = cell(notebook, "each_average")
    one["source"] = source_of(one).replace("def draw", "def drawn")


def _no_such_solution(notebook):
    one = cell(notebook, "each_average")
    one["source"] = source_of(one).replace('["each"]', '["all"]')


def _no_such_check(notebook):
    cell(notebook, "wrong_each_sum")["metadata"]["grader"]["loses"] = "everything"


def _other_name(notebook):
    cell(notebook, "each_average")["source"] = "%%check each_averages"


def _other_wrong_name(notebook):
    cell(notebook, "wrong_each_sum")["source"] = "%%wrong_answer sum"


def _no_kind(notebook):
    del cell(notebook, "imports")["metadata"]["grader"]


def _no_title(notebook):
    del notebook["metadata"]["grader"]["title"]


def _unknown_kind(notebook):
    cell(notebook, "each")["metadata"]["grader"]["kind"] = "solutoin"


def _not_constant(notebook):
    one = cell(notebook, "each_average")
    one["source"] = source_of(one).replace("VISIBLE = True", "VISIBLE = 1 + 1")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_no_points, "needs points"),
        (_twice, "'each' is also"),
        (_no_python, "the key: "),
        (_no_concept, "docstring"),
        (_no_draw, "define draw"),
        (_no_such_solution, "'all', which is no solution"),
        (_no_such_check, "loses 'everything'"),
        (_other_name, "has to be '%%check each_average'"),
        (_other_wrong_name, "has to be '%%wrong_answer sum instead of average'"),
        (_no_kind, "code needs"),
        (_no_title, '"title"'),
        (_unknown_kind, "'solutoin'"),
        (_not_constant, "VISIBLE has to be a"),
    ],
)
def test_a_source_notebook_with_a_slip_is_refused_by_name(tmp_path, change, said):
    with pytest.raises(SourceError, match=said):
        read_assignment(changed(tmp_path, change))


def test_a_file_that_is_no_notebook_is_refused(tmp_path):
    (tmp_path / "a.ipynb").write_text("not one")
    with pytest.raises(SourceError, match="not JSON"):
        read_assignment(tmp_path / "a.ipynb")
