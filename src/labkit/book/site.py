"""The built book as a website: add launch buttons, and check that every page works offline.

    python -m labkit.book.site configure _config.yml OUT   write the configuration for the build
    python -m labkit.book.site finish _build/html          make the pages light and legible to all
    python -m labkit.book.site check _build/html           check every link, image, and script

The header's link to the repository, the launch buttons, and the commands on the front page need the
project's public address: `repository` in `_config.yml` (see `labkit.book.repository`). The
publishing workflow overrides it with the environment variables BOOK_REPOSITORY and BOOK_BRANCH.
Without an address the pages have a download button only.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml
from bs4 import BeautifulSoup

from labkit.book.finish import finish
from labkit.book.repository import checked, substitutions

BINDER = "https://mybinder.org"
# What a page loads by itself, and the attribute that names it; a link is followed by a person.
LOADED = (("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"))
# Values of rel with which a <link> loads nothing.
NAMED_ONLY = {"canonical", "index", "search", "next", "prev", "author", "copyright"}


def configuration(base: str, cff: str, repository: str = "", branch: str = "") -> str:
    """Jupyter Book's configuration `base` (YAML) for the address that it names.

    Args:
        base: the text of `_config.yml`.
        cff: the text of CITATION.cff, which names the title and the authors.
        repository, branch: override those of `base` if they are not empty.

    Raises ValueError if the address is not a repository on GitHub.
    """
    config = yaml.safe_load(base)
    stored = config.get("repository", {})
    address = checked(repository or stored.get("url", ""))
    config["repository"] = {**stored, "url": address}
    if branch:
        config["repository"]["branch"] = branch
    if address:
        config.setdefault("html", {})["use_repository_button"] = True
        config["launch_buttons"] = {"notebook_interface": "jupyterlab", "binderhub_url": BINDER}
    words = substitutions(address, cff, str(config["copyright"]))
    config.setdefault("parse", {})["myst_substitutions"] = words
    return yaml.safe_dump(config, sort_keys=False)


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
    pages = {path: _page(path) for path in pages_of(site)}
    ids = {path: _ids(page) for path, page in pages.items()}
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


def _page(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


def _ids(page: BeautifulSoup) -> set[str]:
    return {tag["id"] for tag in page.find_all(id=True)}


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    configure = commands.add_parser("configure", help="write the build's configuration")
    configure.add_argument("base", type=Path)
    configure.add_argument("out", type=Path)
    to_finish = commands.add_parser("finish", help="make the pages light and legible to all")
    to_finish.add_argument("site", type=Path)
    check = commands.add_parser("check", help="check the pages of a built book")
    check.add_argument("site", type=Path)
    arguments = parser.parse_args()
    try:
        if arguments.command == "configure":
            override = (os.environ.get(name, "") for name in ("BOOK_REPOSITORY", "BOOK_BRANCH"))
            cff = arguments.base.with_name("CITATION.cff").read_text()
            text = configuration(arguments.base.read_text(), cff, *override)
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(text)
        elif arguments.command == "finish":
            finish(arguments.site, pages_of(arguments.site))
        elif found := problems(arguments.site):
            sys.exit("\n".join(found))
    except (ValueError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
