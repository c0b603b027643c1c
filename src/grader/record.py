"""A visible check for students: its inputs and answers as data, and of its code what ranks need.

The code that computes the answer is often the solution, or close to it. So a release carries what
that code said for one seed, and not the code: `draw`, `expected`, `mistakes`, and whatever only
they use, are left out.
"""

from __future__ import annotations

import ast
import base64
from dataclasses import replace
from typing import Any

from grader.inside.wire import Decoder, encode
from grader.source import CheckSource

_KEPT = ("on_rank", "judge")
_COMPUTED = ("draw", "expected", "mistakes")


def recorded(
    check: CheckSource, inputs: list[dict[str, Any]], answer: dict[str, Any]
) -> CheckSource:
    """`check` with `inputs`, and the `answer` to them, in place of the code that made them."""
    kept = {key: answer[key] for key in ("expected", "mistakes") if key in answer}
    data = encode({"inputs": inputs, "answer": kept})
    record = base64.b64encode(data).decode()
    return replace(check, source=what_ranks_need(check.source), record=record)


def read_record(check: CheckSource) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The inputs and the answer that a release carries. Raises ValueError if they are damaged."""
    [data] = Decoder().feed(base64.b64decode(check.record))
    return data["inputs"], data["answer"]


def what_ranks_need(source: str) -> str:
    """`source` without its computing functions and what only they use; comments are lost."""
    body = ast.parse(source).body
    defined = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    wanted: set[str] = set()
    waiting = [name for name in _KEPT if name in defined]
    # What stands outside of functions is kept, and so is what it uses.
    for node in body:
        if node not in defined.values():
            waiting += _names(node, defined)
    while waiting:
        name = waiting.pop()
        if name not in wanted:
            wanted.add(name)
            waiting += _names(defined[name], defined)
    wanted -= set(_COMPUTED)
    lines = source.splitlines()
    parts = []
    for node in body:
        if node in defined.values() and node.name not in wanted:
            continue
        parts.append("\n".join(lines[_first_line(node) - 1 : node.end_lineno]))
    return "\n\n".join(parts) + "\n"


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _names(node: ast.AST, defined: dict[str, Any]) -> list[str]:
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in defined]
