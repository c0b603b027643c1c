"""Which notebooks are graded, and after whom each is called."""

import csv

import pytest

from grader.grade import CheckResult, Result
from grader.report import as_text, folder_name, write_csv
from grader.submissions import find_submissions


def lay_out(top, *names):
    for name in names:
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")


def found(*paths):
    return {name: one.path.name for name, one in find_submissions(paths).items()}


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["ada/work.ipynb"], {"ada": "work.ipynb"}),
        (
            ["ada/work.ipynb", "bob/work (1).ipynb", "eve/work.ipynb"],
            {"ada": "work.ipynb", "bob": "work (1).ipynb", "eve": "work.ipynb"},
        ),
        (
            ["ada/first.ipynb", "ada/second.ipynb", "bob/first.ipynb"],
            {"ada first": "first.ipynb", "ada second": "second.ipynb", "bob": "first.ipynb"},
        ),
        (["ada.ipynb", "bob/work.ipynb"], {"ada": "ada.ipynb", "bob": "work.ipynb"}),
        (["ada.ipynb", "ada/work.ipynb"], {"ada": "ada.ipynb", "ada_": "work.ipynb"}),
        (
            ["._x.ipynb", "ada/work.ipynb", "ada/._work.ipynb", ".ipynb_checkpoints/work.ipynb"],
            {"ada": "work.ipynb"},
        ),
    ],
)
def test_a_student_is_called_after_the_folder_or_the_file_beside_others(tmp_path, names, wanted):
    lay_out(tmp_path, *names)
    assert found(tmp_path) == wanted


def test_notebooks_named_one_by_one_are_called_after_their_folders_where_they_share_a_name(
    tmp_path,
):
    lay_out(tmp_path, "alice/work.ipynb", "bob/work.ipynb", "carol.ipynb")
    alice, bob = tmp_path / "alice" / "work.ipynb", tmp_path / "bob" / "work.ipynb"
    assert list(found(alice, bob, tmp_path / "carol.ipynb")) == ["alice", "bob", "carol"]
    assert list(found(alice)) == ["work"]


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*nowhere; pass notebooks, or the"):
        find_submissions([tmp_path / "nowhere"])


def test_names_of_moodle_and_canvas_are_split_into_student_and_number(tmp_path):
    lay_out(
        tmp_path,
        "Ada Lovelace_123456_assignsubmission_file/work.ipynb",
        "Bob_77_assignsubmission_file_work.ipynb",
        "curiemarie_LATE_4711_998877_average_gradients-2.ipynb",
        "noetheremmy_4712_998878_average_gradients.ipynb",
        "plain_name.ipynb",
    )
    found = {one.student: (one.id, one.warning) for one in find_submissions([tmp_path]).values()}
    assert found == {
        "Ada Lovelace": ("123456", ""),
        "Bob": ("77", ""),
        "curiemarie": ("4711", "late, says the course system"),
        "noetheremmy": ("4712", ""),
        "plain_name": ("", ""),
    }


def test_what_is_in_an_odd_place_or_format_gets_a_row_and_a_warning(tmp_path):
    lay_out(
        tmp_path,
        "alice/deep/er/work.ipynb",
        "bob/work.py",
        "carol.zip",
        "dan/work.ipynb",
        "roster.csv",
        "folder.ipynb/work.ipynb",
    )
    (tmp_path / "eve").symlink_to(tmp_path / "dan")
    (tmp_path / "empty").mkdir()
    found = {name: one.warning for name, one in find_submissions([tmp_path]).items()}
    assert found == {
        "alice": "the notebook was found in deep/er",
        "bob": "no notebook in the folder: work.py",
        "carol": "carol.zip is not a notebook",
        "dan": "",
        "empty": "no notebook in the folder: empty",
        "eve": "eve is a link: not followed",
        "folder": "folder.ipynb is a folder, not a notebook",
    }


def test_a_folder_that_nbgrader_collected_has_the_notebook_of_this_assignment(tmp_path):
    lay_out(
        tmp_path,
        "ada/average_gradients/work.ipynb",
        "ada/token_weighting/work.ipynb",
        "bob/week 1/average_gradients.ipynb",
        "bob/week 2/token_weighting.ipynb",
        "carol/week 1/work.ipynb",
        "carol/week 2/work.ipynb",
    )
    found = find_submissions([tmp_path], "average_gradients")
    assert found["ada"].path == tmp_path / "ada" / "average_gradients" / "work.ipynb"
    assert found["bob"].path == tmp_path / "bob" / "week 1" / "average_gradients.ipynb"
    assert found["ada"].warning == found["bob"].warning == ""
    assert found["carol"].warning == "2 notebooks in folders below: none was graded"


def test_a_very_long_name_and_names_that_no_file_can_have_become_folders(tmp_path):
    for name in ("x" * 250, "grades.csv", "Grades.CSV", "../..", "a/b", "", "é\u202e"):
        folder = folder_name(name)
        (tmp_path / folder).mkdir()
        assert (tmp_path / folder).resolve().parent == tmp_path.resolve()
        assert folder != "grades.csv"


@pytest.mark.parametrize("name", ["=1+1", ";=1+1", "＝1+1", " +1", "x, =1", '=1+1"', '"=1+1'])
def test_no_spreadsheet_takes_a_name_for_a_formula(name):
    assert as_text(name).startswith("'")
    assert not {"\n", '"', ";"} & set(as_text(name))


@pytest.mark.parametrize("name", ["Ada Lovelace", "Jean-Luc", "a+b@example.org", "-3", "O'Neill"])
def test_ordinary_names_stay_as_they_are(name):
    assert as_text(name) == name


def result(student, *scores, needs=""):
    checks = [
        CheckResult(f"c{n}", 5, score, False, sentence="why", needs_human=needs if n == 0 else "")
        for n, score in enumerate(scores)
    ]
    return Result(student, "a", "A", 5 * len(scores), checks)


def rows(path):
    with path.open(encoding="utf-8") as file:
        return {row["student"]: row for row in csv.DictReader(file)}


def test_the_table_says_why_points_are_missing_and_why_a_person_is_needed(tmp_path):
    write_csv([result("ada", 0, 5), result("bob", 0, 0, needs="OSError: gone")], tmp_path / "g.csv")
    found = rows(tmp_path / "g.csv")
    assert found["ada"]["reasons"] == "c0: why"
    assert found["bob"]["score"] == ""
    assert "c0: needs a person: OSError: gone" in found["bob"]["reasons"]
