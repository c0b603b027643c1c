"""No wrong answer that a machine makes from a right one passes a check.

The mutants are those of `tests/mutations.py`. One that passes has to be described by a line
`# %% check_… blind PATTERN: reason` in `NAME.solutions.py` beside the chapter: the pattern is found
in the mutant's title, and the reason says why it is right, or why the check need not see it.
"""

import re
from collections.abc import Iterator

import cloudpickle
import mutations
import pytest
from exercise_cells import (
    CHECKS,
    IN_THE_BANK,
    Solution,
    answer_in,
    blind_spots_of,
    said_to,
    solutions_of,
    state_for,
)
from mutations import Mutant, mutants_around, mutants_of
from persistent_ranks import PersistentRanks, persistent_ranks

MOST = 40  # mutants of a code, evenly chosen; fewer for a check that runs all invariants
FEW = {"check_invariants": 6, "check_trainer": 6}

TRIED = [
    pytest.param(chapter, check, id=f"{chapter.stem}-{check}")
    for chapter, check in CHECKS
    if check in IN_THE_BANK
]


@pytest.fixture(scope="module")
def staying() -> Iterator[PersistentRanks]:
    cloudpickle.register_pickle_by_value(mutations)
    with persistent_ranks() as ranks:
        yield ranks
    cloudpickle.unregister_pickle_by_value(mutations)


def mutants(solution: Solution, answer: object) -> list[Mutant]:
    of_code = list({mutant.source: mutant for mutant in mutants_of(solution.source)}.values())
    of_code = of_code[:: -(-len(of_code) // FEW.get(solution.check, MOST))]
    if isinstance(answer, type) or not callable(answer):
        return of_code
    return of_code + [m._replace(source=solution.source) for m in mutants_around(solution.source)]


@pytest.mark.slow
@pytest.mark.parametrize(("chapter", "check"), TRIED)
def test_no_mutant_of_a_right_answer_passes(chapter, check, staying, monkeypatch):
    monkeypatch.chdir(chapter.parent)
    right = next(s for s in solutions_of(chapter) if (s.check, s.expected) == (check, "right"))
    state = state_for(chapter, check, [right.source])
    answer = answer_in(right, state)
    assert said_to(answer, state[check]) == "Right."
    tried = mutants(right, answer)
    passed = []
    for mutant in tried:
        try:
            wrong = mutant.around(answer_in(right._replace(source=mutant.source), state))
        except Exception:
            continue  # there is no answer
        if said_to(wrong, state[check]) == "Right.":
            passed.append(mutant.title)
        else:
            staying.renew()
    blind = blind_spots_of(chapter, check)
    survivors = [title for title in passed if not any(re.search(b, title) for b in blind)]
    print(f"{check}: {len(tried)} mutants, {len(passed)} pass, {len(survivors)} unexplained")
    assert not survivors, "\n".join(survivors)
