"""How the page of the book shows the stored results. `python -m surveys.trainers.page` prints it.

A verdict belongs to a cell, and only a broken one is in color. The file of results gets verdicts
and promises, too, so that it can be read without this program.
"""

import datetime
from collections.abc import Mapping
from typing import Any

from surveys.trainers.families import FAMILIES, PROPERTIES, Family
from surveys.trainers.promises import VERDICTS, Entry, entry
from surveys.trainers.stored import PAGE, RESULTS, Row, agrees, as_json, by_hand, rows
from surveys.trainers.trainers import TRAINERS, version

START, END = "% The next lines are written by surveys/trainers.\n", "% Until here.\n"
NOT_IMPORTED = "ModuleNotFoundError", "ImportError"


def store_rows(judged: Mapping[tuple[str, str], tuple[str, str]]) -> None:
    """Store the rows of the trainers that could be imported, and print all rows on the page."""
    kept = {one["trainer"]: one for one in rows()}
    failed = {name for (name, _), cell in judged.items() if cell[0] in NOT_IMPORTED}
    for name in dict.fromkeys(name for name, _ in judged if name not in failed):
        kept[name] = {
            "trainer": name,
            "date": datetime.date.today().isoformat(),
            "versions": {one: version(one) for one in ("torch", *TRAINERS[name].needs)},
            "cells": {
                property_: {"text": cell[0], "detail": cell[1]}
                for (of, property_), cell in judged.items()
                if of == name
            },
        }
    write([kept[name] for name in TRAINERS if name in kept])


def write(results: list[dict[str, Any]]) -> None:
    """Both files; neither is touched before both texts exist."""
    full = [with_verdicts(row) for row in results]
    before, rest = PAGE.read_text().split(START)
    page = before + START + printed(full) + END + rest.split(END)[1]
    RESULTS.write_text(as_json(full))
    PAGE.write_text(page)


def with_verdicts(row: Row) -> dict[str, Any]:
    known = entry(row["trainer"])
    cells = {
        name: {"text": cell["text"], "detail": cell["detail"]}
        | {"verdict": known.verdict(name, cell["text"])}
        for name, cell in row["cells"].items()
    }
    promise = known.promise._asdict() if known.promise else None
    return {**row, "loss": known.loss, "promise": promise, "cells": cells}


def printed(results: list[Row]) -> str:
    """A count, and a section per family: its table, and what is not equal."""
    lines = [counted(results), ""]
    return "\n".join([*lines, *(line for kind in FAMILIES for line in section(kind, results))])


def counted(results: list[Row]) -> str:
    cells = [cell for row in results for cell in row["cells"].values()]
    equal = sum(cell["text"] == "equal" for cell in cells)
    others = [cell["verdict"] for cell in cells if cell["text"] != "equal"]
    counts = ", ".join(f"{others.count(one)} *{one}*" for one in VERDICTS if one in others)
    kept = sum(cell["verdict"] == "kept" for cell in cells)
    return (
        f"{len(results)} rows have {len(cells)} cells. {equal} are equal; {kept} of these are"
        f" *kept* promises, and {equal - kept} have none. Of the other {len(others)}: {counts}."
    )


def section(kind: str, results: list[Row]) -> list[str]:
    family = FAMILIES[kind]
    own = [row for row in results if TRAINERS[row["trainer"]].kind == kind]
    if not own:
        return []
    lines = [f"(trainers-{kind})=", f"## {family.title}", "", family.chapter, ""]
    heads = (f"[{name}]({PROPERTIES[name][1]})" for name in family.columns)
    lines += [
        f"| trainer | verdict | compared with | {' | '.join(heads)} |",
        "|---" * (3 + len(family.columns)) + "|",
    ]
    order = list(VERDICTS)
    ranked = sorted(own, key=lambda row: order.index(row_verdict(row)))
    lines += [line_of(row, family) for row in ranked]
    notes = [note(row, family) for row in own]
    return [*lines, "", "Promises, causes, and versions:", "", *notes, ""]


def line_of(row: Row, family: Family) -> str:
    name = row["trainer"]
    cells = [shown_cell(row["cells"].get(one)) for one in family.columns]
    shown = f"[{name}](trainer-{name})", row_verdict(row), TRAINERS[name].wanted, *cells
    return f"| {' | '.join(shown)} |"


def row_verdict(row: Row) -> str:
    """Broken if one of its cells is; else the most frequent one of its cells that are not equal.

    If all are equal: whether that was promised.
    """
    found = [cell["verdict"] for cell in (unequal(row) or row["cells"]).values()]
    return "broken" if "broken" in found else max(found, key=found.count)


def shown_cell(cell: Row | None) -> str:
    """A ratio stays on the line of its sign."""
    if not cell:
        return "–"
    text = cell["text"].replace(" ∠", "\N{NO-BREAK SPACE}∠")
    if text == "equal":
        return text
    verdict = cell["verdict"]
    style = f"verdict {verdict.replace(' ', '-')}"
    return f'<span class="{style}" title="{verdict}">{VERDICTS[verdict][0]}</span> {text}'


def unequal(row: Row) -> dict[str, Row]:
    return {name: cell for name, cell in row["cells"].items() if cell["text"] != "equal"}


def note(row: Row, family: Family) -> str:
    """The promise, then for what is not equal: what happens, the smallest setting, the fix."""
    name, known = row["trainer"], entry(row["trainer"])
    if known.promise:
        quote = known.promise.quote.replace("*", r"\*")
        again = f"; checked again on {known.promise.checked}" if known.promise.checked else ""
        said = f"[“{quote}”]({known.promise.address}) (opened: {known.promise.opened}{again})"
    else:
        said = "no promise"
    versions = ", ".join(f"{one} {version}" for one, version in row["versions"].items())
    lines = [f"- (trainer-{name})=", f"  **{name}**: {said}. *Loss:* {known.loss}."]
    if wrong := unequal(row):
        lines += [f"  {known.cause}", f"  {setting(row, family, wrong)} *Report:* {known.report}"]
        lines += [f"  *Fix:* {known.fix} {how_tried(known)}"]
    return "\n".join([*lines, f"  *Measured* on {row['date']}: {versions}."])


def setting(row: Row, family: Family, wrong: Mapping[str, Row]) -> str:
    """The smallest one is the first column that is not equal."""
    first = next(one for one in family.columns if one in wrong)
    verdicts: dict[str, list[str]] = {}
    for name, cell in wrong.items():
        verdicts.setdefault(cell["verdict"], []).append(name)
    said = "; ".join(f"{one}: {', '.join(names)}" for one, names in verdicts.items())
    measured = f"{first} ({PROPERTIES[first][0]}): {wrong[first]['text']}"
    return (
        f"*Smallest setting:* {measured}. *Verdicts:* {said}."
        f" *Confirmed by formula:* {confirmed(row['trainer'], wrong)}."
    )


def how_tried(known: Entry) -> str:
    if known.tried in TRAINERS:
        return f"It ran: [{known.tried}](trainers-{TRAINERS[known.tried].kind})."
    return known.tried


def confirmed(name: str, wrong: Mapping[str, Row]) -> str:
    """Which of the cells that are not equal the second program confirms, and which were read."""
    found = {one: by_hand().get((name, one)) for one in wrong}
    read = [one for one in wrong if "read" in (found[one] or {})]
    ran = [one for one in wrong if one not in read and agrees(wrong[one], found[one])]
    said = "all" if len(ran) == len(wrong) else ", ".join(ran) or "none"
    return f"{said}; read in the code: {', '.join(read)}" if read else said


if __name__ == "__main__":
    write(rows())
