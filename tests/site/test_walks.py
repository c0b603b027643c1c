"""Four visitors of the front page reach what they came for in two clicks."""

import re
from pathlib import Path

import pytest
from browser import OpenPage
from playwright.sync_api import Locator, Page, expect

from labkit.launch.scripts import project_root


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
