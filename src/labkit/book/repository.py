"""Sphinx extension: what the built book says about the project's public address.

The address is `repository: url` in `_config.yml`; the environment variables BOOK_REPOSITORY and
BOOK_BRANCH override it and its branch. With an address, the pages have a link to the repository,
launch buttons, and commands that fetch the code. Without one, they say "the folder that this book
came in". A notebook that a reader downloads begins with a cell that says what it needs.
"""

import os
import re
from pathlib import Path
from typing import Any

import nbformat
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ConfigError

ADDRESS = re.compile(r"https://github\.com/[\w-]+/[\w.-]+", re.ASCII)
LAUNCH = {"notebook_interface": "jupyterlab", "binderhub_url": "https://mybinder.org"}
HERE = "In the folder that this book came in"
CITATION = """\
@misc{{how-gradients-are-combined,
  title  = {{How gradients are combined: data-parallel training, from scratch and checked}},
  author = {{{{The miniddp authors}}}},
  year   = {{{year}}},{url}
}}"""
GUARD = """\
# Added to the download: this notebook needs packages that come with the book's code.
import importlib.util

missing = [name for name in {needed!r} if importlib.util.find_spec(name) is None]
if missing:
    raise ModuleNotFoundError(
        f"This Python has no {{' and no '.join(missing)}}. "
        "{where} run: make notebook CHAPTER={chapter}"
    )
"""


def clone_command(address: str) -> str:
    """The command from nothing to the project's folder."""
    return f"git clone {address} && cd {address.rpartition('/')[2]}"


def substitutions(address: str, year: str) -> dict[str, str]:
    """What `{{ name }}` stands for on the pages, as Markdown. `address` may be empty."""
    start = [
        *([clone_command(address)] if address else []),
        "make book        # run every chapter and build the book",
        "make notebook    # open a chapter in JupyterLab",
    ]
    needed = "You need Python 3.11 or newer and `make`:" if address else f"{HERE}:"
    where = "In your own environment:" if address else f"{HERE}:"
    source = f"git+{address}" if address else "."
    url = f"\n  url    = {{{address}}}," if address else ""
    return {
        "get_the_code": "\n".join([needed, "", "```bash", *start, "```"]),
        "install_it": f"{where}\n\n```bash\npip install {source}\n```",
        "citation": f"```bibtex\n{CITATION.format(year=year, url=url)}\n```",
    }


def name_the_address(app: Sphinx, config: Config) -> None:
    """Give the theme and the pages the address. Raises ConfigError if it is not on GitHub."""
    options = config.html_theme_options
    address = os.environ.get("BOOK_REPOSITORY") or options.get("repository_url", "")
    address = address.strip().rstrip("/").removesuffix(".git")
    if address and not ADDRESS.fullmatch(address):
        raise ConfigError(
            f"the repository is {address!r}; launch buttons and links need "
            "https://github.com/OWNER/NAME. Leave it empty to build without them."
        )
    options["repository_url"] = address
    if branch := os.environ.get("BOOK_BRANCH"):
        options["repository_branch"] = branch
    if address:
        options |= {"use_repository_button": True, "launch_buttons": LAUNCH}
    config.myst_substitutions |= substitutions(address, config.copyright)


def guard_downloads(app: Sphinx, exception: Exception | None) -> None:
    """Begin every notebook that can be downloaded with a cell that says what it needs."""
    address = app.config.html_theme_options.get("repository_url")
    where = f"Run: {clone_command(address)}. There," if address else f"{HERE},"
    sources = Path(app.outdir) / "_sources"
    for path in sources.rglob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        chapter = Path("book") / path.relative_to(sources)
        needed = ["labkit", "miniddp"]
        if (Path(app.srcdir) / path.relative_to(sources)).with_suffix(".py").exists():
            needed.append(path.stem)  # the module that this chapter imports
        source = GUARD.format(needed=needed, where=where, chapter=chapter.as_posix())
        notebook.cells.insert(0, nbformat.v4.new_code_cell(source, id="needs-the-project"))
        notebook.nbformat_minor = max(notebook.nbformat_minor, 5)  # the first with cell ids
        nbformat.write(notebook, path)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the two steps with Sphinx."""
    app.connect("config-inited", name_the_address)
    app.connect("build-finished", guard_downloads)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
