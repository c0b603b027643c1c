"""Which gradient does each trainer hand its optimizer? A table.

    python -m surveys.trainers run lightning    # in its locked environment, beside what is stored
    python -m surveys.trainers                  # all trainers that are installed here
    python -m surveys.trainers --trainers plain transformers --properties W K WxK
    python -m surveys.trainers --store          # and print the results on the page of the book

Every trainer takes a step with a tiny random model. Its optimizer keeps the gradient. That is
compared with one backward of one process, which computes the loss in the second column.
A cell says equal, or what the gradient is multiplied by: W = 2, K = 3, k/K = 2/3 (the last window),
G = 2 steps per generation, N/N_G (tokens of the step, and of the generation). Where no factor
repairs it, the cell has the ratio and the cosine. A trainer that is not installed is named.

The properties:
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from labkit.launch.arguments import parse_arguments
from labkit.tables import table
from surveys.trainers.environments import repeat
from surveys.trainers.families import FAMILIES, PROPERTIES, properties
from surveys.trainers.measure import Cell, Judged, measure
from surveys.trainers.page import store_rows
from surveys.trainers.promises import entries
from surveys.trainers.trainers import TRAINERS, version


def arguments_of_this_lab() -> argparse.Namespace:
    listed = "".join(f"  {name:12} {text}\n" for name, (text, _) in PROPERTIES.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    some: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    for option, names in (("--trainers", list(TRAINERS)), ("--properties", properties())):
        text = f"default: all of {', '.join(names)}"
        parser.add_argument(option, **some, choices=names, default=names, help=text)
    parser.add_argument("--store", action="store_true", help="needs all properties")
    given = parse_arguments(parser)
    if given.store and given.properties != properties():
        parser.error("--store replaces whole rows: leave --properties out.")
    try:
        entries()  # a mistake in promises.toml is found before minutes of measuring
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    return given


def main(trainers: Sequence[str], properties: Sequence[str], store: bool) -> None:
    judged = measure(trainers, properties)
    print(report(trainers, properties, judged))
    if store:
        store_rows(judged)


def report(trainers: Sequence[str], properties: Sequence[str], judged: Judged) -> str:
    """The versions, a table per family, and what was measured where a cell is not equal."""
    used = dict.fromkeys(["torch", *(one for name in trainers for one in TRAINERS[name].needs)])
    parts = [", ".join(f"{one} {version(one)}" for one in used if version(one))]
    for family in FAMILIES.values():
        members = [name for name in trainers if TRAINERS[name].family == family]
        columns = [one for one in properties if one in family.columns]
        if members and columns:
            parts.append(table_of(members, columns, judged))
    details = [
        [*key, " ".join(cell.detail.split())[:90]]
        for key, cell in judged.items()
        if cell.detail and key[1] in properties
    ]
    if details:
        parts.append(table(["trainer", "property", "measured"], details))
    return "\n\n".join(parts)


def table_of(trainers: Sequence[str], columns: Sequence[str], judged: Judged) -> str:
    rows = []
    for name in trainers:
        trainer = TRAINERS[name]
        missing = " ".join(trainer.missing())
        said = f"not installed: {missing}" if missing else trainer.wanted
        rows.append([name, said, *(judged.get((name, one), Cell("–")).text for one in columns)])
    return table(["trainer", "compared with", *columns], rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        sys.exit(repeat(sys.argv[2:]))
    arguments = arguments_of_this_lab()
    main(arguments.trainers, arguments.properties, arguments.store)
