"""The directive `api`: classes, functions, and modules, as their docstrings describe them.

    ```{api} miniddp.MiniDDP
    ```

So the page cannot differ from what `help(…)` prints. A class is shown with its public methods, and
a module with the public classes and functions that it defines. This module is a Sphinx extension.
"""

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_WIDTH = 72  # characters of a signature's line, which fit on a laptop
_LISTS = ("Args:", "Raises:", "Returns:", "Attributes:", "Yields:")
_ITEM = re.compile(r"^ {4}(?=\S)", re.MULTILINE)


class ApiDirective(SphinxDirective):
    """One section for what the argument names."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        try:
            found = named(name)
        except (ImportError, AttributeError) as error:
            raise self.error(f"there is no {name}: {error}") from None
        section = nodes.section(ids=[nodes.make_id(name)])
        section += nodes.title("", "", nodes.literal("", name.partition(".")[2]))
        for line in _described(found, name.rpartition(".")[2]):
            read = nodes.Element()
            self.state.nested_parse(StringList(line.splitlines(), source=name), 0, read)
            section += read.children
        return [section]


def named(name: str) -> Any:
    """The object with this dotted name. Raises ImportError or AttributeError."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        module, _, attribute = name.rpartition(".")
        if not module or error.name != name:
            raise
        return getattr(importlib.import_module(module), attribute)


def _described(found: Any, name: str) -> Iterator[str]:
    """Markdown: the signature, the docstring, then the public things inside."""
    if not inspect.ismodule(found):
        yield f"```python\n{signature(found, name)}\n```"
    yield markdown_of(inspect.getdoc(found) or "")
    if inspect.isfunction(found):
        return
    for inner, one in _inside(found):
        summary = markdown_of(inspect.getdoc(one) or "")
        yield f"```python\n{signature(one, inner)}\n```"
        yield summary if inspect.ismodule(found) else summary.partition("\n\n")[0]


def _inside(found: Any) -> Iterator[tuple[str, Any]]:
    """What a module defines and offers, or the documented public methods of a class."""
    offered = getattr(found, "__all__", None)
    for name, one in vars(found).items():
        documented = inspect.isfunction(one) or inspect.isclass(one)
        if name.startswith("_") or not documented or not one.__doc__:
            continue
        own = name in offered if offered else one.__module__ == getattr(found, "__name__", "")
        if own or inspect.isclass(found):
            yield name, one


def signature(found: Any, name: str) -> str:
    """The parameters and their defaults, without types, which the docstring describes."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:  # a class of C
        return name
    shown = [p.replace(annotation=p.empty) for p in parameters if p.name != "self"]
    line = f"{name}{inspect.Signature(shown)}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join(textwrap.wrap(line, _WIDTH, subsequent_indent="    "))


def markdown_of(doc: str) -> str:
    """A docstring as Markdown: its lists of arguments and errors become lists."""
    parts = []
    for block in re.split(r"\n\n(?=\S)", doc):
        first, _, rest = block.partition("\n")
        if first in _LISTS and rest.startswith("    "):
            items = [re.sub(r"\s+", " ", item).strip() for item in _ITEM.split(rest) if item]
            shown = "\n".join(
                re.sub(r"^([\w*, ]+):", r"- **\1**:", item)
                if re.match(r"[\w*, ]+:", item)
                else f"- {item}"
                for item in items
            )
            parts.append(f"*{first.removesuffix(':')}*\n\n{shown}")
        elif first.startswith("==="):
            parts.append(f"```{{eval-rst}}\n.. default-role:: code\n\n{block}\n```")
        else:
            parts.append(block)
    return "\n\n".join(parts)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive with Sphinx."""
    app.add_directive("api", ApiDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
