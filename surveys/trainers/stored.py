"""The stored results: what was measured, and what a second program and a certificate found."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "book/reference/trainers.json"
BY_HAND = RESULTS.with_name("trainers_by_hand.json")
CERTIFIED = RESULTS.with_name("trainers_certified.json")
PAGE = RESULTS.with_suffix(".md")
Row = Mapping[str, Any]


def rows(file: Path = RESULTS) -> list[dict[str, Any]]:
    return json.loads(file.read_text()) if file.exists() else []


def by_hand() -> dict[tuple[str, str], Row]:
    """By trainer and property."""
    return {(row.pop("trainer"), row.pop("property")): row for row in rows(BY_HAND)}


def as_json(rows: list[dict[str, Any]]) -> str:
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def agrees(cell: Row, found: Row | None) -> bool:
    """Whether a stored cell and the second program say the same, in all four digits. A line that
    was read says so.
    """
    if found is None:
        return False
    if found.get("ratio") == "nan":
        return cell["text"] == "not finite"
    if "ratio" in found:
        return f"ratio {found['ratio']:.4f}, cosine {found['cosine']:.4f}" in cell["detail"]
    return "read" in found
