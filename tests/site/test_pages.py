"""Every built page in a browser, from its file: quiet, local, accessible, light, and narrow."""

import contextlib
import functools
import re
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from browser import OF_COLORS, OpenPage
from PIL import Image
from playwright.sync_api import Browser, expect

from labkit.book.result_tables import VERDICTS
from labkit.launch.scripts import project_root

TABLE = yaml.safe_load((project_root() / "book" / "_toc.yml").read_text())
FILES = [chapter["file"] for part in TABLE["parts"] for chapter in part["chapters"]]
PAGES = [f"{name}.html" for name in (TABLE["root"], *FILES, "search")]

MEGABYTE = 1_000_000
SCROLLING_CODE = """(blocks) => [...document.querySelectorAll(blocks)]
    .filter((block) => block.offsetParent && block.scrollWidth > block.clientWidth + 1)
    .map((block) => block.textContent.trim().slice(0, 60))"""
# Result tables with a verdict that is not in view: the first two columns, marks, and what glyphs
# say of a whole row.
HIDDEN_VERDICTS = """(verdicts) => [...document.querySelectorAll(".result-table")].filter((box) => {
    const edge = box.getBoundingClientRect().right + 1;
    const heads = [...box.querySelectorAll("thead th")].filter(
        (head) => verdicts.includes(head.textContent));
    const shown = box.querySelectorAll(
        "tr > :nth-child(-n + 2), .agrees, .glyphs .verdict-glyph");
    return box.offsetParent && [...heads, ...shown]
        .some((one) => one.getBoundingClientRect().right > edge);
}).map((box) => box.textContent.slice(0, 80))"""
UNFOLD = "document.querySelectorAll('details').forEach((each) => { each.open = true })"
# What Chromium waited for before it painted.
BLOCKING = """performance.getEntriesByType("resource")
    .filter((one) => one.renderBlockingStatus === "blocking")
    .map((one) => one.encodedBodySize)"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_quiet_local_accessible_and_light(site: Path, visit: OpenPage, name, theme):
    opened = visit(site / name, theme=theme)
    assert opened.page.evaluate("document.documentElement.dataset.theme") == theme
    assert opened.wider_by() == 0
    assert opened.violations(only=OF_COLORS if theme == "dark" else None) == []
    assert opened.errors == []
    assert opened.external == []
    # Figures are loaded when a reader comes near them: they count, whether they are here or not.
    opened.requests += opened.page.locator("img").evaluate_all("all => all.map(one => one.src)")
    formulas = opened.page.locator(".math").count() > 0
    assert opened.weight() <= (3.5 if formulas else 1.5) * MEGABYTE
    assert any("tex-svg" in one for one in opened.requests) == formulas


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_no_wider_than_a_phone(site: Path, visit: OpenPage, name):
    opened = visit(site / name, width=390, touch=True)
    assert opened.wider_by() == 0
    assert opened.errors == []
    opened.page.evaluate(UNFOLD)
    assert opened.page.evaluate(HIDDEN_VERDICTS, sorted(VERDICTS)) == []
    words = ".highlight-myst-ansi pre, .highlight-bash pre"
    assert opened.page.evaluate(SCROLLING_CODE, words) == []


def test_who_comes_for_the_first_time_gets_no_error_either(site: Path, chromium: Browser):
    """`open_page` chooses a theme, as a visitor has on a later visit."""
    page = chromium.new_page()
    errors: list[str] = []
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    page.goto((site / "index.html").as_uri())
    page.close()
    assert errors == []


# The front page, the one with the most HTML, one with formulas, and a page of the theme.
PAINTED = ("index", "surprises/in_the_step", "start/what_is_averaged", "search")


class Quiet(SimpleHTTPRequestHandler):
    """Logs nothing, and says nothing of a browser that gives up a download."""

    def log_message(self, *_: object) -> None:
        return

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    """The address of the site on a server of this test."""
    handler = functools.partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.mark.parametrize("name", PAINTED)
def test_the_first_paint_waits_for_at_most_150_kb(served: str, chromium: Browser, name):
    with chromium.new_context() as context:
        page = context.new_page()
        page.goto(f"{served}/{name}.html")
        blocking = page.evaluate(BLOCKING)
        icons = page.locator(".sidebar-toggle.primary-toggle .fa-bars")
        # What comes later does come.
        page.wait_for_function(
            "icon => getComputedStyle(icon).fontFamily.includes('Awesome')",
            arg=icons.element_handle(),
        )
    assert len(blocking) > 3
    assert sum(blocking) <= 150_000


def test_fewer_than_ten_blocks_of_code_scroll_sideways_on_a_laptop(site: Path, open_page: OpenPage):
    page = open_page(site / PAGES[0]).page
    found = []
    for name in PAGES:
        page.goto((site / name).as_uri())
        blocks = page.evaluate(SCROLLING_CODE, ".bd-article pre")
        found += [f"{name}: {block}" for block in blocks]
    assert len(found) < 10, "\n".join(found)


@pytest.mark.parametrize("paper", ["A4", "Letter"])
def test_the_page_to_print_is_one_sheet(site: Path, open_page: OpenPage, paper):
    opened = open_page(site / "reference" / "one_page.html")
    opened.page.wait_for_selector("mjx-container")
    assert len(re.findall(rb"/Type /Page\b", opened.page.pdf(format=paper))) == 1


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


def test_symptoms_are_filtered_by_all_words_and_listed_whole_without_javascript(
    site: Path, open_page: OpenPage
):
    path = site / "reference" / "symptoms.html"
    rows = ".bd-article :is(table tbody tr, section section section)"
    plain = open_page(path, javascript=False).page
    assert plain.locator(".filter-rows").count() == 0
    everything = plain.locator(f"{rows}:visible").count()
    assert everything > 40

    opened = open_page(path)
    page = opened.page
    assert page.locator(f"{rows}:visible").count() == everything
    page.get_by_label("What do you see?").fill("hangs EPOCH")
    shown = page.locator(f"{rows}:visible").all_text_contents()
    assert shown
    assert all(re.search("hangs", one) and re.search("epoch", one) for one in shown)
    assert page.get_by_role("status").inner_text() == f"{len(shown)} of {everything} symptoms"
    # A table of symptoms, and the causes of one kind.
    assert page.locator(".bd-article h2:visible").count() == 2
    assert opened.violations() == []
    page.get_by_label("What do you see?").fill("")
    assert page.locator(f"{rows}:visible").count() == everything

    linked = open_page(path, query="words=clipping").page
    assert 0 < linked.locator(f"{rows}:visible").count() < everything


@pytest.mark.parametrize(
    ("label", "page"),
    [("two-backwards", "surprises/in_the_step"), ("no-sync-placement", "build/the_wrapper")],
)
def test_an_old_address_leads_to_the_page_that_has_its_label_now(
    site: Path, open_page: OpenPage, label, page
):
    opened = open_page(site / PAGES[0]).page
    opened.goto(f"{(site / 'surprises/in_the_wrapper.html').as_uri()}#{label}")
    opened.wait_for_url(f"{(site / page).as_uri()}.html#{label}")
    assert opened.locator(f"#{label}").count() == 1


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
    page = open_page(site / "puzzles" / "mean_of_means.html", width=390, touch=True).page
    figure = page.locator(FIGURE).first
    figure.scroll_into_view_if_needed()
    box = figure.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    hint = "getComputedStyle(document.querySelector('a.full-figure'), '::after').content"
    assert page.evaluate(hint) == '"Tap for the full figure"'
    figure.tap()
    page.wait_for_url(re.compile(r"_images/.*\.png$"))


WIDE = {"puzzles/accumulate_vs_ddp": 0, "speed/choosing_buckets": 2}


@pytest.mark.parametrize("name", WIDE)
def test_on_a_phone_a_wide_figure_is_legible_scrolls_and_says_so(
    site: Path, open_page: OpenPage, name
):
    opened = open_page(site / f"{name}.html", width=390, touch=True)
    page = opened.page
    link = page.locator("a.full-figure").nth(WIDE[name])
    figure = link.locator("img")
    link.scroll_into_view_if_needed()
    assert figure.bounding_box()["width"] >= 0.74 * int(figure.get_attribute("width"))
    box = link.bounding_box()
    assert box["x"] + box["width"] <= 390
    assert link.evaluate("link => { link.scrollLeft = 9999; return link.scrollLeft }") > 80
    hint = "link => getComputedStyle(link, '::after').content"
    assert link.evaluate(hint) == '"Swipe to see the rest, tap for the full figure"'
    assert opened.wider_by() == 0
    assert opened.violations(".bd-article") == []
    figure.tap()
    page.wait_for_url(re.compile(r"_images/.*\.png$"))


# A reader predicts numbers on the page, with the keyboard alone, and sees which are right.


def test_a_prediction_is_asked_for_checked_and_followed_by_the_solution(
    site: Path, open_page: OpenPage
):
    path = site / "build" / "average_by_hand.html"
    plain = open_page(path, javascript=False).page
    assert plain.locator("form.predict:visible").count() == 0

    opened = open_page(path, width=390, touch=True)
    page = opened.page
    form = page.locator("form.predict")
    solution = page.locator("#sol-hand-divisor")
    status = form.get_by_role("status")
    printed = solution.get_by_text("2 ranks, rare.weight: 2.00")
    expect(printed).not_to_be_visible()
    for row, given in {"2 ranks, rare.weight": "2", "2 ranks, last.weight": "1/1"}.items():
        form.get_by_label(row).fill(given)
    form.get_by_label("2 ranks, rare.weight").fill("twice")
    page.keyboard.press("Enter")
    expect(status).to_contain_text("“twice” is no number.")
    form.get_by_label("2 ranks, rare.weight").fill("200%")
    form.get_by_label("3 ranks, rare.weight").fill("1/3")
    page.keyboard.press("Enter")
    expect(status).to_have_text("One answer is missing.")
    expect(form.get_by_label("3 ranks, last.weight")).to_be_focused()
    expect(printed).not_to_be_visible()
    page.keyboard.type("1")
    page.keyboard.press("Enter")
    expect(status).to_contain_text("3 of 4 as predicted.")
    assert form.locator(".verdict").all_text_contents() == ["✓", "✓", "✗ 3.00", "✓"]
    expect(printed).to_be_visible()
    assert opened.wider_by() == 0
    assert opened.violations() == []
    assert opened.errors == []
    assert opened.external == []


def test_a_cosine_near_1_is_no_right_answer_to_1_and_a_ratio_has_two_percent(
    site: Path, open_page: OpenPage
):
    page = open_page(site / "start" / "what_is_averaged.html").page
    form = page.locator("form.predict[data-solution=sol-averaged-predict]")
    fields = form.locator("input")
    answers = [field.get_attribute("data-answer") for field in fields.all()]
    assert answers == ["0.2500", "1.0000"]
    for ratio, cosine, marks in (
        ("0.254", "1", ["✓", "✓"]),
        ("0.26", "0.998", ["✗ 0.2500", "✗ 1.0000"]),
    ):
        fields.nth(0).fill(ratio)
        fields.nth(1).fill(cosine)
        fields.nth(1).press("Enter")
        assert form.locator(".verdict").all_text_contents() == marks
