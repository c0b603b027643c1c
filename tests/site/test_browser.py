"""The harness of the browser tests finds what the tests of the pages rely on."""

from pathlib import Path

import pytest
from browser import OF_COLORS, OpenPage

PAGE = """<!doctype html><html lang="en"><title>A page</title>
<style>
  body {{ background: white; color: black; }}
  @media (prefers-color-scheme: dark) {{ body {{ background: black; color: white; }} }}
</style>
<main><h1>A page</h1>{body}</main></html>"""


@pytest.fixture
def page_with(tmp_path: Path, open_page: OpenPage):
    def make(body: str, **options: object):
        path = tmp_path / "page.html"
        path.write_text(PAGE.format(body=body))
        return open_page(path, **options)

    return make


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_page_in_order_has_no_findings(page_with, theme):
    opened = page_with("<p>Text.</p><script>localStorage.length</script>", theme=theme)
    assert opened.errors == []
    assert opened.external == []
    assert opened.violations() == []
    assert opened.wider_by() == 0


def test_an_exception_and_a_logged_error_are_reported(page_with):
    opened = page_with("<script>console.error('logged')</script><script>throw 'thrown'</script>")
    assert sorted(opened.errors) == ["logged", "thrown"]


def test_a_request_to_another_host_is_reported(page_with):
    opened = page_with("<script src='https://example.org/a.js'></script>")
    assert opened.external == ["https://example.org/a.js"]


def test_axe_reports_pale_text_in_the_theme_that_has_it(page_with):
    pale = "<p style='color: #888'>Pale on white, legible on black.</p>"
    for rules in (None, OF_COLORS):
        (violation,) = page_with(pale, theme="light").violations(only=rules)
        assert violation.startswith("serious color-contrast: p")
        assert page_with(pale, theme="dark").violations(only=rules) == []


def test_axe_reports_a_link_that_only_its_color_tells_from_the_text_around_it(page_with):
    link = (
        "<p>A sentence with <a href='#' style='color: #333; text-decoration: none'>a link</a>.</p>"
    )
    (violation,) = page_with(link).violations(only=OF_COLORS)
    assert violation.startswith("serious link-in-text-block: a")
    underlined = link.replace("none", "underline")
    assert page_with(underlined).violations(only=OF_COLORS) == []


def test_a_page_wider_than_its_window_is_measured(page_with):
    opened = page_with("<div style='width: 600px'>wide</div>", width=390)
    assert opened.wider_by() > 200


def test_a_page_opens_without_javascript_and_at_a_place(page_with):
    body = "<p id='here'>shown</p><script>document.getElementById('here').remove()</script>"
    opened = page_with(body, javascript=False, fragment="here")
    assert opened.page.locator("#here").is_visible()


def test_a_screenshot_is_as_wide_as_the_window(page_with, tmp_path):
    page_with("<p>Text.</p>", width=390).screenshot(tmp_path / "page.png")
    header = (tmp_path / "page.png").read_bytes()[:24]
    assert int.from_bytes(header[16:20], "big") == 390


def test_visits_share_a_tab_and_neither_findings_nor_storage(visit, tmp_path):
    bad, good = tmp_path / "bad.html", tmp_path / "good.html"
    bad.write_text(
        PAGE.format(
            body="<img src='https://example.org/a.png'>"
            "<script>localStorage.left = sessionStorage.left = 1; throw 'thrown'</script>"
        )
    )
    good.write_text(PAGE.format(body="<p>Text.</p>"))
    for _ in range(2):
        opened = visit(bad)
        assert "thrown" in opened.errors
        assert opened.external == ["https://example.org/a.png"]
        opened = visit(good)
        assert (opened.errors, opened.external, opened.violations()) == ([], [], [])
        assert opened.page.evaluate("[localStorage.left, sessionStorage.left]") == [None, None]
        assert visit(good, width=390).page != opened.page


def test_a_visit_counts_the_files_that_an_earlier_page_has_loaded_too(visit, tmp_path):
    (tmp_path / "shared.css").write_text("p { color: black }" + 1000 * " ")
    link = "<link rel='stylesheet' href='shared.css'>"
    for name in ("first", "second", "first"):
        page = tmp_path / f"{name}.html"
        page.write_text(PAGE.format(body=f"{link}<p>Text.</p>"))
        assert visit(page).weight() == page.stat().st_size + 1018
