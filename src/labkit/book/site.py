"""Check that every link, image, and script of the built book leads somewhere, without a network.

python -m labkit.book.site _build/html
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup

# What a page loads by itself, and the attribute that names it; a link is followed by a person.
LOADED = (("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"))
# Values of rel with which a <link> loads nothing.
NAMED_ONLY = {"canonical", "index", "search", "next", "prev", "author", "copyright"}


def pages_of(site: Path) -> list[Path]:
    """The pages below `site`, sorted. Raises FileNotFoundError if there are none."""
    # Folders with an underscore hold the theme's files, templates of pages among them.
    pages = [p for p in sorted(site.rglob("*.html")) if p.relative_to(site).parts[0][0] != "_"]
    if not pages:
        raise FileNotFoundError(f"there is no page below {site}; make book builds them")
    return pages


def problems(site: Path) -> list[str]:
    """The problems of the pages below `site`, one sentence each; empty if there are none.

    It reports links to missing pages or anchors; scripts, styles, and images that are missing or
    come from another host; and images without alt text. Raises FileNotFoundError if there is no
    page.
    """
    site = site.resolve()
    texts = {path: path.read_text(encoding="utf-8") for path in pages_of(site)}
    pages = {path: BeautifulSoup(text, "html.parser") for path, text in texts.items()}
    ids = {path: {tag["id"] for tag in page.find_all(id=True)} for path, page in pages.items()}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        found += [f"{name}: {problem}" for problem in _broken_links(path, page, ids)]
        found += [f"{name}: {problem}" for problem in _not_local(path, page)]
        found += [
            f"{name}: {image.get('src')} has no alt text"
            for image in page.find_all("img")
            if not image.get("alt", "").strip()
        ]
    return found


def _broken_links(path: Path, page: BeautifulSoup, ids: dict[Path, set[str]]) -> Iterator[str]:
    for tag in page.find_all("a", href=True):
        parts = urlsplit(tag["href"])
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not target.is_file():
            yield f"a link leads to {tag['href']}, and there is no such file"
            continue
        place = unquote(parts.fragment)
        if place and place not in ids.get(target, {place}):
            yield f"a link leads to {tag['href']}, and that page has no such place"


def _not_local(path: Path, page: BeautifulSoup) -> Iterator[str]:
    for name, attribute in LOADED:
        for tag in page.find_all(name, {attribute: True}):
            if name == "link" and NAMED_ONLY & set(tag.get("rel", [])):
                continue
            address = tag[attribute]
            parts = urlsplit(address)
            if parts.scheme == "data":
                continue
            if parts.scheme or parts.netloc:
                yield f"<{name}> loads {address} from another host, but the book must work offline"
            elif not (path.parent / unquote(parts.path)).is_file():
                yield f"<{name}> loads {address}, and there is no such file"


if __name__ == "__main__":
    try:
        sys.exit("\n".join(problems(Path(sys.argv[1]))) or None)
    except OSError as error:
        sys.exit(str(error))
