"""Using "One step, live" changes the numbers that it states to those of Python."""

import re

from figures.one_step import Step, gradients_of_step
from playwright.sync_api import Locator, expect

from labkit.testing.compare import ratio_and_cosine

SAMPLES = (((2, 5), (-1, 2)), ((-2, 0), (1, 2)), ((3, 2), (-3, 1)), ((0, 4), (-2, 3)))


def written(vector) -> str:
    return "({:.2f}, {:.2f})".format(*vector).replace("-", "−")


def expect_outcome(figure: Locator, step: Step) -> None:
    """The figure's sentence and its two numbers are those that Python computes."""
    outcome = gradients_of_step(step)
    says = figure.locator(".figure-says")
    expect(says).to_contain_text(f"full batch's gradient is {written(outcome.truth)}")
    expect(says).to_contain_text(written(outcome.final[0]))
    if step.synchronizes:
        for number in ratio_and_cosine([outcome.final[0]], [outcome.truth]):
            expect(
                figure.locator("svg text").filter(has_text=f"{number:.4f}").first
            ).to_be_visible()


def test_a_key_on_the_slider_adds_a_rank(open_figure):
    opened = open_figure("one_step")
    figure = opened.page.locator("figure.playable")
    expect_outcome(figure, Step(SAMPLES[:2]))
    figure.get_by_label("Ranks (W)", exact=True).focus()
    opened.page.keyboard.press("ArrowRight")
    expect_outcome(figure, Step(SAMPLES[:3]))
    opened.page.keyboard.press("ArrowRight")
    expect_outcome(figure, Step(SAMPLES))
    assert opened.page.evaluate("document.activeElement.type") == "range"


def test_unequal_counts_are_a_direction_bug_and_the_global_count_times_w_repairs_it(open_figure):
    figure = open_figure("one_step").page.locator("figure.playable")
    unequal = (((2, 5),), ((-2, 0), (1, 2), (0, 0)))
    figure.get_by_role("button", name="unequal counts").click()
    expect_outcome(figure, Step(unequal))
    expect(figure).to_contain_text("direction bug")
    expect(figure.get_by_role("link")).to_have_attribute("href", re.compile("#leaf-2$"))
    figure.get_by_role("button", name="divide by all", exact=True).click()
    expect_outcome(figure, Step(unequal, divide="all"))
    expect(figure).to_contain_text("scale bug")
    figure.get_by_role("button", name="divide by all, × W").click()
    expect_outcome(figure, Step(unequal, divide="all", factor=2.0))
    expect(figure).to_contain_text("✓ yes")


def test_a_sample_is_dragged_with_the_mouse_and_moved_with_the_keyboard(open_figure):
    opened = open_figure("one_step")
    figure = opened.page.locator("figure.playable")
    mouse, keyboard = opened.page.mouse, opened.page.keyboard
    sample = figure.get_by_role("button", name="Sample 0 of rank 0: x 2, y 5")
    beside = figure.get_by_role("button", name="Sample 1 of rank 0: x -1, y 2").bounding_box()
    box = sample.bounding_box()
    mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    mouse.down()
    mouse.move(box["x"] + 30, box["y"] + 30, steps=3)
    mouse.move(beside["x"] + beside["width"] / 2, box["y"] + box["height"] / 2, steps=5)
    mouse.up()
    expect_outcome(figure, Step((((-1, 5), (-1, 2)), SAMPLES[1])))
    keyboard.press("ArrowDown")
    keyboard.press("ArrowRight")
    expect_outcome(figure, Step((((-0.5, 4.5), (-1, 2)), SAMPLES[1])))


def test_every_mistake_can_be_switched_on_without_a_mouse(open_figure):
    opened = open_figure("one_step")
    figure = opened.page.locator("figure.playable")
    press = opened.page.keyboard.press
    figure.get_by_text("More switches").focus()
    press("Enter")
    figure.get_by_label("ddp(x)", exact=True).focus()
    press("ArrowRight")
    expect(figure).to_contain_text("replicas diverge")
    expect_outcome(figure, Step(SAMPLES[:2], wrapped=False))
    press("ArrowLeft")
    figure.get_by_label("averaged", exact=True).focus()
    press("ArrowRight")
    expect_outcome(figure, Step(SAMPLES[:2], combine="sum"))
    figure.get_by_label("Two micro-batches per rank").focus()
    press("ArrowDown")
    press("ArrowDown")
    expect_outcome(figure, Step(SAMPLES[:2], combine="sum", accumulate="each"))


def test_one_sample_more_is_a_press_of_its_button(open_figure):
    figure = open_figure("one_step").page.locator("figure.playable")
    figure.get_by_role("button", name="One sample more on rank 1").click()
    expect_outcome(figure, Step((SAMPLES[0], (*SAMPLES[1], (0, 0)))))
    expect(figure.get_by_role("link")).to_have_attribute("href", re.compile("#leaf-2$"))
