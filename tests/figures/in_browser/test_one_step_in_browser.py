"""Using "One step, live" changes its state, and it says what its logic computes."""

import re

from browser import OpenedPage
from figures.node import call
from playwright.sync_api import Locator, expect

FIRST, SECOND = [2, 5, -1, 2], [-2, 0, 1, 2]


def written(vector) -> str:
    return "({:.2f}, {:.2f})".format(*vector).replace("-", "−")


def figure_of(opened: OpenedPage) -> Locator:
    return opened.page.locator("figure.playable")


def expect_outcome(opened: OpenedPage, **wanted: object) -> None:
    """The figure is in this state, and its sentence and two numbers are those of its logic."""
    state = opened.page.evaluate("Figures.states().one_step")
    assert {key: state[key][:2] if key == "samples" else state[key] for key in wanted} == wanted
    [outcome] = call("one_step", "step", [(state,)])
    says = figure_of(opened).locator(".figure-says")
    expect(says).to_contain_text(f"full batch's gradient is {written(outcome['truth'])}")
    expect(says).to_contain_text(written(outcome["final"][0]))
    for name in ("ratio", "cosine") if outcome["synchronized"] else ():
        number = figure_of(opened).locator("svg text").filter(has_text=f"{outcome[name][0]:.4f}")
        expect(number.first).to_be_visible()


def test_a_key_on_the_slider_adds_a_rank(open_figure):
    opened = open_figure("one_step")
    figure = figure_of(opened)
    expect_outcome(opened, w=2, samples=[FIRST, SECOND])
    figure.get_by_label("Ranks (W)", exact=True).focus()
    opened.page.keyboard.press("ArrowRight")
    expect_outcome(opened, w=3)
    opened.page.keyboard.press("ArrowRight")
    expect_outcome(opened, w=4)
    assert opened.page.evaluate("document.activeElement.type") == "range"


def test_unequal_counts_are_a_direction_bug_and_the_global_count_times_w_repairs_it(open_figure):
    opened = open_figure("one_step")
    figure = figure_of(opened)
    figure.get_by_role("button", name="unequal counts").click()
    expect_outcome(opened, samples=[[2, 5], [*SECOND, 0, 0]])
    expect(figure).to_contain_text("direction bug")
    expect(figure.get_by_role("link")).to_have_attribute("href", re.compile("#leaf-2$"))
    figure.get_by_role("button", name="divide by all", exact=True).click()
    expect_outcome(opened, divide="all", factor="1")
    expect(figure).to_contain_text("scale bug")
    figure.get_by_role("button", name="divide by all, × W").click()
    expect_outcome(opened, divide="all", factor="W")
    expect(figure).to_contain_text("✓ yes")


def test_a_sample_is_dragged_with_the_mouse_and_moved_with_the_keyboard(open_figure):
    opened = open_figure("one_step")
    figure = figure_of(opened)
    mouse, keyboard = opened.page.mouse, opened.page.keyboard
    sample = figure.get_by_role("button", name="Sample 0 of rank 0: x 2, y 5")
    beside = figure.get_by_role("button", name="Sample 1 of rank 0: x -1, y 2").bounding_box()
    box = sample.bounding_box()
    mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    mouse.down()
    mouse.move(box["x"] + 30, box["y"] + 30, steps=3)
    mouse.move(beside["x"] + beside["width"] / 2, box["y"] + box["height"] / 2, steps=5)
    mouse.up()
    expect_outcome(opened, samples=[[-1, 5, -1, 2], SECOND])
    keyboard.press("ArrowDown")
    keyboard.press("ArrowRight")
    expect_outcome(opened, samples=[[-0.5, 4.5, -1, 2], SECOND])


def test_every_mistake_can_be_switched_on_without_a_mouse(open_figure):
    opened = open_figure("one_step")
    figure = figure_of(opened)
    press = opened.page.keyboard.press
    figure.get_by_text("More switches").focus()
    press("Enter")
    figure.get_by_label("ddp(x)", exact=True).focus()
    press("ArrowRight")
    expect(figure).to_contain_text("replicas diverge")
    expect_outcome(opened, through="module", combine="average")
    press("ArrowLeft")
    figure.get_by_label("averaged", exact=True).focus()
    press("ArrowRight")
    expect_outcome(opened, through="ddp", combine="sum", accumulate="off")
    figure.get_by_label("Two micro-batches per rank").focus()
    press("ArrowDown")
    press("ArrowDown")
    expect_outcome(opened, combine="sum", accumulate="each")


def test_one_sample_more_is_a_press_of_its_button(open_figure):
    opened = open_figure("one_step")
    figure = figure_of(opened)
    figure.get_by_role("button", name="One sample more on rank 1").click()
    expect_outcome(opened, samples=[FIRST, [*SECOND, 0, 0]])
    expect(figure.get_by_role("link")).to_have_attribute("href", re.compile("#leaf-2$"))
