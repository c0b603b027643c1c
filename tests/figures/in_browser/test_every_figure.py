"""What holds for every figure: it opens from a file, and anyone can see, reach, and link to it."""

import re

import pytest
from figures.figure_pages import names
from playwright.sync_api import expect

from labkit.launch.scripts import project_root

NAMES = names(project_root() / "book")
STATE = "name => Figures.states()[name]"


# Beside its starting state, each figure is opened in one that fills its drawing.
FULL = {
    "bucket_timeline": "model=transformer&cap=4",
    "memory_and_traffic": "strategy=hsdp&w=16384",
    "the_ring": "way=doubling&w=7&step=4",
    "two_queues": "q0=ra14h.s.bw4f&q1=ra14b.s.s&rank=0",
}
OPENED = [(name, state) for name in NAMES for state in ("", FULL.get(name)) if state is not None]


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "light"), (390, "dark")])
@pytest.mark.parametrize(("name", "state"), OPENED)
def test_a_figure_opens_from_a_file_without_an_error_a_request_or_a_barrier(
    open_figure, cut_off, name, state, width, theme
):
    opened = open_figure(name, state, width=width, theme=theme)
    figure = opened.page.locator(f"#playable-{name}")
    expect(figure.locator("svg.figure-drawing > *").first).to_be_attached()
    for summary in figure.locator("summary").all():
        summary.click()
    assert opened.errors == []
    assert opened.external == []
    assert opened.wider_by() == 0
    assert opened.violations(f"#playable-{name}") == []
    if state:
        assert cut_off(opened) == []
    assert opened.page.evaluate("document.documentElement.dataset.theme") == theme


@pytest.mark.parametrize("name", NAMES)
def test_every_control_can_be_reached_and_shows_where_the_focus_is(open_figure, name):
    opened = open_figure(name)
    figure = opened.page.locator(f"#playable-{name}")
    for summary in figure.locator("summary").all():
        summary.click()
    figure.locator(".figure-title").evaluate("each => { each.tabIndex = -1; each.focus(); }")
    wanted = figure.locator(".figure-live").evaluate(
        """live => {
            const all = "input:not([type=radio]), input[type=radio]:checked, select, button";
            return [...live.querySelectorAll(all)].length;
        }"""
    )
    reached, names_of = 0, []
    for _ in range(200):
        opened.page.keyboard.press("Tab")
        found = figure.evaluate(
            """figure => {
                const now = document.activeElement;
                if (!figure.contains(now)) return null;
                const shown = now.matches(".figure-option input") ? now.nextElementSibling : now;
                const style = getComputedStyle(shown);
                return [now.tagName, style.outlineStyle, style.outlineWidth];
            }"""
        )
        if found is None:
            break
        tag, outline, thick = found
        assert outline != "none", found
        assert float(thick.removesuffix("px")) >= 2, found
        reached += tag in ("INPUT", "SELECT", "BUTTON")
        names_of.append(tag)
    assert reached == wanted, names_of


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_state_is_in_the_address_which_can_be_copied_and_brings_it_back(
    open_figure, name
):
    opened = open_figure(name)
    figure = opened.page.locator(f"#playable-{name}")
    start = opened.page.evaluate(STATE, name)
    controls = "input[type=radio]:not(:checked), input[type=range], input[type=checkbox]"
    control = figure.locator(f".figure-controls :is({controls})").first
    if control.get_attribute("type") == "range":
        control.focus()
        opened.page.keyboard.press("ArrowRight")
    else:
        control.click(force=True)
    changed = opened.page.evaluate(STATE, name)
    assert changed != start
    opened.page.wait_for_url(re.compile(f"#{name}:."))
    _, state = opened.page.url.split(f"#{name}:")
    again = open_figure(name, state, beside=True)
    assert again.page.evaluate(STATE, name) == changed
    figure.get_by_role("button", name="Copy link").click()
    said = re.compile("Link copied|Copy this link: file:")
    expect(figure.locator(".figure-note")).to_have_text(said)
    figure.get_by_role("button", name="Reset").click()
    assert opened.page.evaluate(STATE, name) == start


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_address_starts_the_figure_as_it_is(open_figure, name):
    whole = open_figure(name)
    state = "w=%E0%A4%A&samples=;;,,&nothing=1&=&combine=nonsense"
    broken = open_figure(name, state, beside=True)
    figure = broken.page.locator(f"#playable-{name}")
    assert broken.errors == []
    expect(figure.locator(".figure-says")).not_to_be_empty()
    assert broken.page.evaluate(STATE, name).keys() == whole.page.evaluate(STATE, name).keys()
