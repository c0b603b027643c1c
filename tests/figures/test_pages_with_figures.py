"""Every figure has its files, is on a page, and is light; what the directive writes is right."""

import re
from pathlib import Path

import pytest
from figures.figure_pages import names
from sphinx.testing.util import SphinxTestApp

from labkit.book.playable import FOLDER, description
from labkit.launch.scripts import project_root

BOOK = project_root() / "book"
NAMES = names(BOOK)


def figures_of(page: Path) -> set[str]:
    return set(re.findall(r"```\{playable\} (\w+)", page.read_text()))


PAGES = {
    p: found for p in [*BOOK.rglob("[!R]*.md"), *BOOK.rglob("*.ipynb")] if (found := figures_of(p))
}


def test_every_figure_is_on_a_page_and_every_page_names_figures_that_exist():
    assert set().union(*PAGES.values()) == set(NAMES)


PLACE = re.compile(r"""["'`]([a-z]+/[a-z_]+)\.html(?:#([a-z][a-z0-9-]*))?["'`]""")


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_links_only_to_places_that_the_book_has(name):
    for address, place in PLACE.findall((BOOK / FOLDER / f"{name}.js").read_text()):
        files = [BOOK / f"{address}{suffix}" for suffix in (".md", ".ipynb")]
        (found,) = (path.read_text() for path in files if path.is_file())
        assert not place or f"({place})=" in found, (address, place)


STILL = (
    '<svg xmlns="http://www.w3.org/2000/svg"><title>Two circles</title>'
    "<desc>The left one is larger.</desc></svg>"
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A book with the figure `circles` on one of its two pages."""
    folder = tmp_path / "source"
    for path, text in {
        "conf.py": 'extensions = ["myst_parser", "labkit.book.playable"]\n'
        'html_static_path = ["_static"]\n'
        'html_js_files = ["figures/circles.js"]\n'
        'html_css_files = ["figures/figure.css", "own.css"]\n',
        "index.md": "# Book\n\n```{toctree}\nsub/with\nwithout\n```\n",
        "sub/with.md": "# With\n\n```{playable} circles\n:state: w=4&on=1\n\nThe *caption*.\n```\n",
        "without.md": "# Without\n\nNo figure.\n",
        "_static/own.css": "",
        "_static/figures/figure.css": "",
        "_static/figures/figure.js": "",
        "_static/figures/circles.js": "",
        "_static/figures/logic/circles.js": "",
        "_static/figures/still/circles-w-4-on-1.svg": STILL,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def build(source: Path) -> tuple[Path, str]:
    app = SphinxTestApp("html", srcdir=source)
    try:
        app.build()
        return Path(app.outdir), app.warning.getvalue()
    finally:
        app.cleanup()


def test_the_directive_puts_picture_caption_and_scripts_on_its_page_alone(source):
    out, warnings = build(source)
    assert not warnings
    text = (out / "sub" / "with.html").read_text()
    assert '<figure class="playable" id="playable-circles" data-figure="circles"' in text
    assert 'data-state="w=4&amp;on=1"' in text
    assert 'src="../_static/figures/still/circles-w-4-on-1.svg"' in text
    assert 'alt="Two circles. The left one is larger."' in text
    assert "The <em>caption</em>." in text
    loaded = re.findall(r'<script defer="defer" src="\.\./_static/figures/([\w/]+\.js)', text)
    assert loaded == ["figure.js", "logic/circles.js", "circles.js"]
    assert len(re.findall(r"figures/circles\.js", text)) == 1
    assert "figures/figure.css" in text
    for other in ("index.html", "without.html"):
        assert "figures/" not in (out / other).read_text()
        assert "own.css" in (out / other).read_text()


def test_a_figure_without_its_files_is_an_error_that_names_them(source):
    (source / "_static/figures/still/circles-w-4-on-1.svg").unlink()
    (source / "_static/figures/logic/circles.js").unlink()
    _, warnings = build(source)
    assert "the figure 'circles' needs" in warnings
    assert (
        "_static/figures/logic/circles.js, _static/figures/still/circles-w-4-on-1.svg" in warnings
    )


def test_a_picture_without_a_description_is_refused(tmp_path):
    (tmp_path / "bare.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    with pytest.raises(ValueError, match="no title or no description"):
        description(tmp_path / "bare.svg")
