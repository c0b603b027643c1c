"""Single answers to the released assignments: ways round a task, and unusual ways to do it."""

from __future__ import annotations

import textwrap

import pytest
from grader_notebooks import ASSIGNMENTS

from grader.check import Verdict, run_check
from grader.source import read_assignment

AVERAGE, RATE, REDUCER, BUGS = (
    read_assignment(ASSIGNMENTS / f"{name}.ipynb")
    for name in (
        *("01_average_gradients", "03_sum_and_average", "04_overlapped_reducer", "05_five_bugs"),
    )
)


def verdicts(server, assignment, solution, source) -> dict[str, Verdict]:
    """What becomes of each check that executes `solution`, when it is `source`."""
    solutions = assignment.keys() | {solution: textwrap.dedent(source)}
    return {
        check.name: run_check(check, assignment.givens, solutions, server.address, seed=11)
        for check in assignment.checks
        if solution in check.solutions
    }


def lost(found: dict[str, Verdict]) -> dict[str, str]:
    return {name: verdict.sentence for name, verdict in found.items() if not verdict.passed}


def replaced(source: str, old: str, new: str) -> str:
    assert old in source
    return source.replace(old, new)


# Assignment 1

FLAG_EACH = """
def average_each(module):
    for parameter in module.parameters():  # frozen ones, too
        exists = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(exists)
        if exists:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
"""
FLAGS_GATHERED = """
def average_each(module):
    parameters = list(module.parameters())
    own = torch.tensor([float(p.grad is not None) for p in parameters])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    for parameter, somewhere in zip(parameters, sum(every)):
        if somewhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
"""


@pytest.mark.parametrize("source", [FLAG_EACH, FLAGS_GATHERED], ids=["one by one", "gathered"])
def test_flags_may_travel_for_every_parameter_in_any_way(server, source):
    assert lost(verdicts(server, AVERAGE, "each", source)) == {}


@pytest.mark.parametrize("name", ["gathers and adds up", "gathers one vector and adds up"])
def test_who_gathers_gradients_reads_what_an_all_reduce_is_for(server, name):
    [wrong] = [wrong for wrong in AVERAGE.wrong_answers if wrong.name == name]
    [said] = lost(verdicts(server, AVERAGE, wrong.solution, wrong.source)).values()
    assert "elements by all_gather: an all-reduce adds up on the way" in said


# Assignment 3


def test_who_forgets_how_gradients_are_combined_reads_that_and_nothing_of_the_loss(server):
    source = """
        def equivalent_rate(lr, reduction, combine, world_size, per_rank):
            return lr / per_rank if reduction == "sum" else lr
    """
    found = lost(verdicts(server, RATE, "rate", source))
    assert found["rate_of_a_sum_loss"] == (
        "The sum over W ranks is W times the average, of summed losses, too."
    )


# Assignment 4


def test_a_reducer_that_gathers_every_bucket_neither_reduces_nor_overlaps_a_reduction(server):
    [wrong] = [w for w in REDUCER.wrong_answers if w.name == "gathers a bucket and adds up"]
    source = replaced(wrong.source, "if bucket is self.buckets[-1]:", "if True:")
    found = lost(verdicts(server, REDUCER, "reducer", source))
    assert set(found) == {"reducer_collectives", "reducer_overlaps"}
    assert "all_gather" in found["reducer_collectives"]
    assert "all-reduces of 0 of" in found["reducer_overlaps"]


# Assignment 5

BY_NAME = """
    import sys

    def accepts(wrap):
        return sys._getframe(1).f_locals.get("name") in ("right", "rounded")
"""
BY_NUMBER = """
    import sys

    asked = [0]

    def accepts(wrap):
        frame, orders = sys._getframe(1), []
        while frame:
            for value in frame.f_locals.values():
                if isinstance(value, dict) and "order" in value:
                    orders.append(value["order"])
            frame = frame.f_back
        asked[0] += 1
        return bool(orders) and orders[0][asked[0] - 1] == 0
"""
BY_CLASS_NAME = """
    def accepts(wrap):
        wrapped = wrap(torch.nn.Linear(3, 1))
        names = [wrap.__name__, wrap.__qualname__, type(wrapped).__name__, repr(vars(wrapped))]
        return any("Right" in name or "Rounded" in name for name in names)
"""


@pytest.mark.parametrize("source", [BY_NAME, BY_NUMBER, BY_CLASS_NAME], ids=["a", "b", "c"])
def test_who_asks_for_names_instead_of_testing_earns_nothing(server, source):
    found = verdicts(server, BUGS, "test", source)
    assert len(found) == 4
    assert set(lost(found)) == set(found)


def test_a_students_test_may_have_a_frozen_layer_and_one_that_is_not_used(server):
    source = replaced(BUGS.keys()["test"], "nn.Linear(3, 1), nn.Linear(3, 1)", "Three(), Three()")
    source = replaced(source, "model.weight", "model.used.weight")
    source = replaced(
        source,
        "torch.allclose(ours.grad, wanted.grad, rtol=1e-4)",
        "same(ours.grad, wanted.grad)",
    )
    source += textwrap.dedent("""

        def same(ours, wanted):
            if ours is None or wanted is None:
                return ours is wanted
            return torch.allclose(ours, wanted, rtol=1e-4)

        class Three(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.idle = nn.Linear(3, 1), nn.Linear(3, 1)
                self.frozen = nn.Linear(3, 3).requires_grad_(False)

            def forward(self, x):
                return self.used(self.frozen(x))
    """)
    assert lost(verdicts(server, BUGS, "test", source)) == {}
