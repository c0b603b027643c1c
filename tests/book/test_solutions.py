"""Every check of an exercise accepts right answers that look different, and no wrong one.

The answers are in `NAME.solutions.py` beside each chapter. The stub and the folded solution are
tried whenever a chapter is tested.
"""

from collections import Counter

import pytest
from exercise_cells import CHECKS, IN_THE_BANK, answer_in, said_to, solutions_of, state_for

# These start no ranks, and take less than a second each. All others together take minutes.
QUICK = {
    "choosing_buckets",
    "in_the_data",
    "sum_or_average",
}
TRIED = [
    pytest.param(*pair, marks=() if pair[0].stem in QUICK else pytest.mark.slow) for pair in CHECKS
]


@pytest.mark.parametrize(("chapter", "check"), CHECKS, ids=lambda p: getattr(p, "stem", p))
def test_a_check_is_tried_on_two_right_answers_and_on_wrong_ones(chapter, check):
    tried = Counter(s.expected for s in solutions_of(chapter) if s.check == check)
    assert tried["wrong"] >= (1 if check in IN_THE_BANK else 3)
    assert tried["right"] >= 2


@pytest.mark.parametrize(("chapter", "check"), TRIED, ids=lambda p: getattr(p, "stem", p))
def test_a_check_tells_wrong_answers_from_right_ones(chapter, check, monkeypatch):
    monkeypatch.chdir(chapter.parent)
    solutions = [s for s in solutions_of(chapter) if s.check == check]
    state = state_for(chapter, check, [s.source for s in solutions])
    mistaken = []
    for solution in solutions:
        said = said_to(answer_in(solution, state), state[check])
        print(f"{solution.expected}: {solution.title} → {said}")
        right = said == "Right."
        helps = said.startswith("Not yet: ") and "it raises an error" not in said
        if not (right if solution.expected == "right" else helps):
            mistaken.append(f"{solution.expected}: {solution.title} → {said}")
    assert not mistaken, "\n".join(mistaken)
