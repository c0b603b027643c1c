"""Which notebooks are graded, and after whom each is called."""

import csv
import json

import pytest
from grader_notebooks import FIRST

from grader import batch
from grader.batch import missing, write_tables
from grader.feedback import write_feedback
from grader.grade import CheckResult, Result
from grader.people import People
from grader.report import folder_name, harmless, write_csv, write_results, write_statistics
from grader.submissions import HandedIn, find_submissions


def lay_out(top, *names):
    for name in names:
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")


def found(*paths):
    return {name: one.path.name for name, one in find_submissions(paths).items()}


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
    found = {one.student: (one.id, one.late) for one in find_submissions([tmp_path]).values()}
    assert found == {
        "Ada Lovelace": ("123456", False),
        "Bob": ("77", False),
        "curiemarie": ("4711", True),
        "noetheremmy": ("4712", False),
        "plain_name": ("", False),
    }


def test_what_is_in_an_odd_place_or_format_gets_a_row_and_a_warning(tmp_path):
    lay_out(
        tmp_path,
        "alice/deep/er/work.ipynb",
        "bob/work.py",
        "carol.zip",
        "dan/work.ipynb",
        "roster.csv",
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
    for name in ("x" * 250, "grades.csv", "Grades.CSV", "junit.xml", "../..", "a/b", "", "é\u202e"):
        folder = folder_name(name)
        (tmp_path / folder).mkdir()
        assert (tmp_path / folder).resolve().parent == tmp_path.resolve()
        assert folder not in ("grades.csv", "junit.xml")


@pytest.mark.parametrize("name", ["=1+1", ";=1+1", "＝1+1", " +1", "a\t@SUM(A1)", "x, =1", "x\n=1"])
def test_no_spreadsheet_takes_a_name_for_a_formula(name):
    assert harmless(name).startswith("'")
    assert "\n" not in harmless(name)


@pytest.mark.parametrize("name", ["Ada Lovelace", "Jean-Luc", "a+b@example.org", "-3", "O'Neill"])
def test_ordinary_names_stay_as_they_are(name):
    assert harmless(name) == name


def result(student, *scores, needs=""):
    checks = [
        CheckResult(f"c{n}", 5, score, False, "why", needs_human=needs if n == 0 else "")
        for n, score in enumerate(scores)
    ]
    return Result(student, "a", "A", sum(scores), 5 * len(scores), checks)


def rows(path):
    with path.open(encoding="utf-8") as file:
        return {row["student"]: row for row in csv.DictReader(file)}


def test_regrading_one_student_keeps_the_rows_of_the_others(tmp_path):
    for student, score in (("ada", 5), ("bob", 0)):
        write_results(result(student, score), tmp_path / student, "x")
    write_tables(tmp_path, "a")
    write_results(result("bob", 5), tmp_path / "bob", "y")
    write_results(result("other assignment", 5), tmp_path / "other", "z")
    write_tables(tmp_path, "a")
    found = rows(tmp_path / "grades.csv")
    assert [found[name]["score"] for name in ("ada", "bob")] == ["5", "5"]


def test_the_table_says_why_points_are_missing_and_why_a_person_is_needed(tmp_path):
    write_csv([result("ada", 0, 5), result("bob", 0, 0, needs="OSError: gone")], tmp_path / "g.csv")
    found = rows(tmp_path / "g.csv")
    assert found["ada"]["reasons"] == "c0: why"
    assert found["bob"]["score"] == ""
    assert "c0: needs a person: OSError: gone" in found["bob"]["reasons"]
    write_statistics([result("ada", 0, 5), result("bob", 5, 5)], tmp_path / "s.csv")
    with (tmp_path / "s.csv").open() as file:
        statistics = {row["check"]: row for row in csv.DictReader(file)}
    assert (statistics["c0"]["passed"], statistics["c0"]["most_often_said"]) == ("1", "why")


def test_people_set_scores_comment_and_count_days_and_twice_is_as_once(tmp_path):
    table = tmp_path / "o.csv"
    table.write_text(
        "student,check,score,comment,late_days\nada,c0,4,fine idea,\nada,,,,2\n77,,9,,\n"
    )
    people = People.read(table, per_day=1.5)
    ada, bob = result("ada", 0, 5, needs="?"), result("bob", 0, 0, needs="?")
    bob.id = "77"
    for _ in range(2):
        people.apply(ada)
        people.apply(bob)
    assert (ada.score, ada.needs_human, ada.comment) == (6, False, "fine idea")
    assert "2 days late: 3 points less" in ada.changed
    assert (bob.score, bob.needs_human) == (9, False)
    table.write_text("student,score\nada,many\n")
    with pytest.raises(ValueError, match="'many' is not a number"):
        People.read(table, 0)
    with pytest.raises(ValueError, match="--late-penalty needs --overrides"):
        People.read(None, 1.5)


def test_a_roster_shows_who_is_missing(tmp_path):
    lay_out(tmp_path, "Ada_12_assignsubmission_file/a.ipynb", "bob.ipynb")
    roster = [
        {"student": "Lovelace, A.", "id": "12"},
        {"student": "Bob", "id": ""},
        {"student": "eve"},
    ]
    absent = missing(roster, find_submissions([tmp_path]), FIRST)
    assert [one.student for one in absent] == ["eve"]
    write_csv(absent, tmp_path / "g.csv")
    assert rows(tmp_path / "g.csv")["eve"]["reasons"] == "nothing was handed in"


@pytest.mark.parametrize(
    ("overrides", "score", "shown"),
    [
        (None, "", "No score"),
        ("student,comment\neve,ill\n", "", "No score"),
        ("student,score\neve,0\n", "0.0", "0 of"),
        ("student,score\neve,4\n", "4.0", "4 of"),
    ],
)
def test_who_handed_in_nothing_has_no_score_until_a_person_sets_one(
    overrides, score, shown, tmp_path
):
    [eve] = missing([{"student": "eve"}], {}, FIRST)
    table = tmp_path / "o.csv"
    table.write_text(overrides or "")
    People.read(table if overrides else None, 0).apply(eve)
    folder = tmp_path / "eve"
    write_results(eve, folder, "missing")
    write_feedback(eve, folder)
    write_csv([eve], tmp_path / "g.csv")
    assert rows(tmp_path / "g.csv")["eve"]["score"] == score
    report = json.loads((folder / "results.json").read_text())
    assert report.get("score", "") == (float(score) if score else "")
    assert "Nothing was handed in." in report["output"]
    page = (folder / "feedback.html").read_text()
    assert shown in page
    assert "Nothing was handed in." in page


@pytest.mark.parametrize(
    ("students", "jobs", "parts"),
    [(1, 4, [1]), (3, 2, [1, 2]), (8, 4, [2, 2, 2, 2]), (50, 2, [10, 20, 20]), (0, 2, [])],
)
def test_a_class_is_divided_among_the_jobs_and_at_most_20_share_a_run(
    students, jobs, parts, tmp_path, monkeypatch
):
    sizes = []

    def grade_many(read, assignment, server, **_):
        sizes.append(len(read))
        return [Result(student, "", "", 0, 0, []) for student, _ in read]

    monkeypatch.setattr(batch, "grade_many", grade_many)
    monkeypatch.setattr(batch, "_read", lambda one, assignment: None)
    handed_in = {f"s{n}": HandedIn(f"s{n}", FIRST) for n in range(students)}
    results = batch.grade_all(handed_in, FIRST, tmp_path, None, jobs=jobs)
    assert [result.student for result in results] == list(handed_in)
    assert sorted(sizes) == parts
