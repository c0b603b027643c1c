"""The site's style sheets, without the rules for what no page has, and loaded when needed.

The theme's sheets have 480 kB, and a browser paints nothing before all of them are there. A
selector stays if each class and id in it occurs in a page, or in a text of a script. One of the
theme's custom properties stays if something reads it. `labkit.book.finish` calls this last.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tinycss2
from bs4 import BeautifulSoup

# What they style is below the first screen, or comes from a script: no paint waits for them.
LATER = re.compile(r"/(fontawesome/|copybutton|togglebutton|sphinx-thebe|exercise|figures/)")
ATTRIBUTE = re.compile(r'\b(?:class|id)="([^"]*)"')
SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.DOTALL)
TEXT = re.compile(r"""("|')(?:(?!\1)[^\\\n]|\\.)*\1|`[^`]*`""")
WORD = re.compile(r"[\w-]+")
NAME = re.compile(r"[.#](-?[A-Za-z_][\w-]*)")
ANY = re.compile(r":(?:is|where|not|has)\([^()]*\)")
COMMA = re.compile(r",(?![^(\[]*[)\]])")  # between selectors, and not inside :is(…)
PROPERTY = re.compile(
    r"""(--(?:bs|pst|sd|mystnb|sbt)-[\w-]+)\s*:(?:[^;{}"']|"[^"]*"|'[^']*')*(?:;|(?=\}))"""
)
READ = re.compile(r"var\(\s*(--[\w-]+)")


def load_later(page: BeautifulSoup) -> None:
    """Let the first paint not wait for sheets that it does not need."""
    for link in page.select("link[rel=stylesheet]"):
        if LATER.search(f"/{link['href']}"):
            link.insert_after(plain := page.new_tag("noscript"))
            plain.append(page.new_tag("link", attrs={"rel": "stylesheet", "href": link["href"]}))
            link["media"], link["onload"] = "print", "this.media='all'"


def names_in(page: str) -> set[str]:
    """Classes, ids, custom properties, and words of scripts in the HTML of a page."""
    names = {name for given in ATTRIBUTE.findall(page) for name in given.split()}
    names.update(READ.findall(page))
    return names.union(*(_words(script) for script in SCRIPT.findall(page)))


def cut(site: Path, names: set[str]) -> None:
    """Rewrite every style sheet of `site`, whose pages have `names`."""
    scripts = [path for path in site.rglob("*.js") if "vendor" not in path.parts]
    names = names.union(*(_words(path.read_text()) for path in scripts))
    texts = {
        path: "".join(_kept(_parsed(path.read_text()), names))
        for path in (site / "_static").rglob("*.css")
    }
    for _ in range(3):  # what a dropped property alone had read
        read = names.union(*(READ.findall(text) for text in texts.values()))
        texts = {path: _without_unread(text, read) for path, text in texts.items()}
    for path, text in texts.items():
        path.write_text(text)


def _without_unread(css: str, read: set[str]) -> str:
    return PROPERTY.sub(lambda one: one[0] if one[1] in read else "", css)


def _words(script: str) -> set[str]:
    return {word for text in TEXT.finditer(script) for word in WORD.findall(text[0])}


def _parsed(css: Any) -> list[Any]:
    parse = tinycss2.parse_stylesheet if isinstance(css, str) else tinycss2.parse_rule_list
    return parse(css, skip_comments=True, skip_whitespace=True)


def _may_match(selector: str, names: set[str]) -> bool:
    """Whether something on a page can have every class and id that `selector` asks for."""
    asked = NAME.findall(ANY.sub("", selector))
    # Bootstrap puts the names of tooltips together: bs-tooltip, and -auto.
    return all(one in names or one.removesuffix("-auto") in names for one in asked)


def _kept(rules: Iterable[Any], names: set[str]) -> Iterator[str]:
    for rule in rules:
        if rule.type == "qualified-rule":
            selectors = COMMA.split(tinycss2.serialize(rule.prelude))
            used = [one.strip() for one in selectors if _may_match(one, names)]
            content = re.sub(r"\s+", " ", tinycss2.serialize(rule.content)).strip()
            if used and content:
                yield f"{','.join(used)}{{{content}}}"
        elif rule.type == "at-rule" and rule.lower_at_keyword in ("media", "supports"):
            if inner := "".join(_kept(_parsed(rule.content), names)):
                yield f"@{rule.at_keyword}{tinycss2.serialize(rule.prelude)}{{{inner}}}"
        else:
            yield rule.serialize()
