"""The directive `passage`: a text that another page marks, repeated here.

    <!-- passage: the-factors -->
    What both pages say.
    <!-- end -->

    ```{passage} start/when_to_multiply.ipynb the-factors
    ```

So a page that summarizes others cannot contradict them. A passage links to labels, or to pages in
other folders: it is read by pages of several folders. This module is a Sphinx extension.
"""

import re
from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


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
        read = nodes.Element()
        self.state.nested_parse(StringList(text.splitlines(), source=page), 0, read)
        return read.children


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


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive with Sphinx."""
    app.add_directive("passage", PassageDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
