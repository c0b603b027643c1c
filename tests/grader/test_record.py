"""What of a check leaves the trusted side: nothing that computes an answer."""

import ast

import pytest
from grader_notebooks import ASSIGNMENTS

from grader.record import reduced, what_ranks_need
from grader.source import read_assignment

# Every function and class that is executed where a student's code can read it. Whoever adds one
# has to look: does it, given the inputs of all ranks, return what has to come out?
ON_RANKS = {
    "average_gradients": {"Branches", "backward", "gradients", "direction"},
    "token_weighting": {"model_and_batches", "averaged", "direction"},
    "sum_and_average": {
        *("Centered", "Linear", "tensors", "gradients", "scaled", "weights", "direction"),
        "answer_cases",
    },
    "overlapped_reducer": {
        *("Deep", "Wide", "backward", "gradients", "direction", "step", "buckets_of"),
    },
    "five_bugs": {"Model", "batches_of", "gradients", "heads_and_loss", "accepted"},
}
CHECKS = [
    pytest.param(assignment.name, check, id=f"{assignment.name}-{check.name}")
    for assignment in map(read_assignment, sorted(ASSIGNMENTS.glob("*.ipynb")))
    for check in assignment.checks
]


@pytest.mark.parametrize(("assignment", "check"), CHECKS)
def test_of_a_check_a_rank_gets_only_what_calls_the_student(assignment, check):
    tree = ast.parse(what_ranks_need(check.source))
    defined = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    methods = {
        inner.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for inner in node.body
        if isinstance(inner, ast.FunctionDef)
    }
    assert "on_rank" in defined
    assert defined - methods - {"on_rank"} <= ON_RANKS[assignment]


@pytest.mark.parametrize(("assignment", "check"), CHECKS)
def test_what_a_rank_gets_can_be_executed(assignment, check):
    compile(what_ranks_need(check.source), "<check>", "exec")


SOURCE = '''"""A concept."""
import math

SIZE, WIDTH = 3, 4
WRONG = {"a": "what it is called"}
names = sorted(WRONG)


def helper(x):
    return x * SIZE


def answer(givens):
    return helper(sum(givens))


@property
def unused():
    return answer


def draw(rng):
    return [{}]


def on_rank(student, given):
    return helper(student.f(given))


def expected(givens):
    return answer(givens)


def judge(seen, results, givens):
    return math.pi, WRONG
'''


def kept(source):
    return [getattr(node, "name", ast.unparse(node)) for node in ast.parse(source).body]


def test_helpers_and_constants_go_where_what_uses_them_goes():
    for_ranks = kept(what_ranks_need(SOURCE))
    assert for_ranks == ["'A concept.'", "import math", "SIZE, WIDTH = (3, 4)", "helper", "on_rank"]
    released = kept(reduced(SOURCE, "on_rank", "judge"))
    assert [name for name in released if name not in for_ranks] == [
        "WRONG = {'a': 'what it is called'}",
        "judge",
    ]


def test_what_computes_is_left_out_even_where_on_rank_uses_it():
    source = SOURCE.replace("helper(student.f(given))", "expected([given])")
    assert "expected" not in kept(what_ranks_need(source))
    assert "answer" not in kept(what_ranks_need(source))
