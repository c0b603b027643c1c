"""Reading a source notebook, and what of it reaches the students."""

import json

import nbformat
import pytest
from grader_notebooks import ASSIGNMENTS, FIRST, cell, first_assignment

from grader.release import release
from grader.source import SourceError, key_and_stub, kind_of, read_assignment, source_of

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
def test_every_check_catches_wrong_answers_and_no_two_checks_catch_the_same_ones(path):
    assignment = read_assignment(path)
    caught = {
        check.name: {wrong.name for wrong in assignment.wrong_answers if check.name in wrong.loses}
        for check in assignment.checks
    }
    assert all(caught.values())
    assert len({frozenset(names) for names in caught.values()}) == len(caught)


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
    assert key_and_stub(key)[1].splitlines() == [
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
    stub = "def f():\n    for x in y:\n        return 2"
    assert key_and_stub(key) == ("def f():\n    return 1", stub)


@pytest.mark.parametrize("key", ["x = 1", "### BEGIN SOLUTION\nx = 1", "### END SOLUTION"])
def test_a_solution_without_both_marks_is_refused(key):
    with pytest.raises(SourceError, match="BEGIN SOLUTION"):
        key_and_stub(key)


def edited(name, new, old=None):
    """A change: `new` in place of `old`, or of everything, in the cell of that name."""

    def change(notebook):
        one = cell(notebook, name)
        one["source"] = source_of(one).replace(source_of(one) if old is None else old, new)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda n: n["cells"].append(cell(n, "each")), "'each' is also"),
        (lambda n: n["metadata"]["grader"].pop("title"), '"title"'),
        (lambda n: cell(n, "imports")["metadata"].pop("grader"), "code needs"),
        (lambda n: cell(n, "each_average")["metadata"]["nbgrader"].pop("points"), "needs points"),
        (lambda n: cell(n, "each")["metadata"]["grader"].update(kind="solutoin"), "'solutoin'"),
        (
            lambda n: cell(n, "wrong_each_sum")["metadata"]["grader"].update(loses="everything"),
            "loses 'everything'",
        ),
        (edited("each", "def average each", "def average_each"), "the key: "),
        (edited("each_average", "%%check each_average\nSOLUTIONS = ['each']"), "docstring"),
        (edited("each_average", "def drawn", "def draw"), "define draw"),
        (edited("each_average", '["all"]', '["each"]'), "'all', which is no solution"),
        (edited("each_average", "%%check each_averages"), "has to be '%%check each_average'"),
        (edited("each_average", "VISIBLE = 1 + 1", "VISIBLE = True"), "VISIBLE has to be a"),
        (
            edited("wrong_each_sum", "%%wrong_answer sum"),
            "has to be '%%wrong_answer sum instead of average'",
        ),
    ],
)
def test_a_source_notebook_with_a_slip_is_refused_by_name(tmp_path, change, said):
    with pytest.raises(SourceError, match=said):
        read_assignment(changed(tmp_path, change))


def test_a_file_that_is_no_notebook_is_refused(tmp_path):
    (tmp_path / "a.ipynb").write_text("not one")
    with pytest.raises(SourceError, match="not JSON"):
        read_assignment(tmp_path / "a.ipynb")
