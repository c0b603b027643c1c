"""What of a check's code may leave the trusted side: to a rank, and to the students.

The code that computes the answer is often the solution, or close to it, and a student's function
can inspect its caller. So a rank gets `on_rank` and what that uses, and nothing else. A release
also carries `judge`, and the data of `draw`, `expected` and `mistakes` for one seed.
"""

import ast
import base64
from dataclasses import replace
from typing import Any

from grader.inside.wire import Decoder, encode
from grader.source import CheckSource

_COMPUTED = {"draw", "expected", "mistakes"}
_IMPLEMENTATIONS = "implementations"


def recorded(
    check: CheckSource, inputs: list[dict[str, Any]], answer: dict[str, Any]
) -> CheckSource:
    """`check` with `inputs`, and the `answer` to them, in place of the code that made them."""
    kept = {key: answer[key] for key in ("expected", "mistakes") if key in answer}
    data = encode({"inputs": inputs, "answer": kept})
    record = base64.b64encode(data).decode()
    return replace(
        check, source=reduced(check.source, "on_rank", "judge", _IMPLEMENTATIONS), record=record
    )


def read_record(check: CheckSource) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The inputs and the answer that a release carries. Raises ValueError if they are damaged."""
    [data] = Decoder().feed(base64.b64decode(check.record))
    return data["inputs"], data["answer"]


def what_ranks_need(source: str) -> str:
    """The part of a check that is executed in a rank, where a student's code can read it."""
    return reduced(source, "on_rank")


def what_implementations_need(source: str) -> str:
    """The part of a check that defines what a student's test has to judge."""
    return reduced(source, _IMPLEMENTATIONS)


def reduced(source: str, *entries: str) -> str:
    """`source` with the functions `entries`, what these use, and its imports; comments are lost.

    A function that computes is never included: what `on_rank` needs of one belongs in a helper.
    """
    body = ast.parse(source).body
    defined: dict[str, list[ast.stmt]] = {}
    for node in body:
        for name in _defines(node):
            defined.setdefault(name, []).append(node)
    hidden = (_COMPUTED | {_IMPLEMENTATIONS, "judge"}) - set(entries)
    wanted: set[str] = set()
    waiting = list(entries)
    for node in body:
        if not _defines(node):
            waiting += _names(node)
    while waiting:
        name = waiting.pop()
        if name in defined and name not in wanted | hidden:
            wanted.add(name)
            for node in defined[name]:
                waiting += _names(node)
    lines = source.splitlines()
    parts = []
    for node in body:
        names = _defines(node)
        if not names or wanted & set(names):
            parts.append("\n".join(lines[_first_line(node) - 1 : node.end_lineno]))
    return "\n\n".join(parts) + "\n"


def _defines(node: ast.stmt) -> list[str]:
    """The names that a statement defines and does nothing else; none for an import."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        stored = [n for target in node.targets for n in ast.walk(target)]
        if all(isinstance(n, ast.Name | ast.Tuple | ast.List | ast.expr_context) for n in stored):
            return [n.id for n in stored if isinstance(n, ast.Name)]
    return []


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _names(node: ast.AST) -> list[str]:
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
