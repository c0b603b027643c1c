"""Sphinx extension: what search engines, chats, and forums read of a site whose address is known.

The address is `html: baseurl` in `_config.yml`; the environment variable BOOK_SITE overrides it.
With an address, Sphinx names the canonical address of each page, and this adds og:url, a picture
(og:image, twitter:card), sitemap.xml, robots.txt, and 404.html. Without one, nothing is added,
because all of these are absolute addresses.
"""

import os
import textwrap
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup, Tag
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ConfigError

from labkit.book.site import pages_of

PICTURES = "_static/shared"
SIZE = (1200, 630)  # pixels, as chats and forums show it
INK = "#1b2430"
NOT_LISTED = ("search.html", "404.html")
LOST = """\
<h1>There is no such page</h1>
<p>It may have moved. <a href="index.html">Begin at the front page</a>, or look in
<a href="reference/symptoms.html">the symptom index</a>.</p>"""


def name_the_site(app: Sphinx, config: Config) -> None:
    """Take the address from the environment. Raises ConfigError if it is no address of a site."""
    address = (os.environ.get("BOOK_SITE") or config.html_baseurl).strip()
    if address and not address.startswith(("https://", "http://")):
        raise ConfigError(f"the site's address is {address!r}; it has to begin with https://")
    config.html_baseurl = address.rstrip("/") + "/" if address else ""


def share(app: Sphinx, exception: Exception | None) -> None:
    """Write all of it for the built pages, if the site has an address."""
    address = app.config.html_baseurl
    if exception or not address or app.builder.format != "html":
        return
    site = Path(app.outdir)
    (site / PICTURES).mkdir(parents=True, exist_ok=True)
    listed = []
    for path in pages_of(site):
        name = path.relative_to(site).as_posix()
        page = BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
        if page.head is None or page.h1 is None or name in NOT_LISTED:
            continue  # a page that only leads on
        picture = f"{PICTURES}/{name.removesuffix('.html').replace('/', '-')}.png"
        title = " ".join(page.h1.get_text().removesuffix("#").split())
        said = page.head.find("meta", {"name": "description"})
        summary = str(said["content"]) if said else ""
        draw(title, summary, site / picture)
        _name(page, page.head, address + name, address + picture)
        path.write_text(str(page), encoding="utf-8")
        listed.append(address + name)
    places = "".join(f"<url><loc>{each}</loc></url>\n" for each in listed)
    (site / "sitemap.xml").write_text(
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{places}</urlset>\n'
    )
    (site / "robots.txt").write_text(f"User-agent: *\nAllow: /\nSitemap: {address}sitemap.xml\n")
    front = BeautifulSoup((site / "index.html").read_text(encoding="utf-8"), "html.parser")
    (site / "404.html").write_text(lost_page(front, address), encoding="utf-8")


def _name(page: BeautifulSoup, head: Tag, address: str, picture: str) -> None:
    for key, name, content in (
        ("property", "og:url", address),
        ("property", "og:image", picture),
        ("property", "og:image:width", str(SIZE[0])),
        ("property", "og:image:height", str(SIZE[1])),
        ("name", "twitter:card", "summary_large_image"),
    ):
        head.append(page.new_tag("meta", attrs={key: name, "content": content}))


def lost_page(front: BeautifulSoup, address: str) -> str:
    """The page for an address that leads nowhere: the frame of the front page, at any depth."""
    if front.head is None:
        raise ValueError("the front page has no <head>")
    front.head.insert(0, front.new_tag("base", attrs={"href": address}))
    for gone in front.select('link[rel="canonical"], meta[property], meta[name="twitter:card"]'):
        gone.decompose()
    for place in front.select("article"):
        place.clear()
        place.append(BeautifulSoup(LOST, "html.parser"))
    # A link to a place of the page itself would lead to the front page.
    for aside in front.select('.bd-sidebar-secondary, .prev-next-footer, a[href^="#"]'):
        aside.decompose()
    if front.title:
        front.title.string = "There is no such page"
    return str(front)


def draw(title: str, summary: str, path: Path) -> None:
    """Write a picture of a page's title and summary as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(SIZE[0] / 100, SIZE[1] / 100), dpi=100, facecolor="white")
    figure.text(0.06, 0.88, "How gradients are combined", fontsize=20, color=INK, alpha=0.7)
    lines = textwrap.wrap(title.replace("`", ""), 36)
    figure.text(0.06, 0.8, "\n".join(lines[:5]), fontsize=38, color=INK, weight="bold", va="top")
    text = "\n".join(textwrap.wrap(summary, 80, max_lines=4, placeholder=" …"))
    figure.text(0.06, 0.08, text.replace("$", r"\$"), fontsize=17, color=INK, va="bottom")
    figure.savefig(path)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the two steps with Sphinx; the second one after the pages have been rewritten."""
    app.connect("config-inited", name_the_site)
    app.connect("build-finished", share, priority=950)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
