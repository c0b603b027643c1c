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
from typing import Any

from labkit.launch.arguments import parse_arguments
from surveys.trainers.environments import repeat, report
from surveys.trainers.families import PROPERTIES, properties
from surveys.trainers.measure import measure
from surveys.trainers.page import NOT_IMPORTED, store_rows
from surveys.trainers.promises import entries
from surveys.trainers.trainers import TRAINERS


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


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        sys.exit(repeat(sys.argv[2:]))
    arguments = arguments_of_this_lab()
    judged = measure(arguments.trainers, arguments.properties)
    print(report(arguments.trainers, arguments.properties, judged))
    if arguments.store:
        # A row that could not be imported stays as it is stored, and stops no other.
        texts = ((name, cell.text) for (name, _), cell in judged.items())
        ran = {name for name, text in texts if text in NOT_IMPORTED or text[-5:] != "Error"}
        if failed := ", ".join({name for name, _ in judged} - ran):
            sys.exit(f"Nothing is stored: {failed} ran in no cell. Its errors are listed above.")
        store_rows(judged)
