"""Right solutions in unusual PyTorch return what the key does in every check of their task."""

from dataclasses import replace

import pytest
from grader_notebooks import ASSIGNMENTS, first_assignment, with_checks

from grader.answer_key import AnswerKey
from grader.grade import fresh_seed
from grader.merge import without_magics
from grader.outputs import are_same
from grader.source import Assignment, CheckSource, read_assignment

SOURCES = {int(path.stem[:2]): path for path in sorted(ASSIGNMENTS.glob("*.ipynb"))}


def on_three_ranks(assignment: Assignment) -> Assignment:
    """Its checks with one group of ranks each. Three divide few numbers evenly."""
    checks = [
        replace(check, ranks=(3,)) if len(check.ranks) > 1 else check for check in assignment.checks
    ]
    return replace(assignment, checks=tuple(checks))


def lost(answer_key: AnswerKey, check: CheckSource, solutions: dict[str, str]) -> str:
    """What stopped the ranks, or what they returned; empty if that is what the key returns."""
    [outcome], [key] = answer_key.outcomes(check, solutions), answer_key.key_results(check)
    if outcome.results is not None and are_same(outcome.results, key, check.tolerance):
        return ""
    return str(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("number", SOURCES)
def test_right_solutions_pass_the_checks_of_their_task(number):
    from surveys.grader.right_solutions import RIGHT

    assignment = on_three_ranks(read_assignment(SOURCES[number]))
    assert set(RIGHT[number]) == set(assignment.solutions)
    found = {}
    with AnswerKey(assignment, fresh_seed(), trust=True) as answer_key:
        for task, sources in RIGHT[number].items():
            checks = [check for check in assignment.checks if task in check.solutions]
            for name, source in sources.items():
                solutions = assignment.keys() | {task: without_magics(source)[0]}
                for check in checks:
                    found[task, name, check.name] = lost(answer_key, check, solutions)
    assert {where: what for where, what in found.items() if what} == {}


def test_a_check_ends_at_the_first_group_of_ranks_that_loses_it_and_not_before():
    assignment = with_checks(first_assignment(), "each_average")
    [check] = assignment.checks
    [sums] = [one for one in assignment.wrong_answers if one.name == "sum instead of average"]
    right = assignment.keys()
    with AnswerKey(assignment, fresh_seed(), trust=True) as answer_key:
        assert len(answer_key.outcomes(check, right | {"each": sums.source})) == 1
        assert len(answer_key.outcomes(check, right)) == len(check.ranks) == 3


UNUSUAL = """
def values():
    got = yield 1
    return got

async def later(x):
    return x

display("text")
three = await later(3)

def average_each(module, right=average_each):
    made = values()
    next(made)
    try:
        made.send(three)
    except StopIteration as end:
        assert end.value == 3
    right(module)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_only_a_notebook_has_and_generators_run_as_there(ranks):
    assignment = with_checks(first_assignment(), "each_average", ranks=(ranks,))
    [check] = assignment.checks
    with AnswerKey(assignment, fresh_seed()) as answer_key:
        unusual = assignment.keys() | {"each": assignment.keys()["each"] + UNUSUAL}
        assert lost(answer_key, check, unusual) == ""


# The average, without an all-reduce of its own, somewhere that a dispatch mode does not reach.
GATHERS = """
import threading

def gathers(module):
    for p in module.parameters():
        if p.grad is not None:
            dist.all_reduce(torch.zeros_like(p))
            every = [torch.empty_like(p) for _ in range(dist.get_world_size())]
            dist.all_gather(every, p.grad)
            p.grad.copy_(sum(every) / len(every))
"""
ELSEWHERE = {
    "a thread with a run of its own": """
class Own(threading.Thread):
    def run(self):
        gathers(self.module)

def average_each(module):
    thread = Own()
    thread.module = module
    thread.start()
    thread.join()
""",
    "a callback of a future": """
def average_each(module):
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    future.then(lambda _: gathers(module)).wait()
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("where", ELSEWHERE)
def test_what_threads_and_callbacks_send_is_recorded(where):
    assignment = with_checks(first_assignment(), "each_average", ranks=(2,))
    [check] = assignment.checks
    each = GATHERS + ELSEWHERE[where]
    with AnswerKey(assignment, fresh_seed(), trust=True) as answer_key:
        said = lost(answer_key, check, assignment.keys() | {"each": each})
    assert "bytes by allgather" in said


# In `__init__` of a reducer: the first layer is computed in front of the model's forward pass, so
# beside its gate. Backward then ends one gate early, and each launch seems to be in it.
BESIDE = """
        layer, model.names = getattr(model, model.names[0]), model.names[1:]
        model.register_forward_pre_hook(lambda _, given: (torch.tanh(layer(given[0])),))
        self.start()
"""


@pytest.mark.slow
def test_layers_beside_the_gates_do_not_make_a_late_launch_an_early_one():
    assignment = with_checks(read_assignment(SOURCES[4]), "reducer_overlaps", ranks=(2,))
    [check] = assignment.checks
    [late] = [one for one in assignment.wrong_answers if one.name == "launches after backward"]
    reducer = late.source.replace("        self.start()\n", BESIDE, 1)
    with AnswerKey(assignment, fresh_seed(), trust=True) as answer_key:
        said = lost(answer_key, check, assignment.keys() | {"reducer": reducer})
    assert "did not run backward exactly once through all layers" in said
