"""Finished pages have names for those who do not see them; the browser tests find the rest."""

from types import SimpleNamespace
from urllib.parse import unquote

import nbformat
import pytest
from bs4 import BeautifulSoup
from sphinx.errors import ConfigError

from labkit.book.finish import finished_page
from labkit.book.repository import guard_downloads, name_the_address, substitutions

ADDRESS = "https://github.com/owner/name"


@pytest.mark.parametrize(
    ("built", "wanted"),
    [
        ("<pre>a &lt; b  &amp;  c\n\n  é</pre>", "<pre>a &lt; b  &amp;  c\n\n  é</pre>"),
        ("<table><th></th><th>ranks</th></table>", "<table><td></td><th>ranks</th></table>"),
        ('<summary aria-label="Toggle">Show code</summary>', "<summary>Show code</summary>"),
        ('<b role="doc-biblioentry">A paper</b>', '<b role="listitem">A paper</b>'),
    ],
)
def test_a_page_keeps_its_text_and_gets_names_and_roles(built, wanted):
    assert finished_page(built) == wanted


def test_a_figure_is_a_link_to_its_file_and_scrolls_on_a_phone_if_it_is_wide():
    figures = [f'<img src="a.png" style="width: {w}px; height: 9px;"/>' for w in (651, 771)]
    page = BeautifulSoup(
        finished_page(f'<div class="cell_output">{"".join(figures)}</div>'), "html.parser"
    )
    one, other = page.find_all("a")
    assert (one["href"], one["class"]) == ("a.png", ["full-figure"])
    assert (one.img["loading"], one.img["width"], one.img["height"]) == ("lazy", "651", "9")
    assert other["class"] == ["full-figure", "wide-figure"]
    assert other["style"] == "--figure-width: 771px"


def test_a_script_in_a_string_is_shown_in_colors_and_can_be_downloaded():
    cell = '<div class="cell_input"><div class="highlight"><pre>{}</pre></div></div>'
    string = 'TRAIN = """\nimport os\nif os:\n    print(1 &lt; 2, "x")\n"""\n'
    page = BeautifulSoup(finished_page(cell.format(string)), "html.parser")
    assert page.pre
    assert page.pre.get_text() == 'import os\nif os:\n    print(1 < 2, "x")\n'
    assert page.select_one("pre span.kn")
    assert page.a
    assert page.a["download"] == "train.py"
    assert unquote(page.a["href"]).endswith(page.pre.get_text())
    other = cell.format("TRAIN = 1\n")
    assert finished_page(other) == other


PAGE = """<html><head><title>Less often — How gradients are combined</title>
<meta name="viewport" content="width=device-width, initial-scale=1.0"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
</head><body><article><h1>16. Less often<a href="#x">#</a></h1>
<p>Two sites train one model [PyTorch Forums, n.d.].</p>
ANSWER</article></body></html>"""
ANSWER = """<div class="admonition"><p class="admonition-title">The short answer</p>
<ul><li><p>Yes: average the <em>weights</em>.</p></li><li><p>Start small.</p></li></ul></div>"""


FORMULA = r'<p>It is <span class="math">\(1/W\)</span>.</p>'


@pytest.mark.parametrize("more", [ANSWER, "", FORMULA, "<p>" + "and more " * 99 + "</p>"])
def test_a_page_is_described_by_its_first_sentences_without_formulas_and_has_one_viewport(more):
    head = BeautifulSoup(finished_page(PAGE.replace("ANSWER", more)), "html.parser").head
    metas = {m.get("name") or m.get("property"): m["content"] for m in head.find_all("meta")}
    assert len(head.find_all("meta", {"name": "viewport"})) == 1
    assert metas["description"] == "Two sites train one model."
    assert metas["og:description"] == metas["description"]
    assert metas["og:title"] == head.title.string == "PyTorch DDP: Less often"


def named(address: str) -> SimpleNamespace:
    """Sphinx's configuration after the project's address was read from it."""
    config = SimpleNamespace(
        html_theme_options={"repository_url": address}, copyright="2026", myst_substitutions={}
    )
    name_the_address(None, config)
    return config


def test_without_an_address_no_page_names_one_and_no_button_needs_one(monkeypatch):
    monkeypatch.delenv("BOOK_REPOSITORY", raising=False)
    config = named("")
    assert config.html_theme_options == {"repository_url": ""}
    assert "http" not in "".join(config.myst_substitutions.values())
    assert "\npip install .\n" in config.myst_substitutions["install_it"]


def test_the_address_reaches_the_buttons_the_commands_and_the_citation(monkeypatch):
    monkeypatch.delenv("BOOK_REPOSITORY", raising=False)
    stored = named(f" {ADDRESS}.git")
    monkeypatch.setenv("BOOK_REPOSITORY", ADDRESS)
    for config in (stored, named("https://github.com/fork/name")):
        assert config.html_theme_options["repository_url"] == ADDRESS
        assert config.html_theme_options["use_repository_button"]
        assert config.html_theme_options["launch_buttons"]["binderhub_url"].startswith("https://")
        words = config.myst_substitutions
        assert f"\ngit clone {ADDRESS} && cd name\nmake book " in words["get_the_code"]
        assert f"\npip install git+{ADDRESS}\n" in words["install_it"]
        assert f"url    = {{{ADDRESS}}}" in words["citation"]
        assert words == substitutions(ADDRESS, "2026")


@pytest.mark.parametrize("address", ["github.com/owner/name", "https://example.org/owner/name"])
def test_an_address_that_binder_cannot_start_from_is_refused(address, monkeypatch):
    monkeypatch.delenv("BOOK_REPOSITORY", raising=False)
    with pytest.raises(ConfigError, match=r"need https://github\.com/OWNER/NAME"):
        named(address)


@pytest.mark.parametrize(
    ("address", "how"),
    [
        ("", "In the folder that this book came in, run: make notebook"),
        (ADDRESS, f"Run: git clone {ADDRESS} && cd name. There, run: make notebook"),
    ],
)
def test_a_downloaded_notebook_says_what_is_missing_and_how_to_get_it(
    address, how, tmp_path, monkeypatch
):
    path = tmp_path / "_sources" / "start" / "one.ipynb"
    path.parent.mkdir(parents=True)
    cells = [nbformat.v4.new_code_cell("import labkit")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    config = SimpleNamespace(html_theme_options={"repository_url": address})
    (tmp_path / "book" / "start").mkdir(parents=True)
    (tmp_path / "book" / "start" / "one.py").touch()
    app = SimpleNamespace(outdir=tmp_path, srcdir=tmp_path / "book", config=config)
    guard_downloads(app, None)
    first, second = nbformat.read(path, as_version=4).cells
    assert second.source == "import labkit"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    exec(first.source, {})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="no labkit and no miniddp and no one") as raised:
        exec(first.source, {})
    assert f"{how} CHAPTER=book/start/one.ipynb" in str(raised.value)
