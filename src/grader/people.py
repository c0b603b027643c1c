"""What people add to results: points that they set, comments, days that a work is late.

A CSV file with a column `student` (a name or the course system's number) and any of `check`,
`score`, `comment`, `late_days`. A row with a check sets the score of that check; one without sets
the score of the whole.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from grader.grade import Result
from grader.submissions import read_table


@dataclass
class People:
    """The rows of such a file, and what a day late costs."""

    rows: list[dict[str, str]] = field(default_factory=list)
    per_day: float = 0.0  # points

    @classmethod
    def read(cls, path: Path | None, per_day: float) -> Self:
        """Raises ValueError for a file without the column, or with a number that is none."""
        rows = read_table(path, "student") if path else []
        for row in rows:
            for key in ("score", "late_days"):
                if row.get(key):
                    _number(row[key], f"{path}, {row['student']}, {key}")
        return cls(rows, per_day)

    def apply(self, result: Result) -> None:
        """Change `result` as its rows say, from what its checks earned. Twice is as once."""
        result.score = sum(check.score for check in result.checks)
        result.changed = result.comment = ""
        result.late_days = 0.0
        changed, comments = [], []
        for row in self.rows:
            if row["student"] not in (result.student, result.id or None):
                continue
            if row.get("late_days"):
                result.late_days = float(row["late_days"])
            if row.get("comment"):
                comments.append(row["comment"])
            if row.get("score"):
                changed.append(self._set(result, row.get("check", ""), float(row["score"])))
        cost = min(result.score, self.per_day * result.late_days)
        if cost > 0:
            result.score -= cost
            changed.append(f"{result.late_days:g} days late: {cost:g} points less")
        result.changed, result.comment = "; ".join(changed), " ".join(comments)

    def _set(self, result: Result, check: str, score: float) -> str:
        if not check:
            result.score = score
            result.decided = True
            return f"a person set the score to {score:g}"
        for one in result.checks:
            if one.name == check:
                before = one.score if not one.needs_human else 0.0
                result.score += score - before
                one.set_to = score
                return f"a person set {check} to {score:g}"
        return f"there is no check {check!r} to set"


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{where}: {text!r} is not a number") from None
