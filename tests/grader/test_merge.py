"""Of a handed-in notebook only the solutions' source is read, and repairs are told."""

import copy
import os
import resource

import pytest
from grader_notebooks import ASSIGNMENTS, cell, first_assignment, submission, write

from grader.merge import read_submission, without_magics
from grader.notebook_file import LONGEST, hash_of
from grader.source import read_assignment

ASSIGNMENT = first_assignment()


def read(tmp_path, change):
    notebook = submission(ASSIGNMENT, ASSIGNMENT.keys())
    change(notebook)
    return read_submission(write(notebook, tmp_path / "a.ipynb"), ASSIGNMENT)


def test_the_solutions_of_an_untouched_notebook_come_without_a_remark(tmp_path):
    found = read(tmp_path, lambda notebook: None)
    assert found.solutions == ASSIGNMENT.keys()
    assert found.notes == []
    assert found.unreadable == ""


def test_of_several_cells_the_last_one_edited_counts(tmp_path):
    def change(notebook):
        for source in ("first = 1", "last = 1", ASSIGNMENT.stubs()["flat"]):
            again = copy.deepcopy(cell(notebook, "flat"))
            notebook["cells"].append({**again, "id": source[:5].strip(), "source": source})

    found = read(tmp_path, change)
    assert found.solutions["flat"] == "last = 1"
    assert "4 cells are called flat" in found.notes[0]


def test_a_solution_that_looks_around_in_its_process_is_noted_for_a_person(tmp_path):
    def change(notebook):
        cell(notebook, "each")["source"] = "from inspect import stack\nget = '_getframe'\n"
        wrapped = "def average_flat(wrap):\n    wrap.run.__closure__\n    wrap.modules()\n"
        cell(notebook, "flat")["source"] = wrapped

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


def _loses_flat(notebook):
    notebook["cells"] = [c for c in notebook["cells"] if c.get("id") != "flat"]


@pytest.mark.parametrize(
    ("change", "note", "graded"),
    [
        (lambda n: cell(n, "flat").update(metadata={}), "found by its cell id", True),
        (lambda n: cell(n, "imports").update(source="import nothing"), "was edited: the or", True),
        (_loses_flat, "cell flat is missing: graded as not written", False),
        (lambda n: cell(n, "flat").update(source="#" * (LONGEST + 1)), "characters", False),
    ],
)
def test_a_damaged_cell_is_told_and_only_a_lost_solution_counts_as_not_written(
    tmp_path, change, note, graded
):
    found = read(tmp_path, change)
    assert len(found.notes) == 1
    assert note in found.notes[0]
    source = ASSIGNMENT.keys() if graded else ASSIGNMENT.stubs()
    assert found.solutions == ASSIGNMENT.keys() | {"flat": source["flat"]}


def test_a_folder_in_place_of_a_file_is_unreadable_and_not_an_error(tmp_path):
    (tmp_path / "a.ipynb").mkdir()
    found = read_submission(tmp_path / "a.ipynb", ASSIGNMENT)
    assert found.unreadable
    assert found.solutions == ASSIGNMENT.stubs()


def test_what_is_no_regular_file_is_unreadable_and_waits_for_nobody(tmp_path):
    other = tmp_path / "other.ipynb"
    write(submission(ASSIGNMENT, ASSIGNMENT.keys()), other)
    os.mkfifo(tmp_path / "pipe.ipynb")
    (tmp_path / "link.ipynb").symlink_to(other)
    (tmp_path / "zero.ipynb").symlink_to("/dev/zero")
    for name, said in (("pipe", "regular file"), ("link", "a link"), ("zero", "a link")):
        found = read_submission(tmp_path / f"{name}.ipynb", ASSIGNMENT)
        assert said in found.unreadable
        assert found.solutions == ASSIGNMENT.stubs()
        assert hash_of(tmp_path / f"{name}.ipynb") == "unreadable"


@pytest.mark.parametrize("text", ["[],", '{"a":1},'])
def test_a_large_file_of_many_values_costs_the_trusted_side_nothing(tmp_path, text):
    path = tmp_path / "large.ipynb"
    body = text * (40_000_000 // len(text))
    path.write_text('{"nbformat": 4, "cells": [' + body + "[]]}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = read_submission(path, ASSIGNMENT)
    assert found.unreadable
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("%%time\nx = 1", "\nx = 1"),
        ("\n%%capture out\nx = 1", "\n\nx = 1"),
        ("%matplotlib inline\nx = 1", "None\nx = 1"),
        ("def f():\n    !ls -l\n    return 1", "def f():\n    None\n    return 1"),
        ("y = !ls\nx = 1", "y = None\nx = 1"),
        ("%time x = 1", "x = 1"),
        ("x?", "None"),
        ("%pwd\nx = 1\n", "None\nx = 1\n"),
        ("t = '''\n%time\n!no\n'''\n%pwd", "t = '''\n%time\n!no\n'''\nNone"),
        ("x = 7 \\\n% 4", "x = 7 \\\n% 4"),
    ],
)
def test_magics_are_taken_out_and_lines_keep_their_numbers(source, wanted):
    found, ignored = without_magics(source)
    assert found == wanted
    assert bool(ignored) == (source != wanted)


@pytest.mark.parametrize("source", ["def f(:\n    pass", "%%bash\nls", "x = (\n%time"])
def test_a_students_own_syntax_error_stays(source):
    with pytest.raises(SyntaxError):
        compile(without_magics(source)[0], "cell", "exec")


def test_a_magic_in_a_solution_is_told_and_costs_nothing(tmp_path):
    def change(notebook):
        one = cell(notebook, "each")
        one["source"] = "%%time\n" + ASSIGNMENT.keys()["each"]

    found = read(tmp_path, change)
    assert "%%time was ignored" in found.notes[0]
    assert found.solutions["each"] == "\n" + ASSIGNMENT.keys()["each"]
