"""One style sheet for all pages of the built book, with the rules that they can use.

The theme's pages load a dozen style sheets of 430 kB before anything is painted, and most rules are
for parts of Bootstrap that no page has. On a slow mobile network that takes 2.5 seconds.
A rule stays if the names of its classes and ids occur in a page or in a script.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import tinycss2

SHEET = "_static/pages.css"
LINK = re.compile(r'<link\b(?=[^>]*\brel="stylesheet")[^>]*\bhref="([^"]+)"[^>]*>\n*')
# Keeps the page's original links: the next build may not render this page again.
FORMER = "data-former"
FORMER_LINKS = re.compile(rf'\b{FORMER}="([^"]*)"')
RELATIVE_URL = re.compile(r"""url\((["']?)(?!data:|https?:|[/#%"'])([^)"']+)\1\)""")
CHARSET = '@charset "utf-8";'
GROUPS = ("media", "supports")
# Has the words of all pages, and makes no element.
NOT_READ = "searchindex.js"
# A script that joins a class from parts has its beginning: "bs-tooltip-".
BEGINNING = re.compile(r"[A-Za-z]{2}[\w-]*-")


class NamesOfPages:
    """The classes and ids that elements of the pages can have.

    Every word of the pages' HTML and of their scripts counts, so some names are kept that no
    element has.
    """

    def __init__(self, pages: Iterable[str], scripts: Iterable[str]) -> None:
        words = {word for text in scripts for word in re.findall(r"[\w-]+", text)}
        self._beginnings = tuple(word for word in words if BEGINNING.fullmatch(word))
        self._words = words.union(*(re.findall(r"[\w-]+", text) for text in pages))

    def __contains__(self, name: str) -> bool:
        return name in self._words or name.startswith(self._beginnings)


def write_one_sheet(site: Path, pages: dict[Path, str]) -> dict[Path, str]:
    """Write the sheets that `pages` link to, without unused rules, to one; return the new pages.

    `pages` are the HTML of every page below `site`. Their sheets stay where they are. Gathering
    again gives the same, and takes in what a build has changed since.
    """
    own = site / SHEET
    sheets = _merged([_sheets(path, text) for path, text in pages.items()])
    if not sheets:
        return pages
    scripts = [path for path in sorted(site.rglob("*.js")) if path.name != NOT_READ]
    names = NamesOfPages(pages.values(), (path.read_text(encoding="utf-8") for path in scripts))
    parts = ["\n".join(_used(_rules(sheet, site), names)) for sheet in sheets]
    css = "\n".join([CHARSET, *parts]) + "\n"
    own.write_text(css, encoding="utf-8")
    version = hashlib.sha256(css.encode()).hexdigest()[:8]
    return {path: _with_one_link(path, text, own, version) for path, text in pages.items()}


def _links(text: str) -> list[str]:
    """The addresses of the page's sheets, as it came from the build."""
    former = FORMER_LINKS.search(text)
    return former[1].split() if former else LINK.findall(text)


def _sheets(path: Path, text: str) -> list[Path]:
    addresses = (unquote(urlsplit(link).path) for link in _links(text))
    return [Path(os.path.normpath(path.parent / address)) for address in addresses]


def _merged(lists: Iterable[list[Path]]) -> list[Path]:
    """All sheets, each once, in an order that agrees with the pages'."""
    merged: list[Path] = []
    for sheets in lists:
        place = 0
        for sheet in sheets:
            if sheet not in merged:
                merged.insert(place, sheet)
            place = merged.index(sheet) + 1
    return merged


def _with_one_link(path: Path, text: str, sheet: Path, version: str) -> str:
    address = f"{Path(os.path.relpath(sheet, path.parent)).as_posix()}?v={version}"
    first = LINK.search(text)
    if first is None:
        return text
    former = " ".join(_links(text))
    link = f'<link {FORMER}="{former}" href="{address}" rel="stylesheet"/>\n'
    return text[: first.start()] + link + LINK.sub("", text[first.end() :])


def _rules(sheet: Path, site: Path) -> Iterator[Any]:
    """The rules of a style sheet and of those that it imports, with addresses from `_static`."""

    def moved(found: re.Match[str]) -> str:
        file = os.path.normpath(sheet.parent / found[2])
        return f"url({Path(os.path.relpath(file, (site / SHEET).parent)).as_posix()})"

    css = RELATIVE_URL.sub(moved, sheet.read_text(encoding="utf-8"))
    for rule in tinycss2.parse_stylesheet(css, skip_whitespace=True):
        if rule.type == "at-rule" and rule.lower_at_keyword == "import":
            (address,) = (token for token in rule.prelude if token.type != "whitespace")
            yield from _rules(Path(os.path.normpath(sheet.parent / address.value)), site)
        else:
            yield rule


def _used(rules: Iterable[Any], names: NamesOfPages) -> Iterator[str]:
    """The CSS of what can match. Comments with an exclamation mark hold licenses, and stay."""
    for rule in rules:
        if rule.type == "qualified-rule":
            selectors = _selectors(rule.prelude)
            if matching := [one for one in selectors if all(n in names for n in _named(one))]:
                prelude = ",".join(tinycss2.serialize(one).strip() for one in matching)
                content = [token for token in rule.content if token.type != "comment"]
                yield f"{prelude}{{{tinycss2.serialize(content).strip()}}}"
        elif rule.type == "at-rule" and rule.lower_at_keyword in GROUPS:
            inside = tinycss2.parse_rule_list(rule.content, skip_whitespace=True)
            if kept := "\n".join(_used(inside, names)):
                yield f"@{rule.at_keyword}{tinycss2.serialize(rule.prelude)}{{{kept}}}"
        elif rule.type == "at-rule" and rule.lower_at_keyword == "charset":
            continue  # the one sheet begins with its own
        elif rule.type == "at-rule" or (rule.type == "comment" and rule.value.startswith("!")):
            yield rule.serialize()


def _selectors(prelude: list[Any]) -> list[list[Any]]:
    """The selectors of a list with commas, as tokens."""
    selectors: list[list[Any]] = [[]]
    for token in prelude:
        if token == ",":
            selectors.append([])
        elif token.type != "comment":
            selectors[-1].append(token)
    return selectors


def _named(selector: list[Any]) -> Iterator[str]:
    """The classes and ids that an element must have to match. Those inside parentheses, as in
    :not(), do not count.
    """
    for before, token in zip([None, *selector], selector, strict=False):
        if token.type == "hash" or (token.type == "ident" and before == "."):
            yield token.value
