"""What each trainer promises, the verdict on each cell, and the page's notes: `promises.toml`."""

import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("promises.toml")
# What a cell shows, and what it means.
VERDICTS = {
    "broken": ("✗", "a quoted promise is not met"),
    "no promise": ("○", "nothing is promised; we say what we measured"),
    "documented": ("§", "the source says that it is so"),
    "your loss": ("△", "the trainer averages the losses that it gets, and this is ours"),
    "kept": ("", "a quoted promise is met"),
}
NO_PROMISE = "no promise"


class Promise(NamedTuple):
    """A quotation of at most 25 words, where it stands, and what we opened to read it.

    `checked` is the date on which a second reader compared it, or nothing.
    """

    quote: str
    address: str
    opened: str
    checked: str = ""


class Entry(NamedTuple):
    """A row's promise, if any, and its note in Markdown. `loss` was put in, and says whose it is.

    `unequal` is the verdict on cells that are not equal, but for those in `cells`. `tried` is how
    the fix was run: another trainer of the suite, or a sentence.
    """

    promise: Promise | None = None
    loss: str = "the trainer's own"
    unequal: str = NO_PROMISE
    cells: dict[str, str] = {}  # noqa: RUF012
    cause: str = "The cause is not known yet."
    report: str = "We have not searched."
    fix: str = "None yet."
    tried: str = "It was not run."

    def verdict(self, property_: str, text: str) -> str:
        """On a cell that says `text`."""
        if text == "equal":
            return "kept" if self.promise else NO_PROMISE
        return self.cells.get(property_, self.unequal)


@cache
def entries() -> dict[str, Entry]:
    """By trainer. Raises ValueError where a verdict or a quotation is not one."""
    read = tomllib.loads(FILE.read_text())
    sources = {name: Promise(**one) for name, one in read["sources"].items()}
    for name, source in sources.items():
        if len(source.quote.split()) > 25:
            raise ValueError(f"{FILE.name}: the quotation of {name} has more than 25 words.")
    found = {}
    for name, row in read["rows"].items():
        source = row.pop("source", None)
        if unknown := row.keys() - set(Entry._fields):
            raise ValueError(f"{FILE.name}: {name} has the unknown {', '.join(sorted(unknown))}.")
        if source and source not in sources:
            raise ValueError(f"{FILE.name}: {name} has the source {source!r}, which is none.")
        found[name] = Entry(sources[source] if source else None, **row)
        for verdict in (found[name].unequal, *found[name].cells.values()):
            if verdict not in VERDICTS:
                known = ", ".join(VERDICTS)
                raise ValueError(f"{FILE.name}: {name}: {verdict!r} is none of: {known}.")
    return found


def entry(name: str) -> Entry:
    """Of a trainer; one that is not in the file yet promises nothing."""
    return entries().get(name, Entry())
