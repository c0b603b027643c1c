"""What the extension adds to a site with an address, and that it adds nothing without one."""

import re
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from PIL import Image
from sphinx.testing.util import SphinxTestApp

from labkit.book.sharing import SIZE
from labkit.book.site import problems


def build(source: Path) -> Path:
    (source / "sub").mkdir(parents=True)
    (source / "conf.py").write_text('extensions = ["myst_parser", "labkit.book.sharing"]\n')
    (source / "index.md").write_text("# Start\n\n```{toctree}\nsub/one\n```\n")
    (source / "sub" / "one.md").write_text("# One page\n\nIt costs $5.\n")
    app = SphinxTestApp("html", srcdir=source)
    try:
        app.build()
        return Path(app.outdir)
    finally:
        app.cleanup()


def test_a_page_of_a_site_with_an_address_names_it_and_has_a_picture(tmp_path, monkeypatch):
    monkeypatch.setenv("BOOK_SITE", "https://example.org/book")
    out = build(tmp_path / "source")
    page = (out / "sub" / "one.html").read_text()
    here = "https://example.org/book/sub/one.html"
    assert re.search(rf'<link (?=[^>]*rel="canonical")[^>]*href="{here}"', page)
    head = BeautifulSoup(page, "html.parser")
    said = {tag.get("property", tag.get("name")): tag["content"] for tag in head.select("meta")[1:]}
    assert said["og:url"] == here
    assert said["twitter:card"] == "summary_large_image"
    picture = said["og:image"].removeprefix("https://example.org/book/")
    assert Image.open(out / picture).size == SIZE
    assert f"<loc>{here}</loc>" in (out / "sitemap.xml").read_text()
    assert "https://example.org/book/sitemap.xml" in (out / "robots.txt").read_text()
    lost = (out / "404.html").read_text()
    assert '<base href="https://example.org/book/"/>' in lost
    assert "There is no such page" in lost


def test_a_site_without_an_address_has_none_of_it(tmp_path, monkeypatch):
    monkeypatch.delenv("BOOK_SITE", raising=False)
    out = build(tmp_path / "source")
    assert not {"404.html", "robots.txt", "sitemap.xml"} & {path.name for path in out.iterdir()}
    page = (out / "sub" / "one.html").read_text()
    assert "canonical" not in page
    assert "og:" not in page
    assert problems(out) == []


def test_an_address_that_is_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("BOOK_SITE", "example.org")
    with pytest.raises(Exception, match="has to begin with https://"):
        build(tmp_path / "source")
