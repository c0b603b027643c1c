"""Sphinx extension: the addresses of pages that are gone lead to those that have their contents.

`moved_pages` in _config.yml maps an old page to the page that it is a part of now, both without a
suffix. Each old one becomes a small page that leads on, with a label in the address; it works
without a server, and without JavaScript.
"""

import html
import os
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ConfigError

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>This page has moved</title>
<script>location.replace("{target}" + location.hash)</script>
<meta http-equiv="refresh" content="0; url={target}">
</head>
<body><p>This page is now a part of <a href="{target}">{title}</a>.</p></body>
</html>
"""


def write_moved_pages(app: Sphinx, exception: Exception | None) -> None:
    """Write a page for each old address. Raises ConfigError where no page is to be led to."""
    if exception or app.builder.format != "html":
        return
    site = Path(app.outdir)
    for old, new in app.config.moved_pages.items():
        if new not in app.env.titles or old in app.env.titles:
            raise ConfigError(f"moved_pages has {old}: {new}; the first is gone, the second a page")
        path = site / f"{old}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        target = os.path.relpath(site / f"{new}.html", path.parent)
        title = html.escape(app.env.titles[new].astext())
        path.write_text(PAGE.format(target=target, title=title), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the configuration and the step with Sphinx, after the pages are finished."""
    app.add_config_value("moved_pages", {}, "html")
    app.connect("build-finished", write_moved_pages, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
