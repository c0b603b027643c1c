"""Course systems get their own tables back, with the points and nothing else changed."""

import csv
import io
import zipfile
from pathlib import Path

import pytest

from grader.__main__ import main
from grader.grade import CheckResult, Result
from grader.report import folder_name, write_csv, write_feedback, write_results

# In the form that each system documents for its own export.
CANVAS = """\
Student,ID,SIS User ID,SIS Login ID,Section,Average Gradients (771),Quiz (9),Total
    Points Possible,,,,,10.0,5.0,
"Lovelace, Ada",12,s12,ada,A,,4,80
"Noether, Emmy",34,s34,emmy,B,3,,
"Student, Test",,,t,A,,,
"""
MOODLE = """\
\ufeffIdentifier,Full name,Status,Grade,Maximum Grade,Grade can be changed,Feedback comments
Participant 12,Ada Lovelace,Submitted for grading,,10.00,Yes,
Participant 34,Emmy O'Noether,Submitted for grading,,10.00,Yes,"well, well"
"""


def graded(folder: Path, *students: tuple[str, str, float | None]) -> Path:
    """A folder as `grade` leaves it; points of None need a person."""
    results = []
    for student, number, points in students:
        check = CheckResult("first", 10.0, points or 0.0, True)
        check.needs_human = "" if points is not None else "the grader failed"
        result = Result(student, "average_gradients", "Average gradients", 10.0, [check], id=number)
        write_results(result, folder / folder_name(student), "f")
        write_feedback(result, folder / folder_name(student))
        results.append(result)
    write_csv(results, folder / "grades.csv")
    return folder


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff"))))


def test_canvas_gets_its_own_gradebook_with_the_points_of_this_assignment(tmp_path, capsys):
    folder = graded(tmp_path / "g", ("lovelaceada", "12", 7.5), ("Emmy Noether", "", 10.0))
    (tmp_path / "book.csv").write_text(CANVAS)
    assert main(["export", str(folder), "--canvas", str(tmp_path / "book.csv")]) == 0
    (written,) = folder.glob("*-filled.csv")
    before, after = rows_of(CANVAS), rows_of(written.read_text())
    assert [row.pop("Average Gradients (771)") for row in after] == ["10.0", "7.5", "10", ""]
    for row in before:
        row.pop("Average Gradients (771)")
    assert after == before


def test_moodle_gets_its_worksheet_and_the_feedback_in_folders_that_it_knows(tmp_path):
    folder = graded(tmp_path / "g", ("Ada Lovelace", "12", 7.5), ("Emmy O'Noether", "34", 0.0))
    (tmp_path / "sheet.csv").write_text(MOODLE)
    assert main(["export", str(folder), "--moodle", str(tmp_path / "sheet.csv")]) == 0
    written = (folder / "sheet-filled.csv").read_text()
    assert written.startswith("\ufeff")
    assert [row["Grade"] for row in rows_of(written)] == ["7.5", "0"]
    assert rows_of(written)[1]["Feedback comments"] == "well, well"
    names = zipfile.ZipFile(folder / "sheet-feedback.zip").namelist()
    assert sorted(names) == [
        "Ada Lovelace_12_assignsubmission_file_/feedback.html",
        "Emmy O'Noether_34_assignsubmission_file_/feedback.html",
    ]


def test_a_persons_points_replace_the_score_and_stay_in_every_later_table(tmp_path):
    folder = graded(tmp_path / "g", ("Ada Lovelace", "12", 2.0), ("Emmy O'Noether", "34", None))
    table = folder / "grades.csv"
    text = table.read_text()
    head = text.splitlines()[0]
    assert '"override","override_reason"' in head
    rows = rows_of(text)
    rows[0] |= {"override": "9", "override_reason": "a right solution; see the forum"}
    rows[1] |= {"override": "4", "override_reason": "by hand"}
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    graded(folder, ("Ada Lovelace", "12", 3.0), ("Emmy O'Noether", "34", 1.0))
    again = rows_of(table.read_text())
    assert [(r["score"], r["override"], r["override_reason"]) for r in again] == [
        ("3.0", "9", "a right solution; see the forum"),
        ("1.0", "4", "by hand"),
    ]
    (tmp_path / "sheet.csv").write_text(MOODLE)
    assert main(["export", str(folder), "--moodle", str(tmp_path / "sheet.csv")]) == 0
    assert [r["Grade"] for r in rows_of((folder / "sheet-filled.csv").read_text())] == ["9", "4"]


@pytest.mark.parametrize(
    ("change", "said", "code"),
    [
        (lambda text: text.replace("Identifier", "Number"), "no column 'Identifier'", 2),
        (lambda text: text.replace("Participant 34", "Participant 35"), "in no row", 1),
        (lambda text: text.replace("Participant 34", "Participant 12"), "in 2 rows", 1),
        (lambda text: "", "no column 'Identifier', but: nothing", 2),
    ],
)
def test_a_table_that_does_not_fit_gets_one_sentence_and_loses_nothing(
    tmp_path, capsys, change, said, code
):
    folder = graded(tmp_path / "g", ("Ada Lovelace", "12", 7.5), ("Emmy O'Noether", "34", 1.0))
    given = change(MOODLE)
    (tmp_path / "sheet.csv").write_text(given)
    assert main(["export", str(folder), "--moodle", str(tmp_path / "sheet.csv")]) == code
    assert said in "".join(capsys.readouterr())
    assert (tmp_path / "sheet.csv").read_text() == given
    if code == 1:
        assert len(rows_of((folder / "sheet-filled.csv").read_text())) == 2


def test_an_assignment_that_canvas_does_not_know_is_chosen_by_hand(tmp_path, capsys):
    folder = graded(tmp_path / "g", ("lovelaceada", "12", 7.5))
    (tmp_path / "book.csv").write_text(CANVAS.replace("Average Gradients", "Week 3"))
    command = ["export", str(folder), "--canvas", str(tmp_path / "book.csv")]
    assert main(command) == 2
    assert "its assignments are: Week 3 (771), Quiz (9)" in capsys.readouterr().err
    assert main([*command, "--column", "Week 3"]) == 0
    assert rows_of((folder / "book-filled.csv").read_text())[1]["Week 3 (771)"] == "7.5"
