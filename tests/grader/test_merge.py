"""Of a handed-in notebook only the solutions' source is read, and repairs are told."""

from __future__ import annotations

import copy

from grader_notebooks import cell, first_assignment, submission, write

from grader.merge import LONGEST, read_submission

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
