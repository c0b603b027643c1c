"""Every check of an exercise accepts right answers that look different, and no wrong one.

Answers are in `NAME.solutions.py` beside each chapter. The stub and the folded solution are tried
whenever a chapter is tested. Other wrong answers a machine makes from the first right one
(`tests/mutations.py`). One of these that passes is either right, because it does what the right one
does (`tests/oracle.py`), or is described by a line `# %% check_… blind PATTERN: reason`: the
pattern is found in the mutant's title, and the reason says why the check need not see it.
"""

import re
from collections.abc import Iterator
from time import monotonic

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
from persistent_ranks import PersistentRanks, persistent_ranks

MOST = 40  # mutants of a code, evenly chosen; fewer for a check that takes seconds
FEW = {
    **dict.fromkeys(("check_findings", "check_script", "check_missing"), 6),
    **dict.fromkeys(("check_report", "check_step", "check_invariants", "check_trainer"), 12),
    **dict.fromkeys(("check_save", "check_adapter", "check_skipping"), 12),
}
ON_EACH = pytest.mark.parametrize(("chapter", "check"), CHECKS, ids=lambda p: getattr(p, "stem", p))


@pytest.mark.slow
@ON_EACH
def test_a_check_tells_wrong_answers_from_right_ones(chapter, check, monkeypatch):
    monkeypatch.chdir(chapter.parent)
    solutions = [s for s in solutions_of(chapter) if s.check == check]
    assert sum(s.expected == "right" for s in solutions) >= 2
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


@pytest.fixture(scope="module")
def staying() -> Iterator[PersistentRanks]:
    for module in (mutations, oracle):
        cloudpickle.register_pickle_by_value(module)
    with persistent_ranks() as ranks:
        yield ranks
    for module in (mutations, oracle):
        cloudpickle.unregister_pickle_by_value(module)


def mutants(solution: Solution, answer: object) -> list[Mutant]:
    most = FEW.get(solution.check, MOST)
    source = answer if isinstance(answer, str) else solution.source  # a script is its own code
    of_code = list({mutant.source: mutant for mutant in mutants_of(source)}.values())
    of_code = of_code[:: -(-len(of_code) // most)]
    same = solution.source
    if isinstance(answer, str):
        return [m._replace(source=same, around=lambda _, code=m.source: code) for m in of_code]
    around = [m._replace(source=same) for m in mutants_around(same)]
    return of_code + around[:: -(-len(around) // most) or 1]


@pytest.mark.slow
@ON_EACH
def test_no_mutant_of_a_right_answer_passes(chapter, check, staying, monkeypatch):
    monkeypatch.chdir(chapter.parent)
    began = monotonic()
    right = next(s for s in solutions_of(chapter) if (s.check, s.expected) == (check, "right"))
    state = state_for(chapter, check, [right.source])
    answer = answer_in(right, state)
    assert said_to(answer, state[check]) == "Right."
    tried, alike, passed = 0, [], []
    for mutant in mutants(right, answer):
        try:
            wrong = mutant.around(answer_in(right._replace(source=mutant.source), state))
        except Exception:
            continue  # there is no answer
        said = said_to(wrong, state[check])
        tried += "NoMutantError" not in said
        if said == "Right.":
            same = oracle.equivalent(wrong, answer, state[check])
            (alike if same else passed).append(mutant.title)
    blind = blind_spots_of(chapter, check)
    survivors = [title for title in passed if not any(re.search(b, title) for b in blind)]
    needless = [b for b in blind if not any(re.search(b, title) for title in passed)]
    print(
        f"{check}: {tried} mutants, {len(alike)} alike, {len(passed)} pass,"
        f" {len(survivors)} unexplained, {monotonic() - began:.0f} s"
    )
    assert not survivors + needless, "\n".join(survivors + [f"needless: {b}" for b in needless])
