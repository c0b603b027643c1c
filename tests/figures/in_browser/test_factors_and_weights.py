"""The figures of factors and of weights in a browser: answers, keys, and drags change them."""

import re

from figures.node import call
from playwright.sync_api import expect


def test_answers_lead_to_every_leaf_of_the_tree(open_figure):
    own, gathered = "its own only", "samples of all ranks, gathered"
    paths = {
        1: [own, "its own count", "yes, always"],
        2: [own, "its own count", "not always"],
        3: [own, "the global count"],
        4: [own, 'nothing (reduction="sum")'],
        5: [gathered, "the whole loss", "yes"],
        6: [gathered, "the whole loss", "no; the rank reinserts its own slice"],
        7: [gathered, "its own rows of it", "yes; the global count"],
        8: [gathered, "its own rows of it", "yes; the own count"],
        9: [gathered, "its own rows of it", "no"],
        10: ["summed", "the global count"],
        11: ["summed", "its own count, equal on all ranks"],
    }
    leaves = call("which_factor", "leaf", [(number,) for number in paths])
    figure = open_figure("which_factor").page.locator("figure.playable")
    for (number, answers), leaf in zip(paths.items(), leaves, strict=True):
        figure.get_by_role("button", name="Reset").click()
        for answer in answers:
            figure.get_by_label(answer, exact=True).check(force=True)
        expect(figure.locator("pre")).to_have_text(leaf["line"])
        expect(figure.locator(".figure-says")).to_contain_text(f"ratio {leaf['measured'][0]:.4f}")
        link = figure.get_by_role("link", name=f"See case {number} run")
        expect(link).to_have_attribute("href", re.compile(rf"when_to_multiply.html#leaf-{number}$"))


def test_the_arrow_keys_answer_and_the_focus_stays(open_figure):
    opened = open_figure("which_factor")
    figure = opened.page.locator("figure.playable")
    figure.get_by_label("yes, always").focus()
    opened.page.keyboard.press("ArrowRight")
    expect(figure.locator(".figure-says")).to_contain_text("cosine 0.8027")
    assert opened.page.evaluate("document.activeElement.value") == "unequal"


def test_an_open_question_says_how_many_leaves_are_left(open_figure):
    figure = open_figure("which_factor").page.locator("figure.playable")
    figure.get_by_label("summed", exact=True).check(force=True)
    expect(figure.locator(".figure-says")).to_have_text("2 of the 11 cases are left.")
    expect(figure.locator("pre")).to_have_count(0)


def test_the_answer_can_be_copied_for_a_forum_with_its_address(open_figure):
    page = open_figure("which_factor").page
    figure = page.locator("figure.playable")
    figure.get_by_label("the global count", exact=True).check(force=True)
    page.evaluate("navigator.clipboard.writeText = (text) => { window.copied = text }")
    figure.get_by_role("button", name="Copy as Markdown").click()
    expect(figure.locator(".figure-note")).to_have_text("Answer copied.")
    copied = page.evaluate("window.copied")
    assert "- What does the loss divide by? **the global count**" in copied
    assert "```python\nloss = losses.sum() / samples_on_all_ranks * world_size\n```" in copied
    assert "ratio 0.5000, cosine 1.0000" in copied
    assert copied.endswith("#which_factor:divide=all)")


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
