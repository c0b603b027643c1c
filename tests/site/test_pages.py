"""Every built page in a browser, from its file: quiet, local, accessible, light, and narrow."""

import re
from pathlib import Path

import pytest
import yaml
from browser import OpenPage
from bs4 import BeautifulSoup
from PIL import Image
from playwright.sync_api import Browser

from labkit.launch.scripts import project_root

TABLE = yaml.safe_load((project_root() / "book" / "_toc.yml").read_text())
FILES = [chapter["file"] for part in TABLE["parts"] for chapter in part["chapters"]]
PAGES = [f"{name}.html" for name in (TABLE["root"], *FILES, "genindex", "search")]

MEGABYTE = 1_000_000
# On a slow mobile network (1.6 Mbit/s), 520 kB arrive in 2.6 seconds.
BEFORE_FIRST_PAINT = 520_000
SCROLLING_CODE = """[...document.querySelectorAll(".bd-article pre")]
    .filter((block) => block.offsetParent && block.scrollWidth > block.clientWidth + 1)
    .map((block) => block.textContent.trim().slice(0, 60))"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_quiet_local_and_accessible(site: Path, open_page: OpenPage, name, theme):
    opened = open_page(site / name, theme=theme)
    assert opened.page.evaluate("document.documentElement.dataset.theme") == theme
    assert opened.wider_by() == 0
    assert opened.violations() == []
    assert opened.errors == []
    assert opened.external == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_no_wider_than_a_phone(site: Path, open_page: OpenPage, name):
    opened = open_page(site / name, width=390, touch=True)
    assert opened.wider_by() == 0
    assert opened.errors == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_light(site: Path, open_page: OpenPage, name):
    opened = open_page(site / name)
    opened.page.wait_for_load_state("networkidle")
    formulas = opened.page.locator(".math").count() > 0
    assert opened.weight() <= (3 if formulas else 1) * MEGABYTE
    assert any("tex-svg" in one for one in opened.requests) == formulas


def test_who_comes_for_the_first_time_gets_no_error_either(site: Path, chromium: Browser):
    """`open_page` chooses a theme, as a visitor has on a later visit."""
    page = chromium.new_page()
    errors: list[str] = []
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    page.goto((site / "index.html").as_uri())
    page.close()
    assert errors == []


@pytest.mark.parametrize("name", PAGES)
def test_little_has_to_arrive_before_a_page_is_painted(site: Path, name):
    path = site / name
    head = BeautifulSoup(path.read_text(), "html.parser").head
    styles = [link["href"] for link in head.find_all("link", rel="stylesheet")]
    scripts = [
        script["src"]
        for script in head.find_all("script", src=True)
        if not script.has_attr("defer") and not script.has_attr("async")
    ]
    files = {(path.parent / one.partition("?")[0]).resolve() for one in styles + scripts}
    files.discard(site / "searchindex.js")  # the search page's own content: the words of all pages
    assert sum(file.stat().st_size for file in files) <= BEFORE_FIRST_PAINT


def test_fewer_than_ten_blocks_of_code_scroll_sideways_on_a_laptop(site: Path, open_page: OpenPage):
    page = open_page(site / PAGES[0]).page
    found = []
    for name in PAGES:
        page.goto((site / name).as_uri())
        found += [f"{name}: {block}" for block in page.evaluate(SCROLLING_CODE)]
    assert len(found) < 10, "\n".join(found)


@pytest.mark.parametrize("words", ["MiniDDP", "run_ranks"])
def test_the_search_works_from_a_file_and_leads_first_to_the_page_for_your_script(
    site: Path, open_page: OpenPage, words
):
    opened = open_page(site / "search.html", query=f"q={words}")
    results = opened.page.locator("#search-results li a")
    results.nth(2).wait_for()
    assert "use_it_in_your_script.html" in results.first.get_attribute("href")
    assert opened.errors == []
    assert opened.external == []


def test_the_first_screen_has_the_picture_beside_its_table_and_four_doors(
    site: Path, open_page: OpenPage
):
    page = open_page(site / "index.html").page
    picture = page.locator(".row-and-diagonal svg").bounding_box()
    table = page.locator(".front-puzzle table").bounding_box()
    assert picture["x"] + picture["width"] <= table["x"]
    assert table["y"] < picture["y"] + picture["height"]
    doors = page.locator(".front-doors .sd-card")
    assert doors.count() == 4
    for door in doors.all():
        box = door.bounding_box()
        assert box["y"] + box["height"] <= 800


def test_symptoms_are_filtered_by_all_words_and_listed_whole_without_javascript(
    site: Path, open_page: OpenPage
):
    path = site / "reference" / "symptoms.html"
    rows = ".bd-article table tbody tr"
    plain = open_page(path, javascript=False).page
    assert plain.locator(".filter-rows").count() == 0
    everything = plain.locator(f"{rows}:visible").count()
    assert everything > 50

    opened = open_page(path)
    page = opened.page
    assert page.locator(f"{rows}:visible").count() == everything
    page.get_by_label("What do you see?").fill("hangs EPOCH")
    shown = page.locator(f"{rows}:visible").all_text_contents()
    assert shown
    assert all(re.search("hangs", one) and re.search("epoch", one) for one in shown)
    assert page.get_by_role("status").inner_text() == f"{len(shown)} of {everything} symptoms"
    assert page.locator(".bd-article h2:visible").count() == 1
    assert opened.violations() == []
    page.get_by_label("What do you see?").fill("")
    assert page.locator(f"{rows}:visible").count() == everything

    linked = open_page(path, query="words=clipping").page
    assert 0 < linked.locator(f"{rows}:visible").count() < everything


FIGURE = "div.cell_output a.full-figure img"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_figure_has_the_ground_of_the_page(site: Path, open_page: OpenPage, theme, tmp_path):
    page = open_page(site / "start" / "what_is_averaged.html", theme=theme).page
    figure = page.locator(FIGURE).first
    figure.scroll_into_view_if_needed()
    page.wait_for_function("image => image.complete", arg=figure.element_handle())
    box = figure.bounding_box()
    clip = {"x": box["x"] - 6, "y": box["y"] + 2, "width": 12, "height": 4}
    page.screenshot(path=tmp_path / "edge.png", clip=clip)
    with Image.open(tmp_path / "edge.png") as edge:
        left, right = edge.convert("RGB").getpixel((1, 1)), edge.convert("RGB").getpixel((10, 1))
    assert max(abs(one - other) for one, other in zip(left, right, strict=True)) <= 3
    assert (max(left) < 60) == (theme == "dark")


def test_on_a_phone_a_figure_fits_and_a_tap_opens_it(site: Path, open_page: OpenPage):
    page = open_page(site / "start" / "what_is_averaged.html", width=390, touch=True).page
    figure = page.locator(FIGURE).first
    figure.scroll_into_view_if_needed()
    box = figure.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    hint = "getComputedStyle(document.querySelector('a.full-figure'), '::after').content"
    assert page.evaluate(hint) == '"Tap for the full figure"'
    figure.tap()
    page.wait_for_url(re.compile(r"_images/.*\.png$"))


def test_the_sidebar_has_parts_and_numbered_chapters(site: Path, open_page: OpenPage):
    page = open_page(site / "index.html").page
    captions = page.locator(".bd-sidebar-primary p.caption").all_inner_texts()
    assert [one.lower() for one in captions] == [part["caption"].lower() for part in TABLE["parts"]]
    entries = page.locator(".bd-sidebar-primary li.toctree-l1 a").all_inner_texts()
    numbered = [entry for entry in entries if re.match(r"\d+\. ", entry)]
    assert len(numbered) == sum(
        len(part["chapters"]) for part in TABLE["parts"] if part.get("numbered")
    )
