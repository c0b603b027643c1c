"""Two queues in a browser: keys, buttons, and the mouse change it to what its logic says."""

import re

from browser import OpenedPage
from figures.node import call
from playwright.sync_api import expect

NAME = "two_queues"
MISSING = ("ra12f.rb12f.ra22f.rb22f.ra32f.rb32f", "rb12f.rb22f.rb32f")
SILENT = "completes? without an error"


def queues_of(opened: OpenedPage) -> tuple[str, str]:
    state = opened.page.evaluate("Figures.states().two_queues")
    return state["q0"], state["q1"]


def expect_what_the_logic_says(opened: OpenedPage, texts: tuple[str, str]) -> None:
    """The figure has these queues, and it states the end and the numbers of its logic."""
    assert queues_of(opened) == texts
    detail = opened.page.evaluate("Figures.states().two_queues.detail")
    first, second = call("two_queues", "parse", [(text,) for text in texts])
    [run] = call("two_queues", "pairUp", [(first, second, detail)])
    says = opened.page.locator(".figure-says")
    drawn = opened.page.locator(".figure-drawing").text_content() or ""
    outcomes = [pair["outcome"] for pair in run["pairs"]]
    for number, pair in enumerate(run["pairs"]):
        for rank, calls in enumerate((first, second)):
            if number < len(calls):
                box = opened.page.locator(f'[data-call="{rank}.{number}"]')
                assert (box.get_attribute("aria-label") or "").endswith(f", {pair['outcome']}")
        if pair["outcome"] in ("right", "mixed") and first[number]["op"] == "all_reduce":
            places = [(queue[number], rank) for rank, queue in enumerate((first, second))]
            here, there = call("two_queues", "value", places)
            assert f"{here} + {there} = {pair['results'][0]}" in drawn
    silent = "mixed" in outcomes or "garbled" in outcomes
    assert bool(re.search(SILENT, says.inner_text())) == silent
    stop = next((i for i, one in enumerate(outcomes) if one in ("hang", "mismatch", "error")), None)
    if stop is not None:
        words = {"hang": "forever", "mismatch": "aborts its process", "error": "raises an error"}
        expect(says).to_contain_text(f"all {stop + 1}")
        expect(says).to_contain_text(words[outcomes[stop]])
    elif run["end"] == "right":
        expect(says).to_contain_text("every result is right")
    else:
        expect(says).to_contain_text("nothing is reported")


def test_it_starts_with_a_missing_gradient_and_one_repair_reaches_only_its_own_step(open_figure):
    opened = open_figure(NAME)
    expect_what_the_logic_says(opened, MISSING)
    opened.page.get_by_role("button", name="Insert here").click()
    expect_what_the_logic_says(opened, (MISSING[0], "ra12f.rb12f.rb22f.rb32f"))


def test_every_repair_can_be_made_with_the_keyboard_alone(open_figure):
    opened = open_figure(NAME)
    press = opened.page.keyboard.press
    opened.page.locator('[data-call="1.0"]').focus()
    for number in range(3):
        press("Insert")  # the call that rank 0 makes there: a1, a2, a3
        for _ in range(2 if number < 2 else 0):
            press("ArrowDown")
    expect_what_the_logic_says(opened, (MISSING[0], MISSING[0]))
    press("Alt+ArrowDown")  # a3 behind b3
    expect_what_the_logic_says(opened, (MISSING[0], "ra12f.rb12f.ra22f.rb22f.rb32f.ra32f"))
    press("Delete")
    expect_what_the_logic_says(opened, (MISSING[0], "ra12f.rb12f.ra22f.rb22f.rb32f"))
    press("ArrowLeft")
    focused = opened.page.evaluate("document.activeElement.dataset.call")
    assert focused == "0.5"


def test_buttons_and_lists_change_the_selected_call(open_figure):
    opened = open_figure(NAME, "q0=ra12f.rb12f&q1=ra12f.rb12f")
    page = opened.page
    page.get_by_role("button", name="Later").click()
    expect_what_the_logic_says(opened, ("ra12f.rb12f", "rb12f.ra12f"))
    page.get_by_role("button", name="Earlier").click()
    page.get_by_label("elements").select_option("3")
    expect_what_the_logic_says(opened, ("ra12f.rb12f", "ra13f.rb12f"))
    page.get_by_label("elements").select_option("2")
    page.get_by_label("dtype").select_option("bfloat16")
    expect_what_the_logic_says(opened, ("ra12f.rb12f", "ra12b.rb12f"))
    page.get_by_label("dtype").select_option("float32")
    page.get_by_label("tensor").select_option("w")
    expect_what_the_logic_says(opened, ("ra12f.rb12f", "rw2f.rb12f"))
    page.get_by_label("operation").select_option("barrier")
    expect_what_the_logic_says(opened, ("ra12f.rb12f", "s.rb12f"))
    page.get_by_role("button", name="Remove").click()
    expect_what_the_logic_says(opened, ("ra12f.rb12f", "rb12f"))


def test_a_call_is_dragged_to_another_place_in_its_queue(open_figure):
    opened = open_figure(NAME, "q0=ra12f.rb12f.rc3f&q1=ra12f.rb12f.rc3f")
    opened.page.locator(".figure-drawing").scroll_into_view_if_needed()
    begin, end = (
        opened.page.locator(f'[data-call="0.{number}"]').bounding_box() for number in (0, 2)
    )
    mouse = opened.page.mouse
    mouse.move(begin["x"] + 20, begin["y"] + 20)
    mouse.down()
    mouse.move(end["x"] + 20, end["y"] + 20, steps=4)
    mouse.up()
    expect_what_the_logic_says(opened, ("rb12f.rc3f.ra12f", "ra12f.rb12f.rc3f"))


def test_two_empty_queues_and_a_broken_address_are_drawn_too(open_figure):
    opened = open_figure(NAME, "q0=&q1=&at=7")
    assert queues_of(opened) == ("", "")
    opened.page.get_by_role("button", name="Insert here").click()
    expect_what_the_logic_says(opened, ("", "ra12f"))
    state = "q0=<b>.zz.s&q1=" + ".".join(["s"] * 20) + "&rank=5&at=-3"
    broken = open_figure(NAME, state, beside=True)
    assert queues_of(broken) == ("s", ".".join(["s"] * 8))
    assert opened.errors == broken.errors == []
