"""Right solutions in unusual PyTorch earn every point; known wrong answers lose their checks."""

from dataclasses import replace

import pytest
from grader_notebooks import ASSIGNMENTS
from grader_right import RIGHT

from grader.cli import main
from grader.grade import fresh_seed, grade_together
from grader.known import Known
from grader.merge import Submission, without_magics
from grader.report import sentence_of
from grader.source import read_assignment

SOURCES = {int(path.stem[:2]): path for path in sorted(ASSIGNMENTS.glob("*.ipynb"))}
TASKS = [(number, task) for number, tasks in RIGHT.items() for task in tasks]


@pytest.mark.parametrize(("number", "task"), TASKS, ids=lambda value: str(value))
def test_right_solutions_earn_every_point(number, task):
    assignment = read_assignment(SOURCES[number])
    assert set(RIGHT[number]) == set(assignment.solutions)
    own = tuple(check for check in assignment.checks if task in check.solutions)
    assignment = replace(assignment, checks=own)
    submissions = []
    for name, source in RIGHT[number][task].items():
        solutions = assignment.keys() | {task: without_magics(source)[0]}
        submissions.append((name, Submission(solutions)))
    with Known(assignment, fresh_seed(), trust=True) as known:
        results = grade_together(submissions, known, trust=True, shared=True)
    lost = {
        (result.student, check.name): sentence_of(check) + check.needs_human
        for result in results
        for check in result.checks
        if check.score < check.points
    }
    assert lost == {}
    assert all(result.points == result.score for result in results)


@pytest.mark.parametrize("number", SOURCES)
def test_every_assignment_can_be_released(number, tmp_path, capfd):
    """Its key earns everything, its stubs nothing, each wrong answer loses its own checks only."""
    assert main(["release", str(SOURCES[number]), str(tmp_path), "--trust"]) == 0
    printed = capfd.readouterr().out
    count = 3 + len(read_assignment(SOURCES[number]).wrong_answers)
    assert [f"[{n}/{count}] ok " in printed for n in range(1, count + 1)] == [True] * count
    [notebook] = tmp_path.glob("*.ipynb")
    assert f"Released: {notebook}" in printed
