"""Text tables with one layout, and numbers formatted so that they can be compared exactly.

`make test` compares a chapter's printed text, character by character, with the stored text. So
a table has one layout and a number has fixed digits. A number of rounding size differs between
processors and is printed as a bound.
"""

from collections.abc import Sequence
from numbers import Integral, Real

Cell = str | bool | Real


def table(headers: Sequence[str], rows: Sequence[Sequence[Cell]], digits: int = 4) -> str:
    """A table as text: numbers right-aligned with `digits` decimals, words left-aligned.

    A column is numeric if all its cells are numbers. True and False become yes and no. Raises
    ValueError if a row and `headers` differ in length, and TypeError for any other kind of cell,
    such as a tensor.
    """
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"a row has {len(row)} cells under {len(headers)} headers: {row!r}")
    texts = [[_text(cell, digits) for cell in row] for row in rows]
    columns = list(zip(headers, *texts, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(_is_figure(row[i]) for row in rows) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if to_the_right else cell.ljust(width)
            for cell, width, to_the_right in zip(cells, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    rule = "  ".join("─" * width for width in widths)
    return "\n".join([line(headers), rule, *map(line, texts)])


def bound(difference: float, limit: float = 1e-6) -> str:
    """A difference that should be rounding error: "< 1e-06" if it is below `limit`, otherwise
    itself.

    An exact 0 is also shown as the bound, because another processor may give 1e-8.
    """
    return f"< {limit:g}" if abs(difference) < limit else f"{difference:.1e}"


def bitwise_difference(difference: float) -> str:
    """A difference that should be exactly 0 on every machine: "none", or itself."""
    return "none" if difference == 0 else f"{difference:.1e}"


def _is_figure(cell: Cell) -> bool:
    return isinstance(cell, Real) and not isinstance(cell, bool)


def _text(cell: Cell, digits: int) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, str | Integral):
        return str(cell)
    if isinstance(cell, Real):
        return f"{float(cell):z.{digits}f}"  # z: no -0.0000, whose sign would be rounding's
    raise TypeError(f"a cell is a string or a number, got {type(cell).__name__}: call .item()?")
