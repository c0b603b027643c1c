"""What people add to results: points that they set, comments, days that a work is late.

A CSV file with a column `student` (a name or the course system's number) and any of `check`,
`score`, `comment`, `late_days`. A row with a check sets the score of that check; one without sets
the score of the whole, whatever the checks earned. Of two rows that set the same, the last counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from grader.grade import Result
from grader.report import score_of
from grader.submissions import read_table


@dataclass
class People:
    """The rows of such a file, and what a day late costs."""

    rows: dict[str, dict[str, str]] = field(default_factory=dict)  # by place: "o.csv, line 3"
    per_day: float = 0.0  # points

    @classmethod
    def read(cls, path: Path | None, per_day: float) -> Self:
        """Raises ValueError for a file without the column, or with a number that is none, and for
        a `per_day` without a file: its column late_days says who is late.
        """
        if per_day and path is None:
            raise ValueError(
                "--late-penalty needs --overrides: its column late_days says who is late"
            )
        table = read_table(path, "student") if path else {}
        rows = {f"{path}, line {line}": row for line, row in table.items() if any(row.values())}
        for place, row in rows.items():
            for key in ("score", "late_days"):
                if row.get(key):
                    _number(row[key], f"{place}, {key}")
        return cls(rows, per_day)

    def apply(self, result: Result) -> None:
        """Change `result` as its rows say, from what its checks earned.

        Nothing of an earlier call remains, so twice is as once, and a removed row has no effect.
        """
        checks = {check.name: check for check in result.checks}
        for check in result.checks:
            check.set_to = None
        result.late_days = 0.0
        whole: float | None = None
        changed: dict[str, str] = {}  # by the check, "" for the whole
        comments = []
        for row in self.rows.values():
            if not _is_about(row, result):
                continue
            if row.get("late_days"):
                result.late_days = float(row["late_days"])
            if row.get("comment"):
                comments.append(row["comment"])
            name, score = row.get("check", ""), row.get("score")
            if score and not name:
                whole = float(score)
                changed[name] = f"a person set the score to {whole:g}"
            elif score and name in checks:
                checks[name].set_to = float(score)
                changed[name] = f"a person set {name} to {float(score):g}"
        result.decided = whole is not None
        result.score = sum(map(score_of, result.checks)) if whole is None else whole
        said = list(changed.values())
        cost = min(result.score, self.per_day * result.late_days)
        if cost > 0:
            result.score -= cost
            said.append(f"{result.late_days:g} days late: {cost:g} points less")
        result.changed, result.comment = "; ".join(said), " ".join(comments)

    def unmatched(self, results: Iterable[Result]) -> list[str]:
        """A sentence for each row whose student, or whose check, none of `results` has."""
        results = list(results)
        sentences = []
        for place, row in self.rows.items():
            student, check = row["student"], row.get("check")
            own = [result for result in results if _is_about(row, result)]
            checks = dict.fromkeys(one.name for result in own for one in result.checks)
            if not own:
                advice = "use a name or an id from grades.csv"
                sentences.append(f"{place}: there is no result for student {student!r}; {advice}")
            elif check and check not in checks:
                known = f"the checks are {', '.join(checks)}" if checks else "nothing was handed in"
                sentences.append(f"{place}: student {student!r} has no check {check!r}; {known}")
        return sentences


def _is_about(row: dict[str, str], result: Result) -> bool:
    return row["student"] in (result.student, result.id or None)


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{where}: {text!r} is not a number") from None
