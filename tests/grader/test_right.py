"""Right solutions in unusual PyTorch earn every point."""

import pytest
from grader_notebooks import ASSIGNMENTS
from grader_right import RIGHT

from grader.grade import fresh_seed, grade_together
from grader.known import Known
from grader.merge import Submission, without_magics
from grader.report import sentence_of
from grader.source import read_assignment

SOURCES = {int(path.stem[:2]): path for path in sorted(ASSIGNMENTS.glob("*.ipynb"))}


@pytest.mark.parametrize("number", RIGHT)
def test_right_solutions_earn_every_point(number):
    """Each task on its own checks; all of an assignment in one run of nbval."""
    assignment = read_assignment(SOURCES[number])
    assert set(RIGHT[number]) == set(assignment.solutions)
    submissions = []
    for task, sources in RIGHT[number].items():
        for name, source in sources.items():
            solutions = assignment.keys() | {task: without_magics(source)[0]}
            submissions.append((f"{task}: {name}", Submission(solutions)))
    with Known(assignment, fresh_seed(), trust=True) as known:
        results = grade_together(submissions, known, teachers=True)
    lost = {
        (result.student, check.name): sentence_of(check) + check.needs_human
        for result in results
        for check in result.checks
        if check.score < check.points
    }
    assert lost == {}
    assert all(result.points == result.score for result in results)
