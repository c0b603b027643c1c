"""One check, from drawing its inputs to its verdict, on small checks made for the purpose."""

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


def test_only_the_stub_counts_as_not_written_and_not_what_torch_does_not_implement(server):
    stub = "def total(x):\n    raise NotImplementedError\n"
    assert run(server, stub).sentence == "total is not written yet"
    unsupported = "def total(x):\n    return x.to('meta').to('cpu')\n"
    found = run(server, unsupported, replace(CHECK, visible=True))
    assert "raised NotImplementedError: Cannot copy out of meta tensor" in found.sentence


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
    assert "had done nothing for 5 s: does it sleep?" in found.sentence


def test_a_rank_that_stops_itself_loses_the_check(server):
    stopped = "import os\ndef total(x):\n    os.kill(os.getpid(), 19)\n"
    assert not run(server, stopped, replace(CHECK, seconds=1)).passed


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
    stumbling = replace(
        CHECK, source=CHECK.source + "def judge(seen, results, givens):\n    1 / 0\n"
    )
    assert "could not read what the ranks returned" in run(server, check=stumbling).sentence


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


@pytest.mark.parametrize(
    ("name", "source"),
    {
        "a dataclass": """
from dataclasses import dataclass
import torch.distributed as dist

@dataclass
class Sum:
    value: float

def total(x):
    dist.all_reduce(x)
    return Sum(x).value
""",
        "an own class through all_gather_object": """
import torch
import torch.distributed as dist

class Part:
    def __init__(self, value):
        self.value = value

def total(x):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, Part(x.item()))
    return torch.tensor(sum(part.value for part in parts))
""",
        "a thread that waits while the rank goes on": """
import threading
import torch.distributed as dist

def total(x):
    if dist.get_rank() == 0:
        dist.send(x, 1, tag=1)
    if dist.get_rank() == 1:
        y = x.clone()
        thread = threading.Thread(target=dist.recv, args=(y, 0), kwargs={"tag": 1})
        thread.start()
        thread.join()
    dist.all_reduce(x)
    return x
""",
        "barriers everywhere": """
import torch.distributed as dist

def total(x):
    dist.barrier()
    dist.all_reduce(x)
    dist.barrier()
    return x
""",
        "inference mode": """
import torch
import torch.distributed as dist

def total(x):
    with torch.inference_mode():
        y = x * 1
        dist.all_reduce(y)
    return y.clone()
""",
    }.items(),
)
def test_right_solutions_in_unusual_python_pass(server, name, source):
    found = run(server, source)
    assert found.passed, found.sentence


SENDS_TOO_MUCH = """
import torch.distributed as dist

def total(x):
    if dist.get_rank() == 1:
        dist.send(x.repeat(2), 0)
    if dist.get_rank() == 0:
        dist.recv(x, 1)
    dist.all_reduce(x)
    return x
"""


def test_what_cannot_be_written_into_a_tensor_is_raised_where_the_solution_waits(server):
    found = run(server, SENDS_TOO_MUCH)
    assert found.sentence.startswith("rank 0 raised RuntimeError in cell total")
    assert found.seconds < 5, "no time limit was waited for"


def test_an_overflow_is_a_result_like_others(server):
    source = """
import torch
import torch.distributed as dist

def total(x):
    y = torch.tensor([65504.0], dtype=torch.float16)
    dist.all_reduce(y)
    z = torch.tensor([float("inf") if dist.get_rank() else float("-inf")])
    dist.all_reduce(z)
    dist.all_reduce(x)
    return x if y.isinf() and z.isnan() else y
"""
    assert run(server, source).passed


NUMBERED = CheckSource(
    "tells",
    points=1,
    concept="Right is right.",
    solutions=("total",),
    source="""
def draw(rng):
    names = [str(name) for name in rng.permutation(["right", "wrong"] * 2)]
    return [{"implementations": names}] * 2


class Right:
    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        return self.module(x)

    def finish(self):
        import torch.distributed as dist
        for p in self.module.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


class Wrong(Right):
    def finish(self):
        pass


def implementations():
    return {"right": Right, "wrong": Wrong}


def on_rank(student, given):
    return [student.total(implementation(number)) for number in range(4)]


def expected(givens):
    return [[name == "right" for name in givens[0]["implementations"]]] * 2
""",
)
TELLS = """
import torch
import torch.distributed as dist

def total(wrap):
    model = torch.nn.Linear(1, 1, bias=False)
    wrapped = wrap(model)
    wrapped(torch.ones(1, 1) * dist.get_rank()).sum().backward()
    wrapped.finish()
    return abs(model.weight.grad.item() - 0.5) < 1e-6
"""
LOOKS = """
import gc, sys, inspect

def total(wrap):
    names = [cls.__name__ for cls in object.__subclasses__()]
    for thing in gc.get_objects():
        if inspect.isclass(thing) or inspect.isfunction(thing) or inspect.ismodule(thing):
            names.append(getattr(thing, "__name__", ""))
    names += list(sys.modules)
    frame = sys._getframe()
    while frame:
        names += [repr(value)[:5000] for value in frame.f_locals.values()]
        frame = frame.f_back
    assert not {"Wrong", "Right"} & set(names)
    assert not any(name.startswith("labkit") for name in sys.modules)
    given = [name for name in names if "implementations" in name and "'wrong'" in name]
    assert not given and set(vars(wrap)) == set()
    return True
"""


def test_implementations_run_elsewhere_and_their_gradients_come_back(server):
    found = run(server, TELLS, NUMBERED)
    assert found.passed, found.sentence


def test_nothing_in_a_students_process_tells_one_implementation_from_another(server):
    found = run(server, LOOKS, replace(NUMBERED, visible=True))
    assert found.sentence == NUMBERED.concept, "it did not raise, and guessing loses"


def test_who_calls_an_implementation_on_one_rank_only_meets_a_deadlock_with_a_name(server):
    source = TELLS.replace(
        "    wrapped = wrap(model)",
        "    if dist.get_rank(): return True\n    wrapped = wrap(model)",
    )
    assert "a call of the implementation under test" in run(server, source, NUMBERED).sentence
