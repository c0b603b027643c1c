"""A page with every fault that the tests of the pages look for is caught in each of them."""

from pathlib import Path

from browser import OpenPage

FAULTY = """<!doctype html><html lang="en"><title>A page</title>
<style>@media (prefers-color-scheme: dark) { body { background: black; color: white; } }</style>
<main><h1>A page</h1><div style="width: 600px">wide</div><p style="color: #888">Pale on white.</p>
<script src="https://example.org/a.js"></script>
<script>localStorage.left = 1; console.error("logged")</script><script>throw "thrown"</script>
</main></html>"""
GOOD = '<!doctype html><html lang="en"><title>A page</title><main><h1>A page</h1></main></html>'


def test_every_fault_of_a_page_is_found_and_none_is_left_to_the_next_page(
    visit: OpenPage, tmp_path: Path
):
    faulty, good = tmp_path / "faulty.html", tmp_path / "good.html"
    faulty.write_text(FAULTY)
    good.write_text(GOOD)
    opened = visit(faulty, width=390)
    assert {"logged", "thrown"} <= set(opened.errors)
    assert opened.external == ["https://example.org/a.js"]
    assert opened.violations() == ["serious color-contrast: p"]
    assert opened.wider_by() > 200
    assert opened.weight() == len(FAULTY)
    opened = visit(good, width=390)
    assert (opened.errors, opened.external, opened.violations()) == ([], [], [])
    assert opened.page.evaluate("localStorage.left") is None
    assert visit(faulty, theme="dark").violations() == []
