"""Finished pages load what they use, once, and have names for those who do not see them."""

import base64
import importlib.util
import io
import re
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw

from labkit.book.finish import finish, finished
from labkit.book.site import pages_of

THEBE = '<script>const THEBE_JS_URL = "https://example.org/thebe.js";</script>'
MATHJAX = '<script>window.MathJax = {}</script><script src="_static/../vendor/tex-svg.js"></script>'
FONT = "_static/vendor/fontawesome/6.5.2"


def head_of(body: str) -> str:
    page = f"<html><head>{THEBE}{THEBE}{MATHJAX}</head><body>{body}</body></html>"
    return str(BeautifulSoup(finished(page), "html.parser").head)


def test_mathjax_stays_on_a_page_with_a_formula_and_thebe_on_none():
    assert "tex-svg.js" in head_of('<span class="math notranslate">\\(x\\)</span>')
    assert "MathJax" not in head_of("<p>No formula; the word math alone is none.</p>")
    assert "THEBE" not in head_of('<span class="math">\\(x\\)</span>')


def test_no_script_of_the_head_is_waited_for_and_the_order_is_kept():
    theme = '<script>d.theme = localStorage.getItem("theme") || "auto";</script>'
    body = "<script src='c.js'></script>"
    page = (
        '<html><head><link as="script" href="c.js" rel="preload"/>'
        '<script src="a.js"></script><script>DOCUMENTATION_OPTIONS.pagename = "p";</script>'
        f'<script defer="defer" src="b.js"></script>{theme}{MATHJAX}</head>'
        f'<body>{body}<i class="math"></i></body></html>'
    )
    once = finished(page)
    head = BeautifulSoup(once, "html.parser").head
    first, name, second, shown, _, formulas = head.find_all("script")
    assert (first["defer"], second["defer"]) == ("defer", "defer")
    assert name["type"] == "module", "runs after the scripts that are deferred before it"
    assert "async" in formulas.attrs, "no script waits for two megabytes"
    assert "prefers-color-scheme" in shown.string, "the reader's theme, before the first paint"
    assert head.find("link") is None, "nothing takes its share from the style sheet"
    assert body.replace("'", '"') in once, "these run as soon as they are there"
    assert finished(once) == once


def test_an_inline_script_that_comes_twice_is_kept_once():
    assert finished("<script>var a = 1;</script><script>var a = 1;</script>").count("var a") == 1


def test_code_and_entities_come_through_unchanged():
    body = "<pre>a &lt; b  &amp;  c\n\n  é</pre>"
    assert finished(body) == body


def test_a_header_without_text_becomes_a_cell_and_one_with_text_stays():
    table = finished("<table><tr><th></th><th>ranks</th></tr></table>")
    assert table == "<table><tr><td></td><th>ranks</th></tr></table>"


def test_a_label_does_not_hide_the_text_of_a_fold():
    folded = '<details><summary aria-label="Toggle hidden content">Show code</summary></details>'
    assert finished(folded) == "<details><summary>Show code</summary></details>"


def test_a_table_that_may_scroll_is_reached_with_the_keyboard():
    table = '<div class="pst-scrollable-table-container"><table></table></div>'
    assert 'tabindex="0"' in finished(table)


def test_a_list_of_references_has_list_items():
    listed = finished('<div role="list"><div role="doc-biblioentry">A paper</div></div>')
    assert listed == '<div role="list"><div role="listitem">A paper</div></div>'


@pytest.mark.parametrize(
    "figure", ['<img src="a.png"/>', '<a class="reference" href="a.png"><img src="a.png"/></a>']
)
def test_a_figure_of_a_chapter_is_a_link_to_its_file(figure):
    once = finished(f'<div class="cell_output">{figure}</div>')
    link = BeautifulSoup(once, "html.parser").a
    assert link["href"] == "a.png"
    assert "full-figure" in link["class"]
    assert finished(once) == once


def test_a_figure_is_loaded_when_it_is_near_and_its_place_is_kept():
    figure = '<img src="a.png" style="width: 651px; height: 371px;"/>'
    image = BeautifulSoup(finished(f'<div class="cell_output">{figure}</div>'), "html.parser").img
    assert (image["loading"], image["width"], image["height"]) == ("lazy", "651", "371")


def test_a_figure_that_a_phone_would_make_too_small_to_read_is_wide():
    figures = [
        f'<img src="a.png" style="width: {pixels}px; height: 9px;"/>' for pixels in (651, 771)
    ]
    once = finished(f'<div class="cell_output">{"".join(figures)}</div>')
    one, other = BeautifulSoup(once, "html.parser").find_all("a")
    assert one["class"] == ["full-figure"]
    assert other["class"] == ["full-figure", "wide-figure"]
    assert other["style"] == "--figure-width: 771px"
    assert finished(once) == once


def test_a_figure_whose_width_is_relative_is_not_wide():
    figure = '<img src="a.png" width="50%" style="max-width: 900px"/>'
    page = BeautifulSoup(finished(f'<div class="cell_output">{figure}</div>'), "html.parser")
    assert page.img["width"] == "50%"
    assert page.a["class"] == ["full-figure"]


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A site with one page, and the files of the installed theme that matter here."""
    (package,) = importlib.util.find_spec("pydata_sphinx_theme").submodule_search_locations
    static = Path(package) / "theme" / "pydata_sphinx_theme" / "static"
    for name in (
        "css/all.min.css",
        "js/all.min.js",
        "webfonts/fa-solid-900.ttf",
        "webfonts/fa-brands-400.ttf",
    ):
        target = tmp_path / FONT / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((static / "vendor" / "fontawesome" / "6.5.2" / name).read_bytes())
    (tmp_path / "_static" / "theme.css").write_text(
        'a { --one: "\\f107"; --two: "\uf0eb"; color: #fff }'
    )
    (tmp_path / "_static" / "documentation_options.js").write_text("{SHOW_SEARCH_SUMMARY: true}")
    (tmp_path / "_images").mkdir()
    (tmp_path / "index.html").write_text(
        f'<link href="{FONT}/css/all.min.css?digest=1" rel="stylesheet"/>'
        f'<link as="font" href="{FONT}/webfonts/fa-brands-400.woff2" rel="preload"/>'
        f'<script src="{FONT}/js/all.min.js?digest=1"></script><i class="fa-solid fa-moon"></i>'
    )
    return tmp_path


def test_the_icons_in_use_lie_in_one_small_sheet_and_no_font_is_loaded(built):
    finish(built, pages_of(built))
    sheet = (built / "_static" / "icons.css").read_text()
    page = (built / "index.html").read_text()
    assert re.fullmatch(
        r'<link data-former="_static/icons.css" href="_static/pages.css\?v=\w+"'
        r' rel="stylesheet"/>\s*'
        r'<i class="fa-solid fa-moon"></i>',
        page,
    )
    merged = (built / "_static" / "pages.css").read_text(encoding="utf-8")
    assert '.fa-moon::before{content: "\uf186";}' in merged
    font = base64.b64decode(re.search(r"base64,([^\"]+)", sheet)[1])
    assert set(TTFont(io.BytesIO(font)).getBestCmap()) == {0xF107, 0xF0EB, 0xF186}
    assert '.fa-moon::before { content: "\\f186"; }' in sheet
    assert len(sheet) < 5000
    assert not (built / FONT / "js").exists()


def test_the_logo_of_a_button_that_leads_to_a_public_repository_has_its_glyph(built):
    with (built / "index.html").open("a") as page:
        page.write('<i class="fab fa-github"></i>')
    finish(built, pages_of(built))
    sheet = (built / "_static" / "icons.css").read_text()
    solid, logos = (
        TTFont(io.BytesIO(base64.b64decode(font))).getBestCmap()
        for font in re.findall(r"base64,([^\"]+)", sheet)
    )
    assert set(logos) == {0xF09B}
    assert 0xF186 in solid
    assert '.fa-github::before { content: "\\f09b"; }' in sheet


def test_finishing_twice_changes_nothing_more(built):
    Image.new("RGB", (400, 300), "white").save(built / "_images" / "a.png")
    finish(built, pages_of(built))
    before = {path: path.read_bytes() for path in built.rglob("*") if path.is_file()}
    finish(built, pages_of(built))
    assert before == {path: path.read_bytes() for path in built.rglob("*") if path.is_file()}


def test_a_theme_without_font_awesome_is_refused(built):
    (built / FONT / "css" / "all.min.css").unlink()
    with pytest.raises(FileNotFoundError, match="the theme no longer has"):
        finish(built, pages_of(built))


def test_a_figure_gets_lighter_and_looks_the_same(built):
    path = built / "_images" / "a.png"
    figure = Image.effect_noise((300, 300), 3).convert("RGB")
    ImageDraw.Draw(figure).ellipse((50, 50, 250, 250), fill="#0072B2")
    figure.save(path)
    heavy = path.stat().st_size
    finish(built, pages_of(built))
    assert path.stat().st_size < 0.7 * heavy
    pairs = zip(figure.tobytes(), Image.open(path).convert("RGB").tobytes(), strict=True)
    assert max(abs(one - other) for one, other in pairs) < 12


def test_summaries_of_search_results_are_fetched_from_a_server_only(built):
    finish(built, pages_of(built))
    options = (built / "_static" / "documentation_options.js").read_text()
    assert options == "{SHOW_SEARCH_SUMMARY: location.protocol !== 'file:'}"
