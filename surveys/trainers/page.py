"""Stored results, and how the page of the book shows them.

python surveys/trainers/page.py          # print the stored results on the page again
"""

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from by_hand import agrees
from by_hand import stored as found_by_hand
from families import FAMILIES, PROPERTIES, Family
from notes import NOTES
from trainers import TRAINERS, version

STORED = Path(__file__).resolve().parents[2] / "book/reference/trainers.json"
PAGE = STORED.with_suffix(".md")
START, END = "% The next lines are written by surveys/trainers.\n", "% Until here.\n"
NOT_IMPORTED = "ModuleNotFoundError", "ImportError"
Row = Mapping[str, Any]


def store_rows(judged: Mapping[tuple[str, str], tuple[str, str]]) -> None:
    """Store the rows of the trainers that could be imported, and print all rows on the page."""
    rows = {one["trainer"]: one for one in json.loads(STORED.read_text())}
    broken = {name for (name, _), cell in judged.items() if cell[0] in NOT_IMPORTED}
    for name in dict.fromkeys(name for name, _ in judged if name not in broken):
        rows[name] = {
            "trainer": name,
            "date": datetime.date.today().isoformat(),
            "versions": {one: version(one) for one in ("torch", *TRAINERS[name].needs)},
            "cells": {
                property_: {"text": cell[0], "detail": cell[1]}
                for (of, property_), cell in judged.items()
                if of == name
            },
        }
    kept = [rows[name] for name in TRAINERS if name in rows]
    STORED.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    write_page()


def write_page() -> None:
    before, rest = PAGE.read_text().split(START)
    rows = json.loads(STORED.read_text())
    PAGE.write_text(before + START + printed(rows) + END + rest.split(END)[1])


def printed(rows: list[Row]) -> str:
    """A section per family: its table, and what is not equal."""
    return "\n".join(line for kind in FAMILIES for line in section(kind, rows))


def section(kind: str, rows: list[Row]) -> list[str]:
    family = FAMILIES[kind]
    own = [row for row in rows if TRAINERS[row["trainer"]].kind == kind]
    if not own:
        return []
    lines = [f"(trainers-{kind})=", f"## {family.title}", "", family.chapter, ""]
    heads = (f"[{name}]({PROPERTIES[name][1]})" for name in family.columns)
    lines += [
        f"| trainer | promises | {' | '.join(heads)} |",
        "|---" * (2 + len(family.columns)) + "|",
    ]
    lines += [line_of(row, family) for row in own]
    lines += ["", measured_on(own), ""]
    notes = [note(row, family) for row in own if unequal(row)]
    return [*lines, *(["What is not equal:", "", *notes, ""] if notes else [])]


def line_of(row: Row, family: Family) -> str:
    """The name leads to what is not equal."""
    name = row["trainer"]
    trainer = TRAINERS[name]
    shown = f"[{name}](trainer-{name})" if unequal(row) else name
    promise = f"{trainer.promise} ({trainer.source})"
    cells = [shown_cell(row["cells"].get(one)) for one in family.columns]
    return f"| {' | '.join([shown, promise, *cells])} |"


def shown_cell(cell: Row | None) -> str:
    """A ratio stays on the line of its sign."""
    return cell["text"].replace(" ∠", "\N{NO-BREAK SPACE}∠") if cell else "–"


def measured_on(rows: list[Row]) -> str:
    dates = sorted({row["date"] for row in rows})
    versions = sorted({f"{name} {one}" for row in rows for name, one in row["versions"].items()})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return f"Measured on {when}, on a CPU: {', '.join(versions)}."


def unequal(row: Row) -> dict[str, Row]:
    return {name: cell for name, cell in row["cells"].items() if cell["text"] != "equal"}


def note(row: Row, family: Family) -> str:
    """Its smallest setting is the first column that is not equal."""
    name = row["trainer"]
    wrong = unequal(row)
    property_ = next(one for one in family.columns if one in wrong)
    known = NOTES[name]
    tried = (
        f"It ran: [{known.tried}](trainers-{TRAINERS[known.tried].kind})."
        if known.tried in TRAINERS
        else known.tried
    )
    measured = f"{property_} ({PROPERTIES[property_][0]}): {wrong[property_]['text']}"
    return (
        f"- (trainer-{name})=\n  **{name}**: {known.cause}\n"
        f"  *Smallest setting:* {measured}. *Not equal in:* {', '.join(wrong)}."
        f" *Confirmed:* {confirmed(name, wrong)}.\n"
        f"  *Report:* {known.report} *Fix:* {known.fix} {tried}"
    )


def confirmed(name: str, wrong: Mapping[str, Row]) -> str:
    """Which of the cells that are not equal the second program confirms, and which were read."""
    found = {one: found_by_hand().get((name, one)) for one in wrong}
    read = [one for one in wrong if "read" in (found[one] or {})]
    ran = [one for one in wrong if one not in read and agrees(wrong[one], found[one])]
    said = "all" if len(ran) == len(wrong) else ", ".join(ran) or "none"
    return f"{said}; read in the code: {', '.join(read)}" if read else said


if __name__ == "__main__":
    write_page()
