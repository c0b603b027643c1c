"""Every check of an exercise accepts right answers that look different, and no wrong one.

Answers are in `NAME.solutions.py` beside each chapter. The stub and the folded solution are tried
whenever a chapter is tested. Other wrong answers a machine makes from the first right one
(`tests/mutations.py`). One of these that passes is either right, because it does what the right one
does (`tests/oracle.py`), or is described by a line `# %% check_… blind PATTERN: reason`: the
pattern is found in the mutant's title, and the reason says why the check need not see it.
"""

import contextlib
import re
from collections.abc import Iterator
from time import monotonic
from typing import Any

import cloudpickle
import mutations
import oracle
import pytest
from exercise_cells import (
    CHECKS,
    Solution,
    answer_in,
    blind_spots_of,
    said_to,
    solutions_of,
    state_for,
)
from mutations import Mutant, mutants_around, mutants_of
from persistent_ranks import persistent_ranks

MOST = 16  # mutants of a code, evenly chosen
# Checks that take seconds: as many mutants of the code, and as many around it.
FEW = {
    **dict.fromkeys(("check_findings", "check_script"), 6),
    **dict.fromkeys(("check_adapter", "check_invariants", "check_missing", "check_report"), 8),
    **dict.fromkeys(("check_save", "check_skipping", "check_step", "check_trainer"), 8),
    "check_window": 8,
}


@pytest.fixture(scope="module")
def staying() -> Iterator[None]:
    for module in (mutations, oracle):
        cloudpickle.register_pickle_by_value(module)
    with persistent_ranks():
        yield
    for module in (mutations, oracle):
        cloudpickle.unregister_pickle_by_value(module)


def mutants(solution: Solution, answer: object) -> list[Mutant]:
    few = FEW.get(solution.check)
    source = answer if isinstance(answer, str) else solution.source  # a script is its own code
    of_code = list({mutant.source: mutant for mutant in mutants_of(source)}.values())
    of_code = of_code[:: -(-len(of_code) // (few or MOST))]
    same = solution.source
    if isinstance(answer, str):
        return [m._replace(source=same, around=lambda _, code=m.source: code) for m in of_code]
    around = [m._replace(source=same) for m in mutants_around(same)]
    return of_code + (around[:: -(-len(around) // few)] if few and around else around)


def wrong_answers(first: Solution, state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for mutant in mutants(first, answer_in(first, state)):
        with contextlib.suppress(Exception):  # there is no answer
            yield (
                mutant.title,
                mutant.around(answer_in(first._replace(source=mutant.source), state)),
            )


@pytest.mark.slow
@pytest.mark.usefixtures("staying")
@pytest.mark.parametrize(("chapter", "check"), CHECKS, ids=lambda p: getattr(p, "stem", p))
def test_a_check_accepts_right_answers_and_no_wrong_one(chapter, check, monkeypatch):
    monkeypatch.chdir(chapter.parent)
    began, mistaken = monotonic(), []
    solutions = [s for s in solutions_of(chapter) if s.check == check]
    first, _, *_ = (s for s in solutions if s.expected == "right")
    state = state_for(chapter, check, [s.source for s in solutions])
    for solution in solutions:
        said = said_to(answer_in(solution, state), state[check])
        helps = said.startswith("Not yet: ") and "it raises an error" not in said
        if not (said == "Right." if solution.expected == "right" else helps):
            mistaken.append(f"{solution.expected}: {solution.title} → {said}")
    tried, alike, passed = 0, 0, []
    for title, wrong in wrong_answers(first, state):
        said = said_to(wrong, state[check])
        tried += "NoMutantError" not in said
        if said == "Right.":
            same = oracle.equivalent(wrong, answer_in(first, state), state[check])
            alike += same
            passed += [title] * (not same)
    blind = blind_spots_of(chapter, check)
    mistaken += [title for title in passed if not any(re.search(b, title) for b in blind)]
    mistaken += [f"needless: {b}" for b in blind if not any(re.search(b, t) for t in passed)]
    seconds = monotonic() - began
    print(f"{check}: {tried} mutants, {alike} alike, {len(passed)} pass, {seconds:.0f} s")
    assert not mistaken, "\n".join(mistaken)
