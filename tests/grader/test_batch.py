"""Which notebooks are graded, and after whom each is called."""

from __future__ import annotations

import pytest

from grader.batch import find_submissions


def lay_out(top, *names):
    for name in names:
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")


def found(*paths):
    return {name: path.name for name, path in find_submissions(paths).items()}


def test_a_notebook_in_a_students_folder_is_called_after_the_folder_whatever_its_own_name(tmp_path):
    lay_out(
        tmp_path,
        "alice/average_gradients.ipynb",
        "bob/average_gradients (1).ipynb",
        "carol/average_gradients.ipynb",
    )
    assert found(tmp_path) == {
        "alice": "average_gradients.ipynb",
        "bob": "average_gradients (1).ipynb",
        "carol": "average_gradients.ipynb",
    }


def test_a_single_folder_gives_its_name_as_one_of_many_does(tmp_path):
    lay_out(tmp_path, "alice/average_gradients.ipynb")
    assert list(found(tmp_path)) == ["alice"]


def test_several_notebooks_of_one_student_are_told_apart_by_their_names(tmp_path):
    lay_out(tmp_path, "alice/first.ipynb", "alice/second.ipynb", "bob/first.ipynb")
    assert list(found(tmp_path)) == ["alice first", "alice second", "bob"]


def test_what_begins_with_a_dot_is_nobodys_work(tmp_path):
    lay_out(
        tmp_path,
        "._x.ipynb",
        "alice/work.ipynb",
        "alice/._work.ipynb",
        ".ipynb_checkpoints/work-checkpoint.ipynb",
    )
    assert found(tmp_path) == {"alice": "work.ipynb"}


def test_notebooks_beside_each_other_are_called_after_their_files(tmp_path):
    lay_out(tmp_path, "alice.ipynb", "bob.ipynb", "carol/work.ipynb")
    assert list(found(tmp_path)) == ["alice", "bob", "carol"]


def test_notebooks_named_one_by_one_are_called_after_their_folders_where_they_share_a_name(
    tmp_path,
):
    lay_out(tmp_path, "alice/work.ipynb", "bob/work.ipynb", "carol.ipynb")
    alice, bob = tmp_path / "alice" / "work.ipynb", tmp_path / "bob" / "work.ipynb"
    assert list(found(alice, bob, tmp_path / "carol.ipynb")) == ["alice", "bob", "carol"]
    assert list(found(alice)) == ["work"]


def test_two_students_of_one_name_are_two_students(tmp_path):
    lay_out(tmp_path, "alice.ipynb", "alice/work.ipynb")
    assert list(found(tmp_path)) == ["alice", "alice_"]


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*nowhere"):
        find_submissions([tmp_path / "nowhere"])
