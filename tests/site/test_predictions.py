"""A reader predicts numbers on the page, with the keyboard alone, and sees which are right."""

from pathlib import Path

from browser import OpenPage
from playwright.sync_api import expect


def test_a_prediction_is_asked_for_checked_and_followed_by_the_solution(
    site: Path, open_page: OpenPage
):
    path = site / "build" / "average_by_hand.html"
    plain = open_page(path, javascript=False).page
    assert plain.locator("form.predict:visible").count() == 0

    opened = open_page(path, width=390, touch=True)
    page = opened.page
    form = page.locator("form.predict")
    solution = page.locator("#sol-hand-divisor")
    status = form.get_by_role("status")
    printed = solution.get_by_text("2 ranks, rare.weight: 2.00")
    expect(printed).not_to_be_visible()
    for row, given in {"2 ranks, rare.weight": "2", "2 ranks, last.weight": "1/1"}.items():
        form.get_by_label(row).fill(given)
    form.get_by_label("2 ranks, rare.weight").fill("twice")
    page.keyboard.press("Enter")
    expect(status).to_contain_text("“twice” is no number.")
    form.get_by_label("2 ranks, rare.weight").fill("200%")
    form.get_by_label("3 ranks, rare.weight").fill("1/3")
    page.keyboard.press("Enter")
    expect(status).to_have_text("One answer is missing.")
    expect(form.get_by_label("3 ranks, last.weight")).to_be_focused()
    expect(printed).not_to_be_visible()
    page.keyboard.type("1")
    page.keyboard.press("Enter")
    expect(status).to_contain_text("3 of 4 as predicted.")
    assert form.locator(".verdict").all_text_contents() == ["✓", "✓", "✗ 3.00", "✓"]
    expect(printed).to_be_visible()
    assert opened.wider_by() == 0
    assert opened.violations() == []
    assert opened.errors == []
    assert opened.external == []


def test_a_cosine_near_1_is_no_right_answer_to_1_and_a_ratio_has_two_percent(
    site: Path, open_page: OpenPage
):
    page = open_page(site / "start" / "what_is_averaged.html").page
    form = page.locator("form.predict[data-solution=sol-averaged-predict]")
    fields = form.locator("input")
    answers = [field.get_attribute("data-answer") for field in fields.all()]
    assert answers == ["0.2500", "1.0000"]
    for ratio, cosine, marks in (
        ("0.254", "1", ["✓", "✓"]),
        ("0.26", "0.998", ["✗ 0.2500", "✗ 1.0000"]),
    ):
        fields.nth(0).fill(ratio)
        fields.nth(1).fill(cosine)
        fields.nth(1).press("Enter")
        assert form.locator(".verdict").all_text_contents() == marks
