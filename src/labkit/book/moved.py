"""Sphinx extension: addresses of pages that are gone lead to the pages that have their contents.

`moved_pages` in _config.yml maps an old page to a new one, both without a suffix. The small page
that this writes for each works without a server and without JavaScript, and keeps a label. A label
that went elsewhere has an entry of its own, `page#label`.
"""

import json
import os
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>This page has moved</title>
<script>location.replace(({labels}[location.hash.slice(1)] ?? "{to}") + location.hash)</script>
<meta http-equiv="refresh" content="0; url={to}">
<p>This page is now a part of <a href="{to}">another one</a>.</p></html>
"""


def write_moved_pages(app: Sphinx, exception: Exception | None) -> None:
    """Write a page for each old address; `labkit.book.site` then checks where it leads."""
    if exception or app.builder.format != "html":
        return
    moved = app.config.moved_pages
    for old, new in moved.items():
        page = Path(app.outdir, f"{old}.html")
        if "#" in old:
            continue
        page.parent.mkdir(parents=True, exist_ok=True)
        labels = {
            one.partition("#")[2]: address(app, to, page)
            for one, to in moved.items()
            if one.startswith(f"{old}#")
        }
        text = PAGE.format(to=address(app, new, page), labels=json.dumps(labels))
        page.write_text(text, encoding="utf-8")


def address(app: Sphinx, name: str, page: Path) -> str:
    """Of the page `name`, as a link on `page`."""
    return os.path.relpath(Path(app.outdir, f"{name}.html"), page.parent)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the configuration, and the step after those that rewrite the pages."""
    app.add_config_value("moved_pages", {}, "html")
    app.connect("build-finished", write_moved_pages, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
