"""Sphinx extension: built pages that name what they show and load only what they use.

The theme's pages load Font Awesome as a script of 1.5 MB, MathJax without a formula, and a script
from another host. This rewrites each page when all are built.
"""

import base64
import gc
import io
import multiprocessing
import re
import textwrap
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bs4 import BeautifulSoup, Tag
from fontTools import subset
from fontTools.ttLib import TTFont
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from labkit.book import styles
from labkit.book.result_tables import show_tables
from labkit.book.site import pages_of

# In the address or the text of a script that no page uses.
UNUSED = ("thebe", "THEBE_JS_URL", "/fontawesome/")
FIRST_THEME = 'localStorage.getItem("theme") || "auto"'
SYSTEMS = '(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")'
# Pixels. A figure of one panel has up to 651; at 350 its text is 8 pixels high, and legible.
WIDE = 660
ICON = re.compile(r'((?:\.fa-[\w-]+:before,?)+)\{content:"\\(\w+)"\}')
OLD_NAMES = re.compile(r"@font-face\{[^}]*font-family:(FontAwesome|Font Awesome\\ 5)[^}]*\}")
# A cell of one statement: NAME = """, a script, """.
SCRIPT = re.compile(r'(\w+) = """\\?\n((?:(?!""").)*)"""\n?', re.DOTALL)
COLUMNS = re.compile(r"─|\S {2,}\S")
FONT = re.compile(r'url\(\.\./webfonts/([\w-]+)\.woff2\) format\("woff2"\),url\([^)]+\) [^;}]+')


def finish(app: Sphinx, exception: Exception | None) -> None:
    """Rewrite every built page, and the style sheets."""
    if exception or app.builder.format != "html":
        return
    site = Path(app.outdir)
    gc.freeze()  # no collection walks through all that Sphinx has loaded
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        names = set().union(*pool.map(_finish_page, pages_of(site)))
    _keep_used_icons(site, names)
    styles.cut(site, names)
    options = site / "_static" / "documentation_options.js"
    # A summary of each result is fetched from its page, which a browser refuses for files.
    offline = "SHOW_SEARCH_SUMMARY: location.protocol !== 'file:'"
    options.write_text(options.read_text().replace("SHOW_SEARCH_SUMMARY: true", offline))


def _finish_page(path: Path) -> set[str]:
    """Rewrite one page; the names in it that style sheets may have."""
    text = finished_page(path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")
    return styles.names_in(text)


def finished_page(text: str) -> str:
    """The HTML of one page, without what it does not need and with what axe-core asks for."""
    page = BeautifulSoup(text, "html.parser")
    if page.head and page.article:
        _describe(page, page.head, page.article)
    _load_less(page)
    styles.load_later(page)
    _name_things(page)
    _open_figures(page)
    show_tables(page)
    _show_scripts(page)
    _wrap_sentences(page)
    _break_names(page)
    return str(page)


def _describe(page: BeautifulSoup, head: Tag, article: Tag) -> None:
    """What a search result, or a link in a chat, shows of the page; and one viewport of two."""
    for viewport in head.find_all("meta", {"name": "viewport"})[1:]:
        viewport.decompose()
    title = article.h1.get_text().removesuffix("#").strip() if article.h1 else ""
    title = re.sub(r"^\d+\. ", "", title)
    if not re.search(r"PyTorch|DDP", title):  # what people search for
        title = f"PyTorch DDP: {title}"
    if head.title:
        head.title.string = title
    summary = _summary(article)
    for key, name, content in (
        ("name", "description", summary),
        ("property", "og:title", title),
        ("property", "og:description", summary),
        ("property", "og:type", "article"),
    ):
        head.append(page.new_tag("meta", attrs={key: name, "content": content}))


def _summary(article: Tag) -> str:
    """The first sentences of the page, up to 200 characters, without formulas and citations."""
    texts = [
        tag.get_text() for tag in article.select("p") if not tag.find_parent(class_="admonition")
    ]
    said = " ".join(" ".join(text for text in texts if "\\(" not in text).split())
    said = re.sub(r" \[[^]]*(?:\d{4}\w?|n\.d\.)\]", "", said)  # citations
    sentences = [end.end() for end in re.finditer(r"[.?!](?= |$)", said[:200])]
    return said[: sentences[-1]] if sentences else textwrap.shorten(said, 200, placeholder=" …")


def _load_less(page: BeautifulSoup) -> None:
    if page.html:  # a script sets it; without one, the theme has colors for no value only
        del page.html["data-theme"]
    has_formula = page.find(class_="math") is not None
    for tag in page.select("script, link[rel=preload]"):
        source = f"{tag.get('src', '')} {tag.string or ''}"
        mathjax = "/vendor/tex-" in source or "window.MathJax" in source
        unused = any(word in source for word in UNUSED) or (mathjax and not has_formula)
        if tag.name == "link" or unused:
            tag.decompose()  # a preload takes its share of a slow network from the style sheets
        elif tag.get("src") and not tag.has_attr("async"):
            tag["defer"] = "defer"  # the first paint waits for style sheets alone
        elif source.strip().startswith("DOCUMENTATION_OPTIONS."):
            tag["type"] = "module"  # runs after the deferred script that declares it
        elif FIRST_THEME in source:  # dark from the first paint on
            tag.string = source.strip().replace(FIRST_THEME, FIRST_THEME.replace('"auto"', SYSTEMS))


def _name_things(page: BeautifulSoup) -> None:
    for summary in page.find_all("summary", {"aria-label": True}):
        del summary["aria-label"]  # it hides the text that says what is folded
    for script in page.find_all("script"):
        if script.string and "search-button-field" in script.string:
            script.string = script.string.replace(' aria-label="Search"', "")
    for header in page.find_all("th"):
        if not header.get_text(strip=True) and not header.find("img"):
            header.name = "td"
    for table in page.find_all(class_="pst-scrollable-table-container"):
        table["tabindex"] = "0"  # on a phone it scrolls, and a keyboard has to reach it
    for entry in page.find_all(role="doc-biblioentry"):
        entry["role"] = "listitem"  # what its list has to contain
    for sidebar in page.select("div.bd-sidebar-primary"):
        sidebar["role"], sidebar["aria-label"] = "navigation", "Book"


def _open_figures(page: BeautifulSoup) -> None:
    """Every figure of a chapter becomes a link to its file, where a phone can enlarge it.

    It is loaded when a reader comes near it; its attributes keep its place free until then. On a
    phone, a wide one scrolls sideways in its place, rather than being too small to read.
    """
    for image in page.select("div.cell_output img[src]"):
        image["loading"] = "lazy"
        for name, pixels in re.findall(
            r"(?<![-\w])(width|height): (\d+)px", image.get("style", "")
        ):
            image[name] = pixels
        link = image.find_parent("a") or image.wrap(page.new_tag("a", href=image["src"]))
        link["class"] = [*link.get("class", []), "full-figure"]
        width = str(image.get("width", ""))
        if width.isdigit() and int(width) > WIDE:
            link["class"].append("wide-figure")
            link["style"] = f"--figure-width: {width}px"


def _break_names(page: BeautifulSoup) -> None:
    """A long name in a table may break where a reader would break it."""
    for name in page.select("td code.literal .pre"):
        parts = re.split(r"(?<=[_.(/,=-])(?=[\w\"'*])|(?<=[a-z])(?=[A-Z])", name.get_text())
        if len(parts) > 1 and not name.find(True):
            name.clear()
            for part in parts:
                name.extend([part, page.new_tag("wbr")])


def _show_scripts(page: BeautifulSoup) -> None:
    """A cell that only holds a script, as a string, shows the script in colors, with its file."""
    for block in page.select("div.cell_input div.highlight pre"):
        found = SCRIPT.fullmatch(block.get_text())
        if found is None:
            continue
        name, script = f"{found[1].lower()}.py", found[2]
        colored = highlight(script, PythonLexer(), HtmlFormatter(nowrap=True))
        # Elsewhere than in <pre>, the parser would shorten the indentation.
        shown = BeautifulSoup(f"<pre>{colored}</pre>", "html.parser").pre
        block.clear()
        block.extend(list(shown.contents) if shown else [])
        address = f"data:text/x-python;charset=utf-8,{quote(script)}"
        link = page.new_tag("a", attrs={"href": address, "download": name})
        link.string = f"Download {name}"
        caption = page.new_tag("p", attrs={"class": "script-file"})
        caption.append(link)
        if cell := block.find_parent(class_="cell_input"):
            cell.insert_after(caption)


def _wrap_sentences(page: BeautifulSoup) -> None:
    """Long lines of an output are broken, unless it has columns, which a break would tear apart."""
    for block in page.select("div.cell_output pre"):
        text = block.get_text()
        if block.find_parent(class_="highlight-python"):
            continue  # code
        if any(len(line) > 88 for line in text.splitlines()) and not COLUMNS.search(text):
            block["class"] = [*block.get("class", []), "sentences"]


def _keep_used_icons(site: Path, names: set[str]) -> None:
    """Put Font Awesome's fonts, cut to the icons in use, into its style sheet.

    A browser loads no font from another file, and all 2,000 icons are too heavy to lie in it.
    Raises ValueError if the theme no longer brings Font Awesome where it is expected.
    """
    (css,) = site.glob("_static/vendor/fontawesome/*/css/all.min.css")
    sheets = "".join(p.read_text() for p in (site / "_static").rglob("*.css") if p != css)
    # Style sheets name icons by their code points, as characters or escaped (\f0eb).
    codes = {int(code, 16) for code in re.findall(r"\\(f[0-9a-f]{3})\b", sheets)}
    codes |= {ord(character) for character in re.findall("[\ue000-\uf8ff]", sheets)}

    def used(rule: re.Match[str]) -> str:
        if names.isdisjoint(re.findall(r"fa-[\w-]+", rule[1])):
            return ""
        codes.add(int(rule[2], 16))
        return rule[0]

    def inlined(source: re.Match[str]) -> str:
        font = _cut(css.parent.parent / "webfonts" / f"{source[1]}.ttf", codes)
        return f'url("data:font/woff;base64,{base64.b64encode(font).decode()}") format("woff")'

    css.write_text(FONT.sub(inlined, OLD_NAMES.sub("", ICON.sub(used, css.read_text()))))


def _cut(path: Path, codes: set[int]) -> bytes:
    """The font at `path` with the glyphs of `codes` alone, as WOFF."""
    font, out = TTFont(path), io.BytesIO()
    cut = subset.Subsetter(subset.Options(layout_features=[]))
    cut.populate(unicodes=codes)
    cut.subset(font)
    font.flavor = "woff"
    font.save(out)
    return out.getvalue()


def count_on_each_page(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Number the exercises of each page without a chapter number from 1, not through the book."""
    for kinds in env.toc_fignumbers.values():
        for numbers in kinds.values():
            if all(len(number) == 1 for number in numbers.values()):
                numbers |= {name: (n,) for n, name in enumerate(numbers, 1)}
    return []


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the numbering, and the last step of a build, with Sphinx."""
    app.connect("env-get-updated", count_on_each_page, priority=900)  # after Sphinx has counted
    app.connect("build-finished", finish, priority=900)  # after the theme has written its sheets
    return {"parallel_read_safe": True, "parallel_write_safe": True}
