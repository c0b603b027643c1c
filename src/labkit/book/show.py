"""Show a part of this project's code in a chapter, read from its file and never copied."""

import ast
import inspect
import textwrap
from typing import Any

from IPython.display import Markdown


def source(*things: Any, docstrings: bool = True) -> Markdown:
    """The source code of functions, classes, or modules, as one highlighted block of Python.

    `docstrings=False` leaves out the docstrings of functions and classes, for pages that explain
    them.
    """
    texts = [textwrap.dedent(inspect.getsource(thing)).rstrip() for thing in things]
    if not docstrings:
        texts = [_without_docstring(text) for text in texts]
    return Markdown("```python\n" + "\n\n\n".join(texts) + "\n```")


def _without_docstring(text: str) -> str:
    definition = ast.parse(text).body[0]
    if not isinstance(definition, ast.FunctionDef | ast.ClassDef) or not ast.get_docstring(
        definition
    ):
        return text
    docstring = definition.body[0]
    if len(definition.body) == 1 or docstring.lineno == definition.lineno:
        return text  # nothing would be left
    lines = text.splitlines()
    del lines[docstring.lineno - 1 : docstring.end_lineno]
    return "\n".join(lines)
