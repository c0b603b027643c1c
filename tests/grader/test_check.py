"""One check, from drawing its inputs to its verdict, on small checks made for the purpose."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from grader.check import GraderError, run_check
from grader.source import CheckSource

# Every rank has a number; each has to return the sum of them all.
CHECK = CheckSource(
    "total",
    points=1,
    concept="The sum over all ranks.",
    solutions=("total",),
    source="""
import torch

def draw(rng):
    return [{"x": float(rng.integers(1, 1000))} for _ in range(3)]

def on_rank(student, given):
    return {"total": student.total(torch.tensor(given["x"]))}

def expected(givens):
    return {"total": torch.tensor(sum(given["x"] for given in givens))}

def mistakes(givens):
    own = [{"total": torch.tensor(given["x"])} for given in givens]
    return {"Nothing was added.": own}
""",
)
RIGHT = """
import torch.distributed as dist

def total(x):
    dist.all_reduce(x)
    return x
"""


def run(server, source=RIGHT, check=CHECK, seed=3):
    return run_check(check, (), {"total": source}, server.address, seed)


@pytest.mark.parametrize("link", ["routed", "gloo"])
def test_a_right_solution_passes_on_either_link(server, link):
    found = run(server, check=replace(CHECK, link=link))
    assert found.passed, found.sentence


def test_a_known_mistake_is_called_by_its_name(server):
    found = run(server, "def total(x):\n    return x\n")
    assert (found.passed, found.sentence) == (False, "Nothing was added.")


def test_another_mistake_is_answered_with_the_concept(server):
    found = run(server, "def total(x):\n    return x + 1\n")
    assert (found.passed, found.sentence, found.where) == (False, "The sum over all ranks.", "")


def test_a_visible_check_says_where_the_first_difference_is(server):
    source = RIGHT + "    \n"
    source = source.replace("return x", "return x + (dist.get_rank() == 2)")
    found = run(server, source, replace(CHECK, visible=True))
    assert found.where == "first difference on rank 2, at ['total']"


def test_inputs_are_fresh_with_every_seed_so_a_constant_earns_nothing(server):
    constant = "import torch\ndef total(x):\n    return torch.tensor(1234.0)\n"
    assert not any(run(server, constant, seed=seed).passed for seed in range(3))


def test_torchs_own_ddp_works_over_the_routed_link_where_a_check_allows_it(server):
    source = (
        "import torch\n"
        "def total(x):\n"
        "    layer = torch.nn.Linear(1, 1, bias=False)\n"
        "    ddp = torch.nn.parallel.DistributedDataParallel(layer)\n"
        "    ddp(x.view(1, 1)).sum().backward()\n"
        "    return 3 * layer.weight.grad[0, 0]\n"
    )
    assert run(server, source, replace(CHECK, torch_ddp=True)).passed
    assert "not part of this task" in run(server, source, replace(CHECK, visible=True)).sentence


def test_a_rank_that_only_sleeps_is_ended_by_the_clock_and_that_is_said(server):
    sleeping = "import time\ndef total(x):\n    time.sleep(1000)\n"
    found = run(server, sleeping, replace(CHECK, seconds=1))
    assert found.timed_out
    assert "still waiting after 5 s" in found.sentence


def test_a_rank_that_stops_itself_is_ended_by_the_clock(server):
    stopped = "import os\ndef total(x):\n    os.kill(os.getpid(), 19)\n"
    assert run(server, stopped, replace(CHECK, seconds=1)).timed_out


def test_a_deadlock_over_gloo_is_ended_by_the_clock(server):
    skipping = RIGHT.replace("dist.all_reduce(x)", "dist.get_rank() and dist.all_reduce(x)")
    found = run(server, skipping, replace(CHECK, link="gloo", seconds=1))
    assert not found.passed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sum(given", "summ(given"),
        ("return [{", "return {1: {"),
        ("import torch", "import no_such_module"),
        ("def expected", "def judge(seen, results, givens):\n    1 / 0\n\ndef expected"),
        ('{"x": float', '{"x": complex'),
    ],
)
def test_a_check_that_is_broken_itself_is_no_verdict_on_the_student(server, old, new):
    source = CHECK.source.replace(old, new)
    if new.startswith("return {1"):
        source = CHECK.source.replace("def draw(rng):", "def draw(rng):\n    return 3")
    with pytest.raises(GraderError, match="check total"):
        run(server, check=replace(CHECK, source=source))


def test_a_result_that_a_judge_stumbles_over_is_the_students_loss_and_not_the_graders(server):
    judging = CHECK.source + "def judge(seen, results, givens):\n    results[0]['total'].sum()\n"
    check = replace(CHECK, source=judging)
    assert run(server, check=check).passed
    assert run(server, "def total(x):\n    return None\n", check).sentence == CHECK.concept


def test_who_calls_a_solution_holds_nothing_that_computes_the_answer(server):
    looking = """
import sys
import torch.distributed as dist

def total(x):
    frame = sys._getframe()
    while frame:
        received = (frame.f_locals.get("job") or {}).get("check", "")
        for name in ("draw", "expected", "mistakes", "judge"):
            assert name not in frame.f_globals
            assert name not in received
        frame = frame.f_back
    dist.all_reduce(x)
    return x
"""
    judging = CHECK.source + "def judge(seen, results, givens):\n    pass\n"
    found = run(server, looking, replace(CHECK, source=judging, visible=True))
    assert found.passed, found.sentence


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "cell failed", "cell": ["total"]},
        {"kind": "collective", "op": ["all_reduce"], "tensors": [], "number": 0},
        {"kind": "collective", "op": "all_reduce", "reduce": {}, "tensors": [], "number": 0},
        {"kind": "returned", "value": json.loads("[" * 16 + "]" * 16)},
        {"kind": "returned", "value": {"total": 10**400}},
    ],
    ids=str,
)
def test_a_message_of_odd_types_loses_the_check_and_does_not_stop_the_grader(server, message):
    sending = (
        "import os\n"
        "from grader.inside.wire import encode\n"
        "def total(x):\n"
        "    for number in range(3, 64):\n"
        "        try:\n"
        f"            os.write(number, encode({message!r}))\n"
        "        except OSError:\n"
        "            pass\n"
    )
    source = CHECK.source.replace(
        'torch.tensor(sum(given["x"] for given in givens))', 'sum(given["x"] for given in givens)'
    )
    assert not run(server, sending, replace(CHECK, source=source)).passed


def test_without_a_fork_server_nobody_is_blamed():
    with pytest.raises(OSError, match=r"No such file|refused"):
        run_check(CHECK, (), {"total": RIGHT}, "/tmp/no-such-server", 1)
