"""The ring in a browser: keys and buttons change its numbers to those of the cost model."""

import re

import pytest
from browser import OpenedPage
from playwright.sync_api import expect

from labkit.profiling.cost_model import ALGORITHMS, least_bytes

NAME = "the_ring"
WAYS = {"naive": "naive", "ring": "ring", "doubling": "recursive doubling"}


def in_n(amount: float) -> str:
    """As the figure writes it: three digits, the last one only if it is not zero."""
    return re.sub("0$", "", f"{amount:.3f}")


def expect_the_end(opened: OpenedPage, algorithm: str, world_size: int) -> None:
    """All steps taken: the sum, and the steps and bytes of the cost model."""
    cost = ALGORITHMS[algorithm](world_size, 1)
    text = opened.says()
    assert re.search(rf"After {cost.steps} steps?, every rank has the sum", text), text
    assert f"the sum, {sum(range(1, world_size + 1))}." in text
    assert f"sent {in_n(cost.sent)} n" in text
    assert f"the busiest is {in_n(least_bytes(world_size, 1))} n" in text


@pytest.mark.parametrize("way", WAYS)
def test_after_the_last_step_it_states_the_cost_models_steps_and_bytes(open_figure, way):
    opened = open_figure(NAME, f"way={way}&w=2&step=99")
    ranks = opened.page.locator('input[data-key="w"]')
    for world_size in range(2, 9):
        opened.page.locator('input[data-key="step"]').press("End")
        expect_the_end(opened, WAYS[way], world_size)
        ranks.press("ArrowRight")


def test_on_two_nodes_of_four_the_hierarchical_one_sends_1_n_out_and_the_ring_one_and_3_quarters(
    open_figure,
):
    opened = open_figure(NAME, "w=8&step=14")
    assert "1.75 n left a node; the least possible is 1.00 n" in opened.says()
    opened.page.get_by_role("radio", name="ring", exact=True).focus()
    opened.page.keyboard.press("ArrowRight")
    opened.page.keyboard.press("ArrowRight")
    opened.page.locator('input[data-key="step"]').press("End")
    assert "After 8 steps" in opened.says()
    assert "1.00 n left a node; the least possible is 1.00 n" in opened.says()
    drawn = opened.page.locator(".figure-drawing").text_content()
    assert drawn.count("1.00 n out") == 2


def test_the_hierarchical_one_takes_whole_nodes_only(open_figure):
    opened = open_figure(NAME, "way=hierarchical&w=7")
    slider = opened.page.locator('input[data-key="w"]')
    seen = []
    for _ in range(3):
        seen.append(opened.page.evaluate("document.querySelector('output').textContent"))
        slider.press("ArrowLeft")
    assert seen == ["6", "4", "2"]


def test_next_and_back_take_one_step_and_stop_at_the_ends(open_figure):
    opened = open_figure(NAME, "step=0")
    forward, back = (opened.page.get_by_role("button", name=name) for name in ("Next", "Back"))
    expect(back).to_have_attribute("aria-disabled", "true")
    assert "1 on rank 0, 2 on rank 1, … 4 on rank 3" in opened.says()
    steps = ALGORITHMS["ring"](4, 1).steps
    for number in range(1, steps):
        forward.press("Enter")
        assert f"Step {number} of {steps}: 4 messages" in opened.says()
        assert f"the busiest rank has sent {in_n(number / 4)} n" in opened.says()
    forward.press("Space")
    expect_the_end(opened, "ring", 4)
    expect(forward).to_have_attribute("aria-disabled", "true")
    forward.press("Enter")
    expect_the_end(opened, "ring", 4)
    back.press("Enter")
    assert f"Step {steps - 1} of {steps}" in opened.says()


def test_it_moves_only_on_request_and_can_be_stopped(open_figure):
    opened = open_figure(NAME, beside=True)  # its clock must not stop for other tests
    before = opened.says()
    opened.page.clock.install(time=0)
    opened.page.reload()
    opened.page.clock.pause_at(3600)  # from now on it moves only below
    opened.page.clock.run_for(10_000)
    assert opened.says() == before
    opened.page.get_by_role("button", name="Play").click()
    opened.page.clock.run_for(1_300)
    assert "Step 2 of 6" in opened.says()
    opened.page.get_by_role("button", name="Pause").click()
    opened.page.clock.run_for(10_000)
    assert "Step 2 of 6" in opened.says()
    opened.page.get_by_role("button", name="Play").click()
    opened.page.clock.run_for(10_000)
    expect_the_end(opened, "ring", 4)
    expect(opened.page.get_by_role("button", name="Play")).to_be_visible()


def test_who_asked_for_less_motion_gets_no_play_button(open_figure):
    opened = open_figure(NAME, reduced_motion=True)
    assert opened.page.get_by_role("button", name="Next").is_visible()
    assert opened.page.get_by_role("button", name="Play").count() == 0
