"""Exhibits of labkit's museum, as text, for checks in which a student's test has to reject them.

labkit is not visible in the sandbox: of its museum only the exhibits that a check names travel
there.
"""

from pathlib import Path

import labkit

_MUSEUM = Path(labkit.__file__).parent / "testing" / "museum"
# What an exhibit's file imports; its label is of no use in a rank.
_LABEL = "class Exhibit:\n    def __init__(self, wrap, **label):\n        self.wrap = wrap\n"


def museum_sources(names: tuple[str, ...]) -> dict[str, str]:
    """{module: source} of the named exhibits and of what they import, in the order to load them.

    Raises FileNotFoundError for an exhibit that does not exist.
    """
    if not names:
        return {}
    empty = dict.fromkeys(("labkit", "labkit.testing", "labkit.testing.museum"), "")
    parts = {"labkit.testing.museum.parts": (_MUSEUM / "parts.py").read_text()}
    exhibits = {
        f"labkit.testing.museum.{name}": (_MUSEUM / f"{name}.py").read_text() for name in names
    }
    return empty | {"labkit.testing.museum.exhibit": _LABEL} | parts | exhibits
