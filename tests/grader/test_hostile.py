"""Submissions that try to harm, to see others, or to earn points without computing."""

import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from grader_notebooks import FIRST, first_assignment, submission, with_checks, write
from processes import becomes

from grader.answer_key import AnswerKey, run_check
from grader.batch import grade_all
from grader.grade import Result, fresh_seed, grade_together
from grader.inside.walls import is_root
from grader.merge import Submission
from grader.report import sentence_of
from grader.sandbox import Sandbox
from grader.source import Assignment, read_assignment
from grader.submissions import Work

# Written wherever a submission can; a file of this name anywhere is a failure.
TRACE = "trace-of-a-submission"
LOCAL = "def average_each(module):\n    pass\n"
EVERYWHERE = "('/', '/tmp', '/dev/shm', '/var/tmp', '/opt/grader', '/root', '..')"

# {name: (source of `each`, a part of what the feedback says)}. KEY stands for the right solution.
WORTHLESS = {
    "patches labkit and the grader": (
        "import sys\nfor name, module in list(sys.modules.items()):\n"
        "    if name.startswith(('grader', 'labkit')):\n"
        "        for key in [k for k, v in vars(module).items() if callable(v)]:\n"
        "            try: setattr(module, key, lambda *a, **k: True)\n"
        "            except Exception: pass\n" + LOCAL,
        "",
    ),
    "looks for the key": (
        f"import os\nassert not os.path.exists({str(FIRST)!r})\n"
        f"assert not os.path.exists({str(FIRST.parent)!r})\n"
        "found = [n for top in ('/tmp', '/opt', '/dev/shm') for _, _, names in os.walk(top)"
        f" for n in names if n in ({FIRST.name!r}, 'results.json', 'cases.json')]\n"
        "assert not found, found\n"
        "try:\n    import miniddp\nexcept ImportError:\n    miniddp = None\nassert not miniddp\n"
        + LOCAL,
        "Every rank kept its own gradients",
    ),
    "writes where it can": (
        f"import os\nfor folder in {EVERYWHERE}:\n"
        f"    try: open(os.path.join(folder, '{TRACE}'), 'w').write('here')\n"
        "    except OSError: pass\n" + LOCAL,
        "",
    ),
    "kills every process": (
        "import os\ndef average_each(module):\n    for pid in range(1, 500):\n"
        "        try: os.kill(pid, 9) if pid != os.getpid() else None\n"
        "        except OSError: pass\n",
        "ended",
    ),
    "fills the memory": ("def average_each(module):\n    x = bytearray(1 << 36)\n", "MemoryError"),
    "fills the memory with many processes": (
        "import os, time\ndef average_each(module):\n    for _ in range(10):\n"
        "        if os.fork() == 0:\n            x = b'x' * (1 << 29)\n"
        "            time.sleep(100)\n"
        "    time.sleep(100)\n",
        "",  # too much memory, or, on a busy machine, too much time
    ),
    "forks without end": (
        "import os\ndef average_each(module):\n    while True:\n"
        "        try: os.fork()\n        except OSError: pass\n",
        "",
    ),
    "fills the disk and its output": (
        "def average_each(module):\n    while True: print('x' * 10**6)\n",
        "",
    ),
    "returns too much": (
        "def average_each(module):\n    for p in module.parameters():\n"
        "        p.grad = None\n        p.data = torch.ones(10**8)\n",
        "",
    ),
    "writes into every descriptor": (
        "import os\ndef average_each(module):\n    for n in range(3, 64):\n"
        "        try: os.write(n, b'\\xff' * 100000)\n        except OSError: pass\n",
        "",
    ),
    "not even Python": ("Hello, grader!\x00\n", ""),
    "prints what the key prints": (
        'print("2 ranks")\ndef average_each(module):\n    print("passed")\n',
        "",
    ),
    "loops": (
        "import time\ndef average_each(module):\n    while True: time.sleep(0.1)\n",
        "at line 3: while True: time.sleep(0.1)",
    ),
    "deadlocks": (
        "def average_each(module):\n    if dist.get_rank() == 0: dist.all_reduce(torch.ones(1))\n",
        "rank 0: waits in all_reduce",
    ),
    "forgets that a gradient may be missing": (
        "def average_each(module):\n    for p in module.parameters(): dist.all_reduce(p.grad)\n",
        "passed None to a collective: is some .grad None there?",
    ),
    "leaves with os._exit": (
        "import os\ndef average_each(module):\n    os._exit(0)\n",
        "exit code 0",
    ),
    "leaves when it is loaded": ("import sys\nsys.exit(0)\n", "SystemExit"),
    "gradients that are strings": (
        "def average_each(module):\n    for p in module.parameters(): p.grad = 'passed'\n",
        "TypeError",
    ),
    "torch's own DDP": (
        "def average_each(module):\n    torch.nn.parallel.DistributedDataParallel(module)\n",
        "RuntimeError",
    ),
    "an error of its own": (
        "class Own(Exception): pass\ndef average_each(module):\n    raise Own('a message')\n",
        ", in cell each, line 3: a message",
    ),
    "syntax error": ("def average_each(module)\n    pass", "line 1"),
}
HARMLESS = {
    "leaves processes and threads": (
        "import os, threading, time\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "if os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\n    os._exit(0)\nKEY"
    ),
    "changes the environment": (
        "import os\nfor name in ('PYTHONPATH', 'HOME', 'PATH', 'LD_PRELOAD'):\n"
        "    os.environ[name] = '/nowhere'\nKEY"
    ),
    "names of the check": "def on_rank(*a): return 1\ndraw = seen = on_rank\nKEY",
}


def only_each(path: Path) -> Assignment:
    """The assignment with the check of `each` that shows most; 5 points."""
    return with_checks(read_assignment(path), "each_average", points=5, ranks=(2,), seconds=6)


@pytest.fixture(scope="module")
def graded(tmp_path_factory) -> dict[str, Result]:
    """Every submission, graded in a sandbox of its own."""
    assignment = first_assignment()
    folder = tmp_path_factory.mktemp("handed_in")
    handed_in = {}
    sources = {name: source for name, (source, _) in WORTHLESS.items()} | HARMLESS
    for number, (name, source) in enumerate(sources.items()):
        own = {"each": source.replace("KEY", assignment.keys()["each"])}
        path = write(submission(assignment, assignment.keys() | own), folder / f"{number}.ipynb")
        handed_in[name] = Work(name, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grader.batch.read_assignment", only_each)
        results = grade_all(handed_in, FIRST, tmp_path_factory.mktemp("graded"), jobs=2)
    return {result.student: result for result in results}


def said_of(result: Result) -> str:
    said = [*result.notes, *map(sentence_of, result.checks)]
    return "\n".join([*said, result.unreadable])


@pytest.mark.slow
def test_what_earns_nothing_and_what_is_said(graded):
    wrong = {
        name: (graded[name].score, said_of(graded[name]), graded[name].needs_human)
        for name, (_, why) in WORTHLESS.items()
        if graded[name].score or graded[name].needs_human or why not in said_of(graded[name])
    }
    assert wrong == {}


@pytest.mark.slow
def test_what_does_no_harm_keeps_its_points(graded):
    assert {name: graded[name].score for name in HARMLESS} == dict.fromkeys(HARMLESS, 5)


@pytest.mark.slow
def test_nothing_is_left(graded):
    tops = ("/tmp", "/dev/shm", "/var/tmp", os.getcwd())
    left = [folder for top in tops for folder, _, names in os.walk(top) if TRACE in names]
    assert left == []
    assert becomes(lambda: not servers_below())


def servers_below() -> list[psutil.Process]:
    """The sandboxes, and what runs in them: below the program that they are forks of."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
            above = one.parent()
            if above is not None and "grader.inside.server" in above.cmdline()[:5]:
                found.append(one)
    return found


PROBE = f"""
import os, socket, time

PLACES = ("/tmp", "/dev/shm")

def tried(action):
    try:
        action()
    except Exception as error:
        return type(error).__name__
    return "done"

def on_rank(student, given):
    seen = {{
        "root": sorted(os.listdir("/")),
        "user": os.getuid(),
        "capabilities": open("/proc/self/status").read().split("CapEff:")[1].split()[0],
        "write": tried(lambda: open("/opt/grader/x", "w")),
        "network": tried(lambda: socket.create_connection(("192.0.2.1", 80), 1)),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "home": os.environ["HOME"],
        "found": [place for place in PLACES if "{TRACE}" in os.listdir(place)],
        "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
        "spaces": [os.readlink("/proc/self/ns/" + name) for name in ("ipc", "mnt", "net", "pid")],
    }}
    for place in PLACES:
        open(os.path.join(place, "{TRACE}"), "w").write("here")
    if os.fork() == 0:
        os.setsid()
        os.fork()
        time.sleep(1000)
    return seen
"""


def test_a_sandbox_shows_no_home_no_network_no_other_sandbox_and_nothing_of_the_last_check():
    check = replace(first_assignment().checks[0], source=PROBE)
    with Sandbox() as one, Sandbox() as other:
        outcomes = [run_check(where, check, [], [[{}]], 0) for where in (one, one, other)]
    found = [outcome.results[0] for [outcome] in outcomes]
    of_python = {Path(one).parts[1] for one in (os.path.realpath(sys.prefix), sys.base_prefix)}
    hidden = {"home", "root", "work", "mnt", "srv", "var"} - of_python - {Path(sys.prefix).parts[1]}
    for seen in found:
        assert hidden.isdisjoint(seen["root"])
        assert seen["capabilities"].strip("0") == ""
        assert (seen["write"], seen["network"], seen["home"]) == ("OSError", "OSError", "/tmp")
        assert seen["interfaces"] == ["lo"]
        assert seen["user"] or os.getuid() != 0
        assert seen["found"] == []
        assert seen["processes"] == found[0]["processes"] <= 4
    first, _, last = found
    here = [os.readlink(f"/proc/self/ns/{name}") for name in ("ipc", "mnt", "net", "pid")]
    assert all(len(set(of)) == 3 for of in zip(first["spaces"], last["spaces"], here, strict=True))
    assert first["user"] != last["user"] or not is_root()


# After its average, this changes all that later checks in the same process would use.
TAMPERING = """
KEY
import builtins, gc, os, sys, threading, time
from multiprocessing.connection import Connection

class RunsInTheSupervisor:
    def __reduce__(self):
        return exec, ("import torch.distributed as d; d.all_reduce = d.init_process_group = None",)

def average_each(module, right=average_each):
    right(module)
    builtins.average_flat = right
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.nn.modules.module.register_module_forward_hook(lambda *_: 1 / 0)
    torch.nn.Module.parameters = torch.Tensor.backward = dist.get_rank = None
    dist.all_reduce = lambda *_, **__: None
    os.environ.clear()
    sys.modules["numpy"] = sys.modules["torch.optim"] = None
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    open("/tmp/left", "w").write("here")
    for one in gc.get_objects():
        if isinstance(one, Connection) and one.writable:
            one.send(RunsInTheSupervisor())
    os.closerange(3, 1000)
"""


def test_what_a_check_leaves_in_its_processes_neither_costs_nor_earns_points_in_a_later_one():
    checks = ("each_average", "flat_average", "flat_one_message", "flat_missing")
    own = with_checks(first_assignment(), *checks, ranks=(2,))
    each = TAMPERING.replace("KEY", own.keys()["each"])
    submissions = {
        "the other cell is right": own.keys() | {"each": each},
        "the other cell is empty": own.keys() | {"each": each, "flat": ""},
    }
    with AnswerKey(own, fresh_seed()) as answer_key:
        results = grade_together(
            [(name, Submission(s)) for name, s in submissions.items()], answer_key
        )
    points = [[check.score for check in result.checks[1:]] for result in results]
    assert points == [[one.points for one in own.checks[1:]], [0] * 3]


def test_a_check_that_fails_itself_is_no_verdict_on_a_student():
    assignment = first_assignment()
    broken = replace(assignment.checks[0], source="def draw(rng, ranks): return 1 / 0")
    with (
        AnswerKey(replace(assignment, checks=(broken,)), 1) as answer_key,
        pytest.raises(RuntimeError, match=r"draw.* failed: ZeroDivisionError"),
    ):
        answer_key.inputs(broken)
