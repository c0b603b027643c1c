"""The directive `playable`: a figure on a page of the book that a reader can change.

    ```{playable} one_step
    :state: w=4&loss=sum
    :try: What to do first, in place of the figure's own line.

    The caption.
    ```

It needs three files in the folder `_static/figures` of the book: `NAME.js` draws, `logic/NAME.js`
computes, `still/NAME.svg` is the picture for readers without JavaScript (`make figures-stills`).
The page loads the figure's scripts and the frame (`figure.js`, `figure.css`); other pages load
nothing. `:state:` changes the state that the figure starts with, written as in the address; a
state has a picture of its own.

This module is a Sphinx extension; `_config.yml` names it.
"""

import html
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util.docutils import SphinxDirective

# From the folder of the pages.
FOLDER = Path("_static/figures")
_SVG = "{http://www.w3.org/2000/svg}"


class PlayableDirective(SphinxDirective):
    """Put the figure named by the argument here; the body is its caption."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar[dict[str, Callable[[str], Any]]] = {
        "state": directives.unchanged,
        "try": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        name, state = self.arguments[0], self.options.get("state", "")
        folder = Path(self.env.srcdir) / FOLDER
        files = [*scripts(name), "figure.css", still(name, state)]
        missing = [path for path in files if not (folder / path).is_file()]
        if missing:
            needed = ", ".join(str(FOLDER / path) for path in missing)
            raise self.error(f"the figure {name!r} needs {needed}")
        self.env.note_dependency(str(folder / still(name, state)))
        alt = description(folder / still(name, state))
        up = "../" * self.env.docname.count("/")
        picture = f"{up}{(FOLDER / still(name, state)).as_posix()}"
        head = opening(name, state, self.options.get("try", ""), picture, alt)
        caption = nodes.Element()
        self.state.nested_parse(self.content, self.content_offset, caption)
        begin, end = f"{head}\n<figcaption>\n", "</figcaption>\n</figure>\n"
        parts = [nodes.raw("", part, format="html") for part in (begin, end)]
        return [parts[0], *caption.children, parts[1]]


def scripts(name: str) -> list[str]:
    """The scripts of a figure, in the order in which a page loads them, below `FOLDER`."""
    return ["figure.js", f"logic/{name}.js", f"{name}.js"]


def still(name: str, state: str = "") -> str:
    """The still picture of a figure in a state that it starts with, below `FOLDER`."""
    words = "-".join([name, *re.findall(r"\w+", state)])
    return f"still/{words}.svg"


def description(picture: Path) -> str:
    """The text of a still picture for those who do not see it: the SVG's title and description.

    Raises ValueError if it has none.
    """
    root = ElementTree.parse(picture).getroot()
    texts = [root.findtext(f"{_SVG}{name}", "").strip() for name in ("title", "desc")]
    if not all(texts):
        raise ValueError(f"{picture} has no title or no description; make figures-stills writes it")
    return f"{texts[0]}. {texts[1]}"


def opening(name: str, state: str = "", first: str = "", picture: str = "", alt: str = "") -> str:
    """The HTML of a figure up to its caption. `picture` is the address of the still picture."""
    attributes = {"class": "playable", "id": f"playable-{name}", "data-figure": name}
    if state:
        attributes["data-state"] = state
    if first:
        attributes["data-try"] = first
    parts = [f"<figure{_written(attributes)}>"]
    if picture:
        shown = {"class": "figure-still", "src": picture, "alt": alt}
        parts += [f"<img{_written(shown)}>"]
    return "\n".join(parts)


def _written(attributes: dict[str, str]) -> str:
    return "".join(f' {name}="{html.escape(value)}"' for name, value in attributes.items())


def _load_scripts(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.Node
) -> None:
    """Add the scripts of a page's figures to this page only."""
    found = re.findall(
        r'<figure class="playable"[^>]* data-figure="(\w+)"', context.get("body", "")
    )
    names = dict.fromkeys(found)
    folder = FOLDER.relative_to("_static").as_posix()
    for script in dict.fromkeys(script for name in names for script in scripts(name)):
        app.add_js_file(f"{folder}/{script}", loading_method="defer")
    if names:
        app.add_css_file(f"{folder}/figure.css")


def _load_nothing_elsewhere(app: Sphinx, config: Config) -> None:
    """Jupyter Book loads every script and style below `_static` on every page: not these."""
    folder = FOLDER.relative_to("_static").as_posix() + "/"
    for setting in ("html_js_files", "html_css_files"):
        files = [each for each in config[setting] if not str(each).startswith(folder)]
        config[setting] = files


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive with Sphinx."""
    app.add_directive("playable", PlayableDirective)
    # Before Sphinx's builder reads the two settings.
    app.connect("config-inited", _load_nothing_elsewhere)
    app.connect("html-page-context", _load_scripts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
