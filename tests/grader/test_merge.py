"""Of a handed-in notebook only the solutions' source is read, and repairs are told."""

from __future__ import annotations

import copy

import pytest
from grader_notebooks import ASSIGNMENTS, cell, first_assignment, submission, write

from grader.merge import LONGEST, read_submission
from grader.source import read_assignment

ASSIGNMENT = first_assignment()


def read(tmp_path, change):
    notebook = submission(ASSIGNMENT, ASSIGNMENT.keys())
    change(notebook)
    return read_submission(write(notebook, tmp_path / "a.ipynb"), ASSIGNMENT)


def test_the_solutions_of_an_untouched_notebook_come_without_a_remark(tmp_path):
    found = read(tmp_path, lambda notebook: None)
    assert found.solutions == ASSIGNMENT.keys()
    assert found.repairs == []
    assert found.unreadable == ""


def test_a_cell_that_lost_its_metadata_is_found_by_its_id(tmp_path):
    def change(notebook):
        cell(notebook, "flat")["metadata"] = {}

    found = read(tmp_path, change)
    assert found.solutions == ASSIGNMENT.keys()
    assert "found by its cell id" in found.repairs[0]


def test_of_several_cells_the_last_one_edited_counts(tmp_path):
    def change(notebook):
        for source in ("first = 1", "last = 1", ASSIGNMENT.stubs()["flat"]):
            again = copy.deepcopy(cell(notebook, "flat"))
            notebook["cells"].append({**again, "id": source[:5].strip(), "source": source})

    found = read(tmp_path, change)
    assert found.solutions["flat"] == "last = 1"
    assert "4 cells are called flat" in found.repairs[0]


def test_a_solution_that_looks_around_in_its_process_is_noted_for_a_person(tmp_path):
    def change(notebook):
        cell(notebook, "each")["source"] = "from inspect import stack\nget = '_getframe'\n"
        cell(notebook, "flat")["source"] = "def average_flat(wrap):\n    wrap.run.__closure__\n"

    found = read(tmp_path, change)
    assert found.notes == [
        "cell each uses _getframe, inspect: a person should look",
        "cell flat uses __closure__: a person should look",
    ]


@pytest.mark.parametrize("path", sorted(ASSIGNMENTS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_key_uses_nothing_at_which_a_person_should_look(path, tmp_path):
    assignment = read_assignment(path)
    notebook = submission(assignment, assignment.keys())
    assert read_submission(write(notebook, tmp_path / "a.ipynb"), assignment).notes == []


def test_a_missing_cell_counts_as_not_written(tmp_path):
    def change(notebook):
        notebook["cells"] = [c for c in notebook["cells"] if c.get("id") != "flat"]

    found = read(tmp_path, change)
    assert found.solutions["flat"] == ASSIGNMENT.stubs()["flat"]
    assert found.repairs == ["cell flat is missing: graded as not written"]


def test_an_edited_given_cell_is_told_and_ignored(tmp_path):
    def change(notebook):
        cell(notebook, "imports")["source"] = "import nothing"

    assert read(tmp_path, change).repairs == [
        "the given cell imports was edited: the original was used"
    ]


def test_a_solution_of_a_book_s_length_is_not_run(tmp_path):
    def change(notebook):
        cell(notebook, "flat")["source"] = "#" * (LONGEST + 1)

    found = read(tmp_path, change)
    assert found.solutions["flat"] == ASSIGNMENT.stubs()["flat"]
    assert "characters" in found.repairs[0]


def test_a_folder_in_place_of_a_file_is_unreadable_and_not_an_error(tmp_path):
    (tmp_path / "a.ipynb").mkdir()
    found = read_submission(tmp_path / "a.ipynb", ASSIGNMENT)
    assert found.unreadable
    assert found.solutions == ASSIGNMENT.stubs()
