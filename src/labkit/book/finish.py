"""What the build leaves to do: pages that are light, quiet, and legible to a screen reader.

The theme's pages load Font Awesome three times, MathJax without a formula, a script that
declares a constant twice, and half a megabyte before anything is painted. `finish` changes the
built files in place. Doing it again changes nothing more.
"""

import base64
import io
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from bs4 import BeautifulSoup, Tag
from fontTools import subset
from fontTools.ttLib import TTFont
from PIL import Image

from labkit.book.style_sheet import write_one_sheet

FONT_AWESOME = "_static/vendor/fontawesome"
ICONS = "_static/icons.css"
# A plot has few colors and their blends at edges; 256 of them show no difference.
COLORS = 256
# Pixels. A figure of one panel has up to 651; at 350 its text is 8 pixels high, and legible.
WIDE = 660
# Names of Font Awesome's classes that choose a style or a size, not an icon.
STYLES = {"fa-solid", "fa-regular", "fa-brands", "fa-lg", "fa-fw", "fa-stack"}
FIRST_THEME = 'localStorage.getItem("theme") || "auto"'
SYSTEMS = '(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")'
ICONS_CSS = """\
/*! The icons of these pages, from Font Awesome Free {version}; its license is in vendor/. */
@font-face {{
  font-family: "Font Awesome 6 Free";
  font-weight: 900;
  src: url("data:font/woff;base64,{font}") format("woff");
}}
:root {{
  --fa-font-solid: normal 900 1em/1 "Font Awesome 6 Free";
  --fa-font-regular: var(--fa-font-solid);
}}
.fa, .fas, .fa-solid {{
  font: var(--fa-font-solid);
  font-size: inherit;
  display: inline-block;
  text-rendering: auto;
  -webkit-font-smoothing: antialiased;
}}
.fa-lg {{ font-size: 1.25em; line-height: .05em; vertical-align: -.075em; }}
"""


# The logos of other projects, such as GitHub's, have a font of their own.
LOGOS_CSS = """\
@font-face {{
  font-family: "Font Awesome 6 Brands";
  font-weight: 400;
  src: url("data:font/woff;base64,{font}") format("woff");
}}
.fab, .fa-brands {{
  font: normal 400 1em/1 "Font Awesome 6 Brands";
  font-size: inherit;
  display: inline-block;
  -webkit-font-smoothing: antialiased;
}}
"""


def finish(site: Path, pages: Iterable[Path]) -> None:
    """Rewrite `pages` of the built book below `site`, and the files that they share.

    Raises FileNotFoundError if the theme no longer brings Font Awesome where it is expected.
    """
    texts = {path: path.read_text(encoding="utf-8") for path in pages}
    _write_icons(site, texts.values())
    done = write_one_sheet(site, {path: finished(text) for path, text in texts.items()})
    for path, text in done.items():
        path.write_text(text, encoding="utf-8")
    for image in (site / "_images").glob("*.png"):
        _reduce_colors(image)
    options = site / "_static" / "documentation_options.js"
    # A summary of each result is fetched from its page, which a browser refuses for files.
    options.write_text(
        options.read_text().replace(
            "SHOW_SEARCH_SUMMARY: true", "SHOW_SEARCH_SUMMARY: location.protocol !== 'file:'"
        )
    )


def finished(text: str) -> str:
    """The HTML of one page, without what it does not need and with what axe-core asks for."""
    page = BeautifulSoup(text, "html.parser")
    _drop_unused_scripts(page)
    _paint_first(page)
    _name_things(page)
    _open_figures(page)
    return str(page)


def _drop_unused_scripts(page: BeautifulSoup) -> None:
    has_formula = page.find(class_="math") is not None
    seen: set[str] = set()
    for tag in page.find_all(["script", "link"]):
        address = tag.get("src") or tag.get("href") or ""
        source = tag.string or ""
        thebe = "thebe" in address or "THEBE_JS_URL" in source
        mathjax = "/vendor/tex-" in address or source.startswith("window.MathJax")
        if address.partition("?")[0].endswith("/css/all.min.css"):
            tag["href"] = address.partition(FONT_AWESOME)[0] + ICONS
        elif FONT_AWESOME in address or thebe or (mathjax and not has_formula) or source in seen:
            tag.decompose()
        elif source:
            seen.add(source)


def _paint_first(page: BeautifulSoup) -> None:
    """No script holds up the first paint, and no theme is shown before the reader's."""
    for preload in page.find_all("link", rel="preload"):
        preload.decompose()  # in a slow network it takes its share from the style sheet
    for script in page.select("head script"):
        source = script.string or ""
        if "/vendor/tex-" in script.get("src", ""):
            # Scripts after it need not wait for two megabytes.
            del script["defer"]
            script["async"] = ""
        elif script.get("src") and not script.has_attr("async"):
            script["defer"] = "defer"
        elif source.startswith("DOCUMENTATION_OPTIONS."):
            script["type"] = "module"  # runs after the deferred script that declares it
        elif FIRST_THEME in source:
            script.string = source.replace(FIRST_THEME, FIRST_THEME.replace('"auto"', SYSTEMS))


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
    sidebar = page.find("div", class_="bd-sidebar-primary")
    if isinstance(sidebar, Tag):
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
        names = ["full-figure"]
        width = str(image.get("width", ""))
        if width.isdigit() and int(width) > WIDE:
            names.append("wide-figure")
            link["style"] = f"--figure-width: {width}px"
        link["class"] = list(dict.fromkeys([*link.get("class", []), *names]))


def _write_icons(site: Path, texts: Collection[str]) -> None:
    """Write the icons that pages and styles use to one style sheet; remove all the others.

    The font lies inside the style sheet, because a browser loads no font from another file.
    """
    css = next(site.glob(f"{FONT_AWESOME}/*/css/all.min.css"), None)
    if css is None:
        if (site / ICONS).exists():
            return
        raise FileNotFoundError(f"the theme no longer has {FONT_AWESOME}/*/css/all.min.css")
    code_of = _codes(css.read_text())
    used = {
        name for text in texts for name in re.findall(r"\bfa-[a-z0-9-]*[a-z0-9]\b", text)
    } - STYLES
    icons = {name: code_of[name] for name in sorted(used) if name in code_of}
    codes = set(icons.values())
    for sheet in (site / "_static").rglob("*.css"):
        if sheet not in (css, site / ICONS):
            codes |= _codes_in(sheet.read_text())
    fonts = css.parent.parent / "webfonts"
    solid = _only(fonts / "fa-solid-900.ttf", codes)
    text = ICONS_CSS.format(version=css.parent.parent.name, font=solid)
    logos = {name: code for name, code in icons.items() if _is_logo(name, texts)}
    if logos:
        text += LOGOS_CSS.format(font=_only(fonts / "fa-brands-400.ttf", set(logos.values())))
    rules = [f'.{name}::before {{ content: "\\{code:x}"; }}' for name, code in icons.items()]
    text += "\n".join(rules) + "\n"
    (site / ICONS).write_text(text)
    for folder in ("css", "js", "webfonts"):
        shutil.rmtree(css.parent.parent / folder)


def _is_logo(icon: str, texts: Collection[str]) -> bool:
    """Whether a page has `icon` with the class of a logo: `<i class="fab fa-github">`."""
    logo = re.compile(rf'class="(?=[^"]*\b(?:fab|fa-brands)\b)[^"]*\b{icon}\b')
    return any(logo.search(text) for text in texts)


def _codes_in(css: str) -> set[int]:
    """The code points of icons in a style sheet, escaped (\\f0eb) or as characters."""
    escaped = {int(code, 16) for code in re.findall(r"\\(f[0-9a-f]{3})\b", css)}
    return escaped | {ord(character) for character in re.findall("[\ue000-\uf8ff]", css)}


def _codes(css: str) -> dict[str, int]:
    """Name of an icon → its code point, from Font Awesome's style sheet."""
    codes = {}
    for names, code in re.findall(
        r'((?:\.fa-[a-z0-9-]+:before,?)+)\{content:"\\([0-9a-f]+)"\}', css
    ):
        for name in re.findall(r"\.(fa-[a-z0-9-]+):before", names):
            codes[name] = int(code, 16)
    return codes


def _only(font: Path, codes: set[int]) -> str:
    """The font at `font` with the glyphs of `codes` alone, as WOFF in Base64."""
    options = subset.Options()
    options.flavor = "woff"
    options.layout_features = []
    loaded = TTFont(font)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=codes)
    subsetter.subset(loaded)
    out = io.BytesIO()
    loaded.flavor = "woff"
    loaded.save(out)
    return base64.b64encode(out.getvalue()).decode()


def _reduce_colors(path: Path) -> None:
    """Store a PNG with a palette, in place, unless it has one or the palette would not help."""
    with Image.open(path) as image:
        if image.mode not in ("RGB", "RGBA"):
            return
        white = Image.new("RGBA", image.size, "white")
        flat = Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    reduced = io.BytesIO()
    flat.quantize(COLORS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
        reduced, "PNG", optimize=True
    )
    if reduced.tell() < path.stat().st_size:
        path.write_bytes(reduced.getvalue())
