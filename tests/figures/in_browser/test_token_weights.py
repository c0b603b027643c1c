"""A completion's length and its micro-batch change with the keys and with the pointer."""

from playwright.sync_api import expect

STATE = "Figures.states().token_weights"


def test_arrows_and_drags_change_a_completions_length_and_its_micro_batch(open_figure):
    opened = open_figure("token_weights")
    page = opened.page
    bar = page.get_by_role("slider", name="Completion 1:")
    bar.focus()
    for key in ("ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert page.evaluate(STATE)["lengths"][0] == 3
    assert page.evaluate(STATE)["cells"][0] == 1
    expect(bar).to_be_focused()
    expect(bar).to_have_attribute("aria-valuetext", "3 tokens, rank 0, micro-batch 1")

    box = bar.bounding_box()
    there = page.get_by_text("rank 1, micro-batch 1").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 4, box["y"] + 12)
    page.mouse.down()
    page.mouse.move(box["x"] + 2 * box["width"], there["y"] + 30, steps=4)
    page.mouse.up()
    assert page.evaluate(STATE)["lengths"][0] == 6
    assert page.evaluate(STATE)["cells"][0] == 3


def test_the_sentence_names_the_worst_token_and_all_ranks_counts_are_right(open_figure):
    figure = open_figure("token_weights").page.locator("figure.playable")
    expect(figure.locator(".figure-says")).to_have_text(
        "A token of completion 5 (2 tokens, rank 1, micro-batch 0) has 2.50 times its right weight."
    )
    figure.get_by_label("all ranks, over W", exact=True).check(force=True)
    expect(figure.locator(".figure-says")).to_contain_text("Every token has the weight")
