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
_PARTICIPANT = re.compile(r"^\D*(\d+)$")
_CANVAS_COLUMN = re.compile(r"^(?P<name>.*\S)\s*\((?P<id>\d+)\)$")
_POINTS_POSSIBLE = "Points Possible"


@dataclass(frozen=True)
class Grade:
    """A student's line of grades.csv: `points` is None where a person still has to look."""

    student: str
    id: str
    title: str
    points: float | None


@dataclass
class CourseTable:
    """A table that a course system exported: its text's form, its columns, and its rows."""

    path: Path
    delimiter: str
    mark: str  # a byte order mark, or nothing
    columns: list[str]
    rows: list[Row]

    @classmethod
    def read(cls, path: Path, needed: Iterable[str]) -> "CourseTable":
        """Raises ValueError if the table lacks a column, or cannot be read as one."""
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text: export it again, as CSV") from None
        mark = text[:1] if text.startswith("\ufeff") else ""
        text = text.removeprefix("\ufeff")
        first = text.partition("\n")[0]
        delimiter = max(",;\t", key=first.count)
        reader = csv.DictReader(io.StringIO(text), delimiter=delimiter, restval="")
        columns = list(reader.fieldnames or [])
        for name in needed:
            if name not in columns:
                found = ", ".join(columns[:8]) or "nothing"
                raise ValueError(f"{path} has no column {name!r}, but: {found}")
        return cls(path, delimiter, mark, columns, [dict(row) for row in reader])

    def write(self, path: Path) -> None:
        """In the same form as it was read."""
        out = io.StringIO()
        writer = csv.DictWriter(
            out, self.columns, delimiter=self.delimiter, lineterminator="\n", extrasaction="ignore"
        )
        writer.writeheader()
        writer.writerows(self.rows)
        write_whole(path, self.mark + out.getvalue())


@dataclass
class Exported:
    """What was written, and a sentence for everything that was not filled in."""

    files: list[Path]
    filled: int = 0
    problems: list[str] = field(default_factory=list)


def read_grades(folder: Path) -> list[Grade]:
    """The lines of grades.csv in `folder`. Raises ValueError and FileNotFoundError."""
    path = folder / TABLE
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}: grade the assignment into {folder} first")
    table = CourseTable.read(path, ["student", "id", "assignment", "score"])
    grades = []
    for row in table.rows:
        said = row.get(OVERRIDES[0], "").strip() or row["score"]
        try:
            points = float(said) if said else None
        except ValueError:
            message = f"{path}: the override of {row['student']} is {said!r}, which is no number"
            raise ValueError(message) from None
        grades.append(Grade(row["student"], row["id"], row["assignment"], points))
    return grades


def export_canvas(folder: Path, roster: Path, column: str = "") -> Exported:
    """Write the gradebook `roster` with this assignment's points into `folder`.

    `column` names the assignment as Canvas does, with or without its number; by default it is the
    one that has this assignment's name. Raises ValueError.
    """
    grades = read_grades(folder)
    table = CourseTable.read(roster, ["Student", "ID"])
    target = _canvas_column(table, column or (grades[0].title if grades else ""))
    students = [row for row in table.rows if row["Student"].strip() != _POINTS_POSSIBLE]
    return _fill(table, students, grades, target, "Student", lambda row: row["ID"].strip(), folder)


def export_moodle(folder: Path, worksheet: Path) -> Exported:
    """Write Moodle's `worksheet` with the points, and a zip with the feedback, into `folder`."""
    grades = read_grades(folder)
    table = CourseTable.read(worksheet, ["Identifier", "Full name", "Grade"])

    def number(row: Row) -> str:
        found = _PARTICIPANT.match(row["Identifier"].strip())
        return found[1] if found else ""

    done = _fill(table, table.rows, grades, "Grade", "Full name", number, folder)
    done.files.append(_write_feedback(folder, table, grades, number))
    return done


def _canvas_column(table: CourseTable, wanted: str) -> str:
    """The column of an assignment. Raises ValueError if none, or several, have the name."""
    named = {}
    for column in table.columns:
        if match := _CANVAS_COLUMN.match(column):
            named[column] = match["name"]
    plain = wanted.replace("_", " ").casefold()
    found = [
        column
        for column, name in named.items()
        if wanted == column or name.replace("_", " ").casefold() == plain
    ]
    if len(found) == 1:
        return found[0]
    which = "several columns" if found else "no column"
    known = ", ".join(named) or "none"
    raise ValueError(
        f"{table.path} has {which} for {wanted!r}; its assignments are: {known}. Choose one with "
        "--column NAME"
    )


def _fill(
    table: CourseTable,
    students: list[Row],
    grades: list[Grade],
    target: str,
    name_column: str,
    number_of: Callable[[Row], str],
    folder: Path,
) -> Exported:
    """Enter each grade into the one row of its student, and write the table."""
    out = folder / f"{table.path.stem}-filled.csv"
    done = Exported([out])
    for grade in grades:
        rows = _rows_of(grade, students, name_column, number_of)
        who = f"{grade.student} ({grade.id})" if grade.id else grade.student
        if grade.points is None:
            done.problems.append(f"{who} has no points yet: a person has to look.")
        elif not rows:
            done.problems.append(f"{who} is in no row of {table.path.name}.")
        elif len(rows) > 1:
            done.problems.append(f"{who} is in {len(rows)} rows of {table.path.name}: none filled.")
        else:
            rows[0][target] = f"{grade.points:g}"
            done.filled += 1
    table.write(out)
    return done


def _rows_of(
    grade: Grade, students: list[Row], name_column: str, number_of: Callable[[Row], str]
) -> list[Row]:
    """The rows with the student's number, or, if it is not known, with the name."""
    if grade.id:
        return [row for row in students if number_of(row) == grade.id]
    return [row for row in students if _words(row[name_column]) == _words(grade.student)]


def _words(name: str) -> list[str]:
    """The words of a name in any order: "Lovelace, Ada" is "Ada Lovelace"."""
    return sorted(re.findall(r"\w+", name.casefold()))


def _write_feedback(
    folder: Path, table: CourseTable, grades: list[Grade], number_of: Callable[[Row], str]
) -> Path:
    """A zip for Moodle's "Upload multiple feedback files in a zip"."""
    out = folder / f"{table.path.stem}-feedback.zip"
    unfinished = out.with_name(f"{out.name}.part")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        for grade in grades:
            page = folder / folder_name(grade.student) / PAGE
            rows = _rows_of(grade, table.rows, "Full name", number_of)
            if len(rows) == 1 and page.exists():
                name = rows[0]["Full name"].replace("/", " ").replace("_", " ")
                inside = f"{name}_{number_of(rows[0])}_assignsubmission_file_"
                archive.write(page, f"{inside}/{PAGE}")
    unfinished.replace(out)
    return out
