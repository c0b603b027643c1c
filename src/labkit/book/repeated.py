"""Directives that repeat what is written elsewhere, so that a page cannot contradict it.

    ```{api} miniddp.MiniDDP
    ```

shows a docstring: what `help(…)` prints. A class is shown with its public methods, and a module
with the public classes and functions that it defines.

    <!-- passage: the-factors -->
    What both pages say.
    <!-- end -->

    ```{passage} start/when_to_multiply.ipynb the-factors
    ```

repeats a text that another page marks. A passage links to labels, or to pages in other folders: it
is read by pages of several folders. This module is a Sphinx extension.
"""

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
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
            section += _read(self, line, name)
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


class PassageDirective(SphinxDirective):
    """Repeat a passage; the arguments are the page, from the folder of the pages, and the name."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        page, name = self.arguments
        path = Path(self.env.srcdir) / page
        try:
            text = passage(path, name)
        except (OSError, ValueError) as error:
            raise self.error(str(error)) from None
        self.env.note_dependency(str(path))
        return _read(self, text, page)


def passage(page: Path, name: str) -> str:
    """The Markdown that `page` marks with `name`.

    Raises ValueError if it marks none, or several.
    """
    texts = [page.read_text()]
    if page.suffix == ".ipynb":
        cells = nbformat.read(page, as_version=4).cells
        texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
    marked = re.compile(rf"<!-- passage: {re.escape(name)} -->\n(.*?)<!-- end -->", re.DOTALL)
    found = [text for source in texts for text in marked.findall(source)]
    if len(found) != 1:
        raise ValueError(f"{page.name} marks {len(found)} passages as {name!r}, and 1 is needed")
    return found[0].strip()


def _read(directive: SphinxDirective, text: str, source: str) -> list[nodes.Node]:
    """`text`, which `source` has, as a part of the directive's page."""
    read = nodes.Element()
    directive.state.nested_parse(StringList(text.splitlines(), source=source), 0, read)
    return read.children


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives with Sphinx."""
    app.add_directive("api", ApiDirective)
    app.add_directive("passage", PassageDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
