"""Points and feedback as a course system imports them, in the table that it exported itself.

    python -m grader export graded/average_gradients --canvas gradebook.csv
    python -m grader export graded/average_gradients --moodle worksheet.csv

Canvas exports its gradebook (Student, ID, SIS …, Section, "Name (id)"), and Moodle a grading
worksheet for each assignment (Identifier: "Participant 123", …). The table that is written has the
same columns, rows, and identifiers; only the points of this assignment are filled in. For Moodle,
a zip with each student's feedback.html in a folder of the name that Moodle expects is written, too.

Points come from grades.csv: a number in its column `override` replaces the score.
"""

import csv
import io
import re
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from grader.report import OVERRIDES, PAGE, TABLE, folder_name, write_whole

Row = dict[str, str]
Matches = list[tuple[Row, list[Row]]]  # each line of grades.csv, and the student's rows
_PARTICIPANT = re.compile(r"^\D*(\d+)$")
_CANVAS_COLUMN = re.compile(r"^(?P<name>.*\S)\s*\(\d+\)$")


class CourseTable:
    """A table as CSV, as a course system exported it.

    Raises ValueError if it lacks one of the columns `needed`, or cannot be read as a table.
    """

    def __init__(self, path: Path, needed: Iterable[str]) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text: export it again, as CSV") from None
        self.path, self.mark = path, "\ufeff" * text.startswith("\ufeff")  # a byte order mark
        text = text.removeprefix(self.mark)
        self.delimiter = max(",;\t", key=text.partition("\n")[0].count)
        reader = csv.DictReader(io.StringIO(text), delimiter=self.delimiter, restval="")
        self.columns, self.rows = list(reader.fieldnames or []), list(reader)
        for name in needed:
            if name not in self.columns:
                found = ", ".join(self.columns[:8]) or "nothing"
                raise ValueError(f"{path} has no column {name!r}, but: {found}")

    def write(self, path: Path) -> None:
        """In the same form as it was read."""
        out = io.StringIO()
        form = {"delimiter": self.delimiter, "lineterminator": "\n", "extrasaction": "ignore"}
        writer = csv.DictWriter(out, self.columns, **form)
        writer.writeheader()
        writer.writerows(self.rows)
        write_whole(path, self.mark + out.getvalue())


@dataclass
class Exported:
    """What was written, and a sentence for everything that was not filled in."""

    files: list[Path]
    filled: int = 0
    problems: list[str] = field(default_factory=list)


def export_canvas(folder: Path, roster: Path, column: str = "") -> Exported:
    """Write the gradebook `roster` with this assignment's points into `folder`.

    `column` names the assignment as Canvas does, with or without its number; by default it is the
    one that has this assignment's name. Raises ValueError and FileNotFoundError.
    """
    grades = _graded(folder)
    table = CourseTable(roster, ["Student", "ID"])
    target = _canvas_column(table, column or (grades[0]["assignment"] if grades else ""))
    students = [row for row in table.rows if row["Student"].strip() != "Points Possible"]
    found = _matches(grades, students, "Student", lambda row: row["ID"].strip())
    return _fill(table, target, found, folder)


def export_moodle(folder: Path, worksheet: Path) -> Exported:
    """Write Moodle's `worksheet` with the points, and a zip with the feedback, into `folder`.

    Raises ValueError and FileNotFoundError.
    """
    table = CourseTable(worksheet, ["Identifier", "Full name", "Grade"])
    found = _matches(_graded(folder), table.rows, "Full name", _participant)
    done = _fill(table, "Grade", found, folder)
    # For "Upload multiple feedback files in a zip".
    feedback = folder / f"{worksheet.stem}-feedback.zip"
    unfinished = feedback.with_name(f"{feedback.name}.part")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        for grade, rows in found:
            page = folder / folder_name(grade["student"]) / PAGE
            if len(rows) == 1 and page.exists():
                name = rows[0]["Full name"].replace("/", " ").replace("_", " ")
                inside = f"{name}_{_participant(rows[0])}_assignsubmission_file_"
                archive.write(page, f"{inside}/{PAGE}")
    unfinished.replace(feedback)
    done.files.append(feedback)
    return done


def _graded(folder: Path) -> list[Row]:
    """The lines of grades.csv; the score of each is the override, if there is one."""
    path = folder / TABLE
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}: grade the assignment into {folder} first")
    rows = CourseTable(path, ["student", "id", "assignment", "score"]).rows
    for row in rows:
        row["score"] = row.get(OVERRIDES[0], "").strip() or row["score"]
        try:
            float(row["score"] or 0)
        except ValueError:
            said = f"{path}: the override of {row['student']} is {row['score']!r}"
            raise ValueError(f"{said}, which is no number") from None
    return rows


def _participant(row: Row) -> str:
    found = _PARTICIPANT.match(row["Identifier"].strip())
    return found[1] if found else ""


def _canvas_column(table: CourseTable, wanted: str) -> str:
    """The column of an assignment. Raises ValueError if none, or several, have the name."""
    named = {
        column: match["name"] for column in table.columns if (match := _CANVAS_COLUMN.match(column))
    }
    plain = wanted.replace("_", " ").casefold()
    found = [
        column
        for column, name in named.items()
        if wanted == column or name.replace("_", " ").casefold() == plain
    ]
    if len(found) == 1:
        return found[0]
    raise ValueError(
        f"{table.path} has {'several columns' if found else 'no column'} for {wanted!r}; its "
        f"assignments are: {', '.join(named) or 'none'}. Choose one with --column NAME"
    )


def _matches(
    grades: list[Row], students: list[Row], name_column: str, number_of: Callable[[Row], str]
) -> Matches:
    """The rows with the student's number, or with the name if the number is not known."""

    def is_of(row: Row, grade: Row) -> bool:
        if grade["id"]:
            return number_of(row) == grade["id"]
        # "Lovelace, Ada" is "Ada Lovelace".
        words = (re.findall(r"\w+", n.casefold()) for n in (row[name_column], grade["student"]))
        return len({tuple(sorted(one)) for one in words}) == 1

    return [(grade, [row for row in students if is_of(row, grade)]) for grade in grades]


def _fill(table: CourseTable, target: str, found: Matches, folder: Path) -> Exported:
    """Enter each grade into the one row of its student, and write the table."""
    done = Exported([folder / f"{table.path.stem}-filled.csv"])
    for grade, rows in found:
        who = f"{grade['student']} ({grade['id']})" if grade["id"] else grade["student"]
        if not grade["score"]:
            done.problems.append(f"{who} has no points yet: a person has to look.")
        elif not rows:
            done.problems.append(f"{who} is in no row of {table.path.name}.")
        elif len(rows) > 1:
            done.problems.append(f"{who} is in {len(rows)} rows of {table.path.name}: none filled.")
        else:
            rows[0][target] = f"{float(grade['score']):g}"
            done.filled += 1
    table.write(done.files[0])
    return done
