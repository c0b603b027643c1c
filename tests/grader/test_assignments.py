"""Single answers to the released assignments: ways round a task, and unusual ways to do it."""

import textwrap

import numpy as np
import pytest
from grader_notebooks import ASSIGNMENTS
from grader_right import RIGHT

from grader.check import Verdict, run_check
from grader.grade import grade_many
from grader.magics import without_magics
from grader.merge import Submission
from grader.oracle import Oracle
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
    assert "bytes by all_gather: an all-reduce adds up on the way" in said


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

FIRST_ONLY = """
    asked = [0]

    def accepts(wrap):
        asked[0] += 1
        return asked[0] == 1
"""
BY_CLASS_NAME = """
    def accepts(wrap):
        wrapped = wrap(torch.nn.Linear(3, 1))
        names = [wrap.__name__, wrap.__qualname__, type(wrapped).__name__, repr(vars(wrapped))]
        return any("Right" in name or "Rounded" in name for name in names)
"""
ALL = """
    def accepts(wrap):
        return True
"""


@pytest.mark.parametrize("source", [FIRST_ONLY, BY_CLASS_NAME, ALL], ids=["first", "name", "all"])
def test_who_guesses_or_asks_for_names_instead_of_testing_earns_nothing(server, source):
    found = verdicts(server, BUGS, "test", source)
    assert len(found) == 4
    assert set(lost(found)) == set(found)


def test_the_step_is_compared_with_one_process_that_has_the_whole_batch(server):
    """With a model that looks at its batch, the ranks' average would be another step."""
    [check] = [check for check in RATE.checks if check.name == "step_of_the_whole_batch"]
    with Oracle(server.address) as oracle:
        drawn = oracle.ask({"check": check.source, "call": "draw", "seed": 3})
    givens, wanted = drawn["inputs"], drawn["answer"]["expected"]
    x, y = (np.concatenate([given[key] for given in givens]) for key in ("x", "y"))
    weight, bias = givens[0]["weight"].astype("float64"), givens[0]["bias"].astype("float64")
    for _ in range(2):
        slope = 2 * (x @ weight.T + bias - y) / y.size
        weight, bias = weight - 0.1 * slope.T @ x, bias - 0.1 * slope.sum(0)
    found = {key.rpartition(".")[2]: value for key, value in wanted.items()}
    np.testing.assert_allclose(found["weight"], weight, rtol=1e-4)
    np.testing.assert_allclose(found["bias"], bias, rtol=1e-4)


GATES_SCALED_AFTERWARDS = """
    import grader.inside.link as link

    class Reducer:
        def __init__(self, model, buckets):
            self.parameters, self.buckets = list(model.parameters()), buckets
            self.names = []
            reducer = self

            class Free(torch.autograd.Function):
                @staticmethod
                def forward(ctx, value, name):
                    ctx.name = name
                    return value.view_as(value)

                @staticmethod
                def backward(ctx, gradient):
                    reducer.names.append(ctx.name)
                    return gradient, None

            [self.link] = {c.__dict__["link"] for c in link.RoutedGroup.__subclasses__()}
            model.gate = lambda value, name: Free.apply(value, name)

        def finish(self):
            works, scale = [], 1.0
            for bucket, name in zip(self.buckets, self.names):
                answer = self.link.ask({"kind": "gate", "name": name}, [])
                answer.wait()
                scale = scale * torch.as_tensor(answer.message["factor"]).mean()
                flat = torch.cat([self.parameters[i].grad.reshape(-1) for i in bucket]) * scale
                works.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
            for bucket, flat, work in works:
                work.wait()
                own = [self.parameters[i] for i in bucket]
                for p, part in zip(own, flat.split([p.numel() for p in own])):
                    p.grad = part.view_as(p) / dist.get_world_size()
"""


def test_gates_that_are_asked_after_backward_and_multiplied_in_earn_no_overlap(server):
    assert "reducer_overlaps" in lost(verdicts(server, REDUCER, "reducer", GATES_SCALED_AFTERWARDS))


SENDS_TWICE_IN_INTEGERS = """
    class Reducer:
        def __init__(self, model, buckets):
            self.parameters, self.buckets, self.missing = list(model.parameters()), buckets, []
            self.missing = {i: n for n, bucket in enumerate(buckets) for i in bucket}
            for i, p in enumerate(self.parameters):
                p.register_post_accumulate_grad_hook(functools.partial(self.ready, i))
            self.left = [len(bucket) for bucket in buckets]

        def ready(self, i, p):
            number = self.missing[i]
            self.left[number] -= 1
            if not self.left[number]:
                size = sum(self.parameters[j].numel() for j in self.buckets[number])
                dist.all_reduce(torch.zeros(size // 2, dtype=torch.int64), async_op=True)

        def finish(self):
            for bucket in self.buckets:
                flat = torch.cat([self.parameters[j].grad.reshape(-1) for j in bucket])
                pairs = (flat.double() * 2**20).round().long()
                if len(pairs) % 2:
                    pairs = torch.cat([pairs, pairs.new_zeros(1)])
                packed = pairs[::2] * 2**32 + pairs[1::2]
                dist.all_reduce(packed)
                low = (packed + 2**31) % 2**32 - 2**31
                pairs = torch.stack([(packed - low) // 2**32, low], 1).reshape(-1)
                flat = (pairs.double() / 2**20 / dist.get_world_size()).float()[: len(flat)]
                own = [self.parameters[j] for j in bucket]
                for p, part in zip(own, flat.split([p.numel() for p in own])):
                    p.grad.copy_(part.view_as(p))
            self.left = [len(bucket) for bucket in self.buckets]
"""


def test_two_numbers_packed_into_one_count_as_two(server):
    found = lost(verdicts(server, REDUCER, "reducer", SENDS_TWICE_IN_INTEGERS))
    assert "reducer_overlaps" in found


@pytest.mark.parametrize("number", RIGHT)
def test_right_solutions_in_unusual_pytorch_earn_everything(server, number):
    [path] = ASSIGNMENTS.glob(f"0{number}_*.ipynb")
    assignment = read_assignment(path)
    tasks = [task for task, sources in RIGHT[number].items() for _ in sources]
    trials = [
        (f"{task}: {name}", Submission(assignment.keys() | {task: without_magics(source)[0]}))
        for task, sources in RIGHT[number].items()
        for name, source in sources.items()
    ]
    results = list(grade_many(trials, assignment, server, tasks=tasks))
    for task, result in zip(tasks, results, strict=True):
        concerned = [check.name for check in assignment.checks if task in check.solutions]
        assert [check.name for check in result.checks] == concerned
    lost = {
        result.student: [c.sentence for c in result.checks if c.score < c.points]
        for result in results
        if result.score < result.points
    }
    assert lost == {}


@pytest.mark.parametrize("seed", [70, 97, 1028])
def test_a_gradient_in_which_the_samples_nearly_cancel_costs_a_right_solution_nothing(server, seed):
    """The rounding error is then more than 1e-5 of that gradient's largest value.

    Which seeds these are depends on the processor; test_wire.py has the rule.
    """
    [check] = [check for check in BUGS.checks if check.name == "denominator_mended"]
    found = run_check(check, BUGS.givens, BUGS.keys(), server.address, seed)
    assert found.passed, found.sentence


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
