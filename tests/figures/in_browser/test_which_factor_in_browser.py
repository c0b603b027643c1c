"""Answering the questions of "Which factor is right?" ends with a line of code and a link."""

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
    for (number, answers), leaf in zip(paths.items(), leaves, strict=True):
        figure = open_figure("which_factor").page.locator("figure.playable")
        for answer in answers:
            figure.get_by_label(answer, exact=True).check(force=True)
        expect(figure.locator("pre")).to_have_text(leaf["line"])
        expect(figure.locator(".figure-says")).to_contain_text(f"ratio {leaf['measured'][0]:.4f}")
        link = figure.get_by_role("link", name=f"See leaf {number} run")
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
    expect(figure.locator(".figure-says")).to_have_text("2 of the 11 leaves are left.")
    expect(figure.locator("pre")).to_have_count(0)
