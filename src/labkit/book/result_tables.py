"""Result tables of a page, with one glyph for every pair of ratio and cosine.

A chapter prints `labkit.tables.table`, and nbval compares that text. On the built page it becomes
an HTML table whose first column stays in view while the rest scrolls. The verdict comes next.
Beside each row's name stands an arrow against a circle: how long the gradient is, and where it
points, if 1 is right. A page's own tables with a verdict get the same. `labkit.book.finish` calls
this for each page.
"""

import math
import re
from collections.abc import Iterator, Sequence
from copy import copy
from typing import NamedTuple

from bs4 import BeautifulSoup, Tag

RULE = re.compile(r"─+(?:  ─+)+")
NUMBER = re.compile(r"-?\d+(\.\d*)?(e[+-]\d+)?|nan|inf")
VERDICTS = {
    *("verdict", "right", "equal", "copies", "averaged?", "same bits", "gradients equal"),
    "certificate",
    *("equal on all ranks", "all ranks equal", "equal at every step", "right step"),
    *("replicas after a step", "full batch's gradient"),
}
# Not verdicts, but what a table is about: how far from the right result, or how much faster.
DISTANCE = re.compile(r"from (one process|full batch|16).*|(gradient|largest) error|.+ ÷ .+")
# As on the pages: up to 0.5 % in the ratio, and 10⁻⁴ in the cosine.
RATIO_OFF, COSINE_OFF = 0.005, 1e-4
LONGEST = 1.45  # the radius is 1; a longer arrow ends there, with two heads
CIRCLE = '<circle r="1"></circle><circle class="tip" r=".16" cx="1"></circle>'


# A cell of the page on trainers: a ratio and a cosine, or one of W = 2 ranks' usual results.
BOTH = re.compile(r"(\d+\.\d+)\s∠ (\d\.\d+)$")
USUAL = {"no step": "0", "not finite": "nan", "1/W": "0.5", "k/K": "0.67", "W": "2"}


class TextTable(NamedTuple):
    """The cells of a table that was printed as text, all stripped."""

    headers: list[str]
    rows: list[list[str]]


def show_tables(page: BeautifulSoup) -> None:
    """Replace every text table in the outputs of `page`."""
    for block in page.select("div.cell_output pre"):
        parts = list(_parts(block.get_text()))
        output = block.find_parent(class_="output")
        if output is None or not any(isinstance(part, TextTable) for part in parts):
            continue
        for part in parts:
            is_table = isinstance(part, TextTable)
            output.insert_before(_html(page, part) if is_table else _text(output, part))
        output.decompose()
    for table in page.select("article .pst-scrollable-table-container > table"):
        _show_verdicts(page, table)


def _show_verdicts(page: BeautifulSoup, table: Tag) -> None:
    """Put the verdict second in a page's own table, and glyphs beside what is not right."""
    lines = [row.find_all(["th", "td"], recursive=False) for row in table.select("tr")]
    headers, *rows = [[cell.get_text().strip() for cell in line] for line in lines]
    found, pairs = TextTable(headers, rows), _pairs(headers)
    if not pairs and VERDICTS.isdisjoint(headers[1:]):
        return
    table.parent["class"].append("result-table")
    table["class"] = [*table.get("class", []), *(["glyphs"] if pairs else [])]
    for line, texts in zip(lines[1:], rows, strict=True):
        for ratio, cosine in pairs[:1]:
            _add(line[0], _glyph(texts[ratio], texts[cosine]))
        for cell, text in zip(line, texts, strict=True):
            both = BOTH.search(text)
            usual = USUAL.get(re.sub(r"^[✗§○△] ", "", text), "")
            glyph = _glyph(*both.groups() if both else (usual, "1.0"))
            if "wrong" in glyph:  # two numbers that round to 1 need not be equal
                (cell.p or cell).insert(1, BeautifulSoup(glyph, "html.parser"))
    for line in lines:
        for i in reversed(_order(found)):
            line[i].parent.insert(0, line[i])


def _add(cell: Tag, glyph: str) -> None:
    if glyph:
        cell.append(BeautifulSoup(glyph, "html.parser"))


def _parts(text: str) -> Iterator[str | TextTable]:
    """`text` in order: tables, and what stands between them."""
    lines, begun = text.rstrip("\n").split("\n"), 0
    for number, line in enumerate(lines):
        if number <= begun or not _is_rule(lines, number):
            continue
        if any(part.strip() for part in lines[begun : number - 1]):
            yield "\n".join(lines[begun : number - 1]).strip("\n")
        starts = [match.start() for match in re.finditer("─+", line)]
        end = number + 1
        while end < len(lines) and _fits(lines[end], starts) and not _is_rule(lines, end + 1):
            end += 1
        yield TextTable(
            _cells(lines[number - 1], starts),
            [_cells(row, starts) for row in lines[number + 1 : end]],
        )
        begun = end
    if any(line.strip() for line in lines[begun:]):
        yield "\n".join(lines[begun:]).strip("\n")


def _is_rule(lines: Sequence[str], number: int) -> bool:
    """Whether the line is the one below a table's headers."""
    return 0 < number < len(lines) and RULE.fullmatch(lines[number].rstrip()) is not None


def _fits(line: str, starts: Sequence[int]) -> bool:
    """Whether a line is a row: it has something, and blanks between its columns."""
    between = (line[start - 2 : start] for start in starts[1:])
    return bool(line.strip()) and all(gap.strip() == "" for gap in between)


def _cells(line: str, starts: Sequence[int]) -> list[str]:
    ends = [*starts[1:], None]
    return [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def _text(output: Tag, text: str) -> Tag:
    """A copy of an output with another text."""
    copied = copy(output)
    copied.pre.string = text
    return copied


def _html(page: BeautifulSoup, found: TextTable) -> Tag:
    """A table in a box that scrolls."""
    box = page.new_tag("div", attrs={"class": "result-table", "tabindex": "0", "role": "group"})
    pairs, marks = _pairs(found.headers), _marks(found)
    box["aria-label"] = f"Results: {', '.join(filter(None, found.headers))}"
    table = page.new_tag("table", attrs={"class": "glyphs"} if pairs else {})
    order, heads = _order(found), list(found.headers)
    for ratio, cosine in pairs[1:] and pairs:
        heads[cosine] = heads[ratio].removesuffix("ratio") + "cosine"
    numeric = {i for i in order if all(_is_number(row[i]) for row in found.rows)}
    head = page.new_tag("tr")
    for i in order:
        name = "th" if heads[i] else "td"
        head.append(_cell(page, name, heads[i], i in numeric, {"scope": "col"}))
    table.append(page.new_tag("thead"))
    table.thead.append(head)
    table.append(page.new_tag("tbody"))
    for row in found.rows:
        line = page.new_tag("tr")
        for i in order:
            cell = _cell(page, "td", row[i], i in numeric)
            for ratio, cosine in pairs[:1] if i == 0 else [p for p in pairs[1:] if p[0] == i]:
                _add(cell, _glyph(row[ratio], row[cosine]))
            if i + 1 in marks:
                cell.append(_mark(page, found.headers[i + 1], row[i + 1]))
            line.append(cell)
        table.tbody.append(line)
    box.append(table)
    return box


def _pairs(headers: Sequence[str]) -> list[tuple[int, int]]:
    """The columns of each ratio and its cosine: the next column, or the only one."""
    ratios = [i for i, name in enumerate(headers) if name.split(" ")[-1] == "ratio"]
    cosines = [i for i, name in enumerate(headers) if name == "cosine"]
    if len(ratios) == len(cosines) == 1 and ratios < cosines:
        return [(ratios[0], cosines[0])]
    return [(i, i + 1) for i in ratios if i + 1 in cosines]


def _marks(found: TextTable) -> set[int]:
    """Verdicts, yes or no, that more than one group of columns ends with."""
    again = {name for name in VERDICTS if found.headers.count(name) > 1}
    return {
        i
        for i, name in enumerate(found.headers)
        if i > 1 and name in again and all(row[i] in ("yes", "no") for row in found.rows)
    }


def _order(found: TextTable) -> list[int]:
    """The columns, the verdict second: a phone shows no more than three or four.

    Of several pairs, the ratios come together, since each has a glyph. The verdicts of several
    groups are no columns: each becomes a mark in the cell before it.
    """
    headers, pairs, marks = found.headers, _pairs(found.headers), _marks(found)
    later = range(2, len(headers))
    once = [i for i in later if headers[i] in VERDICTS and headers.count(headers[i]) == 1]
    first = (once or [i for i in later if DISTANCE.fullmatch(headers[i])])[:1]
    if len(pairs) > 1:
        first = [*once, *(ratio for ratio, _ in pairs)]
    rest = (i for i in range(1, len(headers)) if i not in first and i not in marks)
    return [0, *first, *rest]


def _mark(page: BeautifulSoup, header: str, text: str) -> Tag:
    """A check mark or a cross in place of yes or no."""
    mark = page.new_tag("span", attrs={"class": "agrees" if text == "yes" else "agrees wrong"})
    mark["role"], mark["aria-label"] = "img", f"{header}: {text}"
    mark.string = "✓" if text == "yes" else "✗"
    return mark


def _is_number(cell: str) -> bool:
    return not cell or NUMBER.fullmatch(cell.removesuffix("%").removeprefix("< ")) is not None


def _cell(
    page: BeautifulSoup, name: str, text: str, numeric: bool, attrs: dict[str, str] | None = None
) -> Tag:
    cell = page.new_tag(name, attrs=attrs if name == "th" and attrs else {})
    if numeric:
        cell["class"] = "number"
    # A name may break after an underscore or a dot, and nowhere else.
    for i, part in enumerate(re.split(r"(?<=[_.])(?=[A-Za-z])", text)):
        if i:
            cell.append(page.new_tag("wbr"))
        cell.append(part)
    return cell


def _glyph(ratio: str, cosine: str) -> str:
    """An arrow against a circle of radius 1, which ends at the right gradient's tip."""
    if not (NUMBER.fullmatch(ratio) and NUMBER.fullmatch(cosine)):
        return ""
    length, along = float(ratio), float(cosine)
    verdict = said(length, along, ratio, cosine)
    wrong = "" if verdict == "right" else " wrong"
    drawn = CIRCLE if verdict in ("absent", "not finite") else CIRCLE + _arrow(length, along)
    return (
        f'<svg class="verdict-glyph{wrong}" viewBox="-1.5 -1.5 3 3" role="img" '
        f'aria-label="{verdict}">{drawn}</svg>'
    )


def _arrow(length: float, along: float) -> str:
    """From the center, turned counterclockwise by the angle whose cosine is `along`."""
    drawn = min(length, LONGEST)
    head = min(0.5, 0.8 * drawn)
    ends = (drawn, drawn - head) if length > LONGEST else (drawn,)
    heads = "".join(f"M{e:.2f} 0l-{head:.2f} -{0.6 * head:.2f}v{1.2 * head:.2f}z" for e in ends)
    turned = -math.degrees(math.acos(max(-1.0, min(1.0, along))))
    return (
        f'<g transform="rotate({turned:.1f})"><line x2="{drawn - head:.2f}"></line>'
        f'<path d="{heads}"></path></g>'
    )


def said(ratio: float, cosine: float, *printed: str) -> str:
    """The verdict: right, too short, too long, turned, absent, or not finite.

    `printed` are the two numbers as they stand on a page, if that rounds them.
    """
    if ratio == 0:
        return "absent"
    if not (math.isfinite(ratio) and math.isfinite(cosine)):
        return "not finite"
    half = [0.5 * 10 ** -len(text.partition(".")[2]) for text in printed] or [0.0, 0.0]
    if cosine < 1 - max(COSINE_OFF, half[1]):
        return "turned"
    if abs(ratio - 1) <= max(RATIO_OFF, half[0]):
        return "right"
    return "too short" if ratio < 1 else "too long"
