"""The front page: a figure that stays in view, an address per state, and doors that lead on."""

import re
from pathlib import Path

import pytest
from browser import OpenedPage, OpenPage
from playwright.sync_api import Locator, Page, expect

from labkit.book.result_tables import said
from labkit.book.row_and_diagonal import STATES, outcomes, weights
from labkit.launch.scripts import project_root

LAST = list(STATES)[-1]


def stage(opened: OpenedPage) -> Locator:
    return opened.page.locator(".stage")


def expect_state(opened: OpenedPage, name: str) -> None:
    """The figure shows this state's weights and verdict, and both are in view."""
    number, state = list(STATES).index(name), STATES[name]
    drawing = stage(opened).locator("svg")
    expect(stage(opened).get_by_role("status")).to_contain_text(f"{number + 1} of {len(STATES)}: ")
    shown = drawing.locator(".four-cell [data-part]").all_text_contents()
    assert shown == [str(weight) for weight in weights(state)]
    verdict = drawing.locator(".four-verdict")
    expect(verdict).to_contain_text(said(*outcomes(state)[-1][:2]))
    expect(verdict).to_be_in_viewport()


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "light"), (390, "dark")])
@pytest.mark.parametrize("name", ["unequal-counts", "calling-module", LAST])
def test_an_address_opens_its_state_with_its_text_beside_or_below(
    site: Path, open_page: OpenPage, name, width, theme
):
    opened = open_page(site / "index.html", fragment=name, width=width, theme=theme)
    expect_state(opened, name)
    heading = opened.page.locator(f"#{name} h2")
    text = opened.page.locator(f"#{name} p").first
    expect(heading).to_be_in_viewport()
    expect(text).to_be_in_viewport()
    figure, first = stage(opened).bounding_box(), heading.bounding_box()
    beside = figure["x"] >= first["x"] + first["width"] - 1
    assert beside or figure["y"] + figure["height"] <= first["y"] + 1
    assert figure["height"] <= 0.45 * opened.page.viewport_size["height"]
    assert opened.wider_by() == 0
    assert opened.errors == []


def test_the_figure_follows_who_scrolls(site: Path, open_page: OpenPage):
    opened = open_page(site / "index.html", reduced_motion=True)
    expect_state(opened, "row-and-diagonal")
    for name in STATES:
        opened.page.locator(f"#{name}").evaluate("each => each.scrollIntoView()")
        expect_state(opened, name)


def test_states_are_stepped_with_the_keyboard_and_the_address_follows(
    site: Path, open_page: OpenPage
):
    opened = open_page(site / "index.html", reduced_motion=True)
    page = opened.page
    button = page.get_by_role("button", name="Next state")
    button.focus()
    page.keyboard.press("Enter")
    expect_state(opened, "equal-counts")
    page.keyboard.press("ArrowRight")
    expect_state(opened, "unequal-counts")
    assert page.url.endswith("#unequal-counts")
    page.keyboard.press("ArrowLeft")
    expect_state(opened, "equal-counts")
    outline = "each => parseFloat(getComputedStyle(each).outlineWidth)"
    assert button.evaluate(outline) >= 2


def test_without_javascript_every_section_has_its_own_picture(site: Path, open_page: OpenPage):
    page = open_page(site / "index.html", javascript=False).page
    expect(page.locator(".stage")).to_be_hidden()
    for name, state in STATES.items():
        drawing = page.locator(f"#{name} figure svg")
        assert drawing.bounding_box()["width"] > 300
        shown = drawing.locator(".four-cell [data-part]").all_text_contents()
        assert shown == [str(weight) for weight in weights(state)]
        assert str(weights(state)[0]) in drawing.get_attribute("aria-label")


def test_every_state_has_one_line_to_copy(site: Path, open_page: OpenPage):
    page = open_page(site / "index.html").page
    for name in STATES:
        code = page.locator(f"#{name} .highlight-python")
        assert len(code.locator("pre").inner_text().strip().splitlines()) == 1
        compile(code.locator("pre").inner_text(), name, "exec")
        expect(code.locator("button.copybtn")).to_be_visible()


def test_a_search_of_symptoms_leads_to_those_with_the_words(site: Path, open_page: OpenPage):
    page = open_page(site / "index.html").page
    page.get_by_label("More than a hundred symptoms").fill("hangs epoch")
    page.keyboard.press("Enter")
    page.wait_for_url("**/symptoms.html?words=hangs+epoch")
    expect(page.get_by_role("status")).to_contain_text(" of ")


# Four visitors reach what they came for in two clicks.


@pytest.fixture
def front(site: Path, open_page: OpenPage) -> Page:
    return open_page(site / "index.html").page


def door(page: Page, link: str) -> Locator:
    return page.locator(".front-doors").get_by_role("link", name=link, exact=True)


def test_a_puzzle_leads_to_its_answer(front: Page):
    door(front, "Frequent symptoms").click()
    row = front.get_by_role("row", name="Several GPUs train no better than one")
    expect(row).to_be_in_viewport()
    row.get_by_role("link").click()
    answer = front.locator(".admonition").filter(has_text="The short answer").first
    expect(answer).to_be_in_viewport(ratio=0.9)
    expect(answer).to_contain_text("wrapper")


def test_a_learner_plays_with_a_figure(front: Page):
    door(front, "Play with one step").click()
    figure = front.locator("figure.playable")
    expect(figure).to_contain_text("✓ yes")
    button = figure.get_by_role("button", name="unequal counts")
    expect(button).to_be_in_viewport()
    button.click()
    expect(figure).not_to_contain_text("✓ yes")
    expect(figure).to_contain_text("direction bug")


def test_a_teacher_finds_the_command_that_releases_an_assignment(front: Page):
    door(front, "Teach with this book").click()
    contents = front.locator(".bd-sidebar-secondary")
    contents.get_by_role("link", name="Release", exact=True).click()
    command = front.locator("#release pre").first
    expect(command).to_be_in_viewport()
    source = re.search(r"grader release (\S+\.ipynb)", command.inner_text())[1]
    assert (project_root() / source).is_file()


def test_an_engineer_finds_a_whole_script_and_how_to_start_it(front: Page):
    door(front, "Use it in your script").click()
    script = front.locator("#a-script-of-20-lines .highlight-python pre")
    expect(script).to_be_in_viewport()
    compile(script.inner_text(), "script.py", "exec")
    expect(front.locator("#a-script-of-20-lines .highlight-python button.copybtn")).to_have_count(1)
    expect(front.locator("#a-script-of-20-lines .highlight-bash pre")).to_contain_text("torchrun")
