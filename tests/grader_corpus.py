"""Submissions to assignment 1 that are right, partly right, broken or hostile, and what each earns.

A trick is put before or into the solution `each` (5 points); `flat` (5 points) is the key's unless
something else is said. So 10 means that the trick changes nothing, 5 that it costs its own task.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grader_notebooks import cell, submission

from grader.source import Assignment

# Written by hostile submissions wherever they can; a file of this name anywhere is a failure.
TRACE = "trace-of-a-submission"

LOCAL = "def average_each(module):\n    pass\n"

LOOKS_FOR_THE_ANSWER = "looks for the answer at its caller"
# The ranks tell each other their inputs, as they may; then each asks the check for the answer.
_ASKS_THE_CALLER = """
import sys

HEADS = ("left", "right", "spare")

def average_each(module):
    caller = sys._getframe(1)
    own = caller.f_locals["given"]
    mine = {key: torch.from_numpy(own[key]) for key in ("x", "y")}
    mine["heads"] = torch.tensor([float(head in own["heads"]) for head in HEADS])
    givens = [{"weights": own["weights"]} for _ in range(dist.get_world_size())]
    for key, value in mine.items():
        every = [torch.empty_like(value) for _ in givens]
        dist.all_gather(every, value)
        for given, one in zip(givens, every):
            given[key] = one.numpy()
    for given in givens:
        given["heads"] = [head for head, used in zip(HEADS, given["heads"]) if used]
    wanted = caller.f_globals["expected"](givens)
    for name, parameter in module.named_parameters():
        parameter.grad = wanted[name]
"""


@dataclass(frozen=True)
class Entry:
    """One submission: how it is made from the assignment, and the score that it must get."""

    name: str
    score: float
    make: Callable[[Assignment], Any]  # a notebook, or bytes
    why: str = ""  # a part of what the feedback has to say
    task: str | None = None  # the one solution that is not the key's


def _each(name: str, score: float, source: str, why: str = "") -> Entry:
    """An entry whose `each` is `source`; KEY in it stands for the right solution."""

    def make(assignment: Assignment) -> Any:
        key = assignment.keys()["each"]
        return submission(assignment, assignment.keys() | {"each": source.replace("KEY", key)})

    return Entry(name, score, make, why, task="each")


def _edited(name: str, score: float, edit: Callable[[Any], Any], *, solved: bool = True) -> Entry:
    """The key's notebook, or the empty one, changed by `edit`."""

    def make(assignment: Assignment) -> Any:
        notebook = submission(assignment, assignment.keys() if solved else {})
        return edit(notebook) or notebook

    return Entry(name, score, make)


def _without_flat(notebook: Any) -> None:
    notebook["cells"] = [c for c in notebook["cells"] if c.get("id") != "flat"]


def _stub_after_solution(notebook: Any) -> None:
    stub = notebook["metadata"]["grader"]["stubs"]["each"]
    notebook["cells"].append({**cell(notebook, "each"), "id": "copy", "source": stub})


def _renamed(notebook: Any) -> None:
    cell(notebook, "each")["metadata"]["nbgrader"]["grade_id"] = "mine"


def _reordered(notebook: Any) -> None:
    notebook["cells"].reverse()


def _locked_edited(notebook: Any) -> None:
    cell(notebook, "imports")["source"] = "raise SystemExit"


def _outputs_edited(notebook: Any) -> None:
    for one in notebook["cells"]:
        if one["cell_type"] == "code":
            one["execution_count"] = 1
            one["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "passed\n"}]


def _large_output(notebook: Any) -> None:
    text = "x" * 50_000_000
    output = {"output_type": "stream", "name": "stdout", "text": text}
    cell(notebook, "each")["outputs"] = [output]


def _tagged(notebook: Any) -> None:
    tags = ["raises-exception", "nbval-skip", "nbval-ignore-output"]
    for one in notebook["cells"]:
        one["metadata"]["tags"] = tags


def _own_points(notebook: Any) -> None:
    for one in notebook["cells"]:
        nbgrader = one["metadata"].get("nbgrader", {})
        if nbgrader.get("points"):
            nbgrader["points"] = 1000
    notebook["metadata"]["grader"]["points"] = 1000


def _own_checks(notebook: Any) -> None:
    for check in notebook["metadata"]["grader"]["visible"]:
        check["source"], check["record"] = "def on_rank(*_): return 1", ""


def _own_kernel(notebook: Any) -> None:
    notebook["metadata"]["kernelspec"] = {"name": "bash", "display_name": "", "language": "bash"}


def _marked(notebook: Any) -> None:
    for one in notebook["cells"]:
        if one["cell_type"] == "code":
            one["source"] = "# NBVAL_SKIP\n# NBVAL_IGNORE_OUTPUT\n" + one["source"]


def _format_3(notebook: Any) -> None:
    notebook["nbformat"] = 3


def _odd_types(notebook: Any) -> None:
    notebook["cells"] += [3, None, {"cell_type": "code", "source": 7, "metadata": []}]
    notebook["cells"] += [
        {"cell_type": "code", "source": ["x", 1]},
        {"cell_type": "code", "id": []},
    ]
    notebook["cells"].append({"cell_type": "code", "metadata": {"nbgrader": {"grade_id": []}}})


def _nested(notebook: Any) -> bytes:
    return b'{"nbformat": 4, "cells": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"


# Of ranks that all loop, it is chance which first has no processor time left: none is named here.
_ENDLESS = "used up its processor time: does a loop never end?"

ENTRIES = [
    _edited("correct", 10, lambda notebook: None),
    _edited("empty release", 0, lambda notebook: None, solved=False),
    Entry("only the first task", 5, lambda a: submission(a, {"each": a.keys()["each"]})),
    Entry(
        "sum instead of average",
        8,
        lambda a: submission(a, a.keys() | {"each": a.wrong_answers[0].source}),
        "divide by the world size",
    ),
    _each(
        "syntax error",
        5,
        "def average_each(module)\n    pass",
        ", line 1): SyntaxError",
    ),
    _each("no such name", 5, "def average_all(module):\n    pass", "AttributeError"),
    _each(
        "exception on one rank",
        5,
        "def average_each(module):\n    if dist.get_rank() == 1:\n        1 / 0\n",
        "Rank 1 raised ZeroDivisionError",
    ),
    _each(
        "infinite loop",
        5,
        "def average_each(module):\n    while dist.get_rank() == 1: pass\n",
        f"Rank 1 {_ENDLESS}",
    ),
    _each("infinite loop at import", 5, "while True: pass\n", _ENDLESS),
    _each(
        "deadlocked collective",
        5,
        "def average_each(module):\n"
        "    if dist.get_rank() == 0:\n        dist.all_reduce(torch.ones(1))\n",
        "rank 0 waits in all_reduce of 1 float32; rank 1 has returned",
    ),
    _each(
        "collectives that differ",
        5,
        "def average_each(module):\n    dist.all_reduce(torch.ones(1 + dist.get_rank()))\n",
        "all_reduce of 1 float32 on rank 0 and all_reduce of 2 float32 on rank 1",
    ),
    _each("os._exit", 5, "import os\ndef average_each(module):\n    os._exit(0)\n", "exit code 0"),
    _each("sys.exit", 5, "import sys\ndef average_each(module):\n    sys.exit(0)\n", "SystemExit"),
    _each("sys.exit at import", 5, "import sys\nsys.exit(0)\n", "SystemExit"),
    _each(
        "killed rank",
        5,
        "import os\ndef average_each(module):\n"
        "    if dist.get_rank() == 2:\n        os.kill(os.getpid(), 9)\n"
        "    dist.all_reduce(torch.ones(1))\n",
        "",  # the first process of a namespace is spared its own signals; nothing was averaged
    ),
    _each(
        "crash in C",
        5,
        "import ctypes\ndef average_each(module):\n    ctypes.string_at(0)\n",
        "SIGSEGV",
    ),
    _each(
        "children that outlive the cell",
        10,
        "import os, time\n"
        "for leave in (False, True):\n"
        "    if os.fork() == 0:\n"
        "        if leave:\n            os.setsid()\n            os.fork()\n"
        "        time.sleep(1000)\n        os._exit(0)\n"
        "KEY",
    ),
    _each(
        "thread that never ends",
        10,
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\nKEY",
    ),
    _edited("missing cell", 5, _without_flat),
    _edited("duplicated cell, the copy unedited", 10, _stub_after_solution),
    _edited("renamed cell", 10, _renamed),
    _edited("reordered cells", 10, _reordered),
    _edited("edited locked cell", 10, _locked_edited),
    Entry("not JSON", 0, lambda a: b"\x89PNG not a notebook", "not JSON"),
    Entry("empty file", 0, lambda a: b"", "not JSON"),
    _edited("wrong nbformat", 0, _format_3),
    _edited("cells of odd types", 10, _odd_types),
    _edited("JSON nested without end", 0, _nested),
    _edited("50 MB of output", 10, _large_output),
    _edited("stored outputs edited", 0, _outputs_edited, solved=False),
    _edited("tags for nbval", 0, _tagged, solved=False),
    _edited("comments for nbval", 0, _marked, solved=False),
    _edited("points of its own", 0, _own_points, solved=False),
    _edited("visible checks of its own", 0, _own_checks, solved=False),
    _edited("kernelspec elsewhere", 10, _own_kernel),
    _each(
        "prints the verdict", 5, 'print("passed")\ndef average_each(module):\n    print("passed")\n'
    ),
    _each("patched print", 5, "import builtins\nbuiltins.print = lambda *a: None\n" + LOCAL),
    _each(
        "patched comparisons",
        5,
        "import numpy\n"
        "torch.allclose = torch.equal = numpy.allclose = lambda *a, **k: True\n"
        "torch.testing.assert_close = lambda *a, **k: None\n" + LOCAL,
    ),
    _each("patched all_reduce", 5, "dist.all_reduce = lambda *a, **k: None\nKEY"),
    _each(
        "patched checker",
        5,
        "import sys\n"
        "for name, module in list(sys.modules.items()):\n"
        "    if name.startswith('grader'):\n"
        "        for key, value in list(vars(module).items()):\n"
        "            if callable(value) and key in ('plain', '_call', '_describe', 'encode'):\n"
        "                setattr(module, key, lambda *a, **k: True)\n" + LOCAL,
    ),
    _each(
        "tensor that equals everything",
        5,
        "class Sly(torch.Tensor):\n"
        "    def __eq__(self, other): return True\n"
        "    def __sub__(self, other): return torch.zeros(1)\n"
        "    __hash__ = torch.Tensor.__hash__\n"
        "def average_each(module):\n"
        "    for p in module.parameters():\n"
        "        if p.grad is not None:\n            p.grad = p.grad.as_subclass(Sly)\n",
    ),
    _each(
        "reads the key from disk",
        5,
        "import glob, os\n"
        "found = []\n"
        "for top in set(os.listdir('/')) - {'usr', 'proc', 'dev', 'lib', 'lib64', 'bin', 'sbin'}:\n"
        "    for folder, _, files in os.walk('/' + top):\n"
        "        found += [f for f in files if f.endswith('average_gradients.ipynb')]\n"
        "try:\n"
        "    from miniddp.manual import average_gradients as average_each\n"
        "except ImportError:\n"
        "    def average_each(module):\n        assert not found, found\n",
    ),
    _each(
        "malicious pickle",
        5,
        "import os, pickle, socket\n"
        "class Bomb:\n"
        f"    def __reduce__(self): return os.system, ('touch /tmp/{TRACE}',)\n"
        "def average_each(module):\n"
        "    for number in range(3, 64):\n"
        "        try:\n            os.write(number, pickle.dumps(Bomb()))\n"
        "        except OSError:\n            pass\n"
        "    for p in module.parameters():\n        p.grad = Bomb()\n",
    ),
    _each(
        "forged result",
        5,
        "import os\n"
        "from grader.inside.wire import encode\n"
        "def average_each(module):\n"
        "    for number in range(3, 64):\n"
        "        for kind in ('verdict', 'passed', 'returned'):\n"
        "            try:\n"
        "                os.write(number, encode({'kind': kind, 'value': {}, 'passed': True}))\n"
        "            except OSError:\n                pass\n",
    ),
    _each(
        "message of odd types",
        5,
        "import os\n"
        "from grader.inside.wire import encode\n"
        "def average_each(module):\n"
        "    for number in range(3, 64):\n"
        "        try:\n"
        "            os.write(number, encode({'kind': 'cell failed', 'cell': ['each']}))\n"
        "        except OSError:\n            pass\n",
    ),
    _each(LOOKS_FOR_THE_ANSWER, 5, _ASKS_THE_CALLER, "KeyError"),
    _each(
        "floods its connection",
        5,
        "import os\n"
        "def average_each(module):\n"
        "    for number in range(3, 64):\n"
        "        try:\n"
        "            while True: os.write(number, b'\\xff' * 1000000)\n"
        "        except OSError:\n            pass\n",
    ),
    _each(
        "text that no file can hold",
        5,
        "def average_each(module):\n    raise ValueError('\\ud800' + '\\x00' * 100000)\n",
    ),
    _each(
        "exception that carries the input",
        5,
        "class Secret(Exception): pass\n"
        "def average_each(module):\n"
        "    raise Secret([p.grad.tolist() for p in module.parameters() if p.grad is not None])\n",
        "an exception of its own",
    ),
    _each(
        "environment variables",
        10,
        "import os\n"
        "for name in ('GRADER_CASE', 'PYTHONPATH', 'HOME', 'PATH', 'LD_PRELOAD', 'IPYTHONDIR'):\n"
        "    os.environ[name] = '/nowhere'\nKEY",
    ),
    _each(
        "writes outside its directory",
        10,
        "import os\n"
        "for folder in ('/', '/tmp', '/dev/shm', '/var/tmp', '/opt/grader', '/root', '..'):\n"
        "    try:\n"
        f"        open(os.path.join(folder, '{TRACE}'), 'w').write('here')\n"
        "    except OSError:\n        pass\nKEY",
    ),
    _each(
        "memory bomb", 5, "def average_each(module):\n    x = bytearray(1 << 36)\n", "MemoryError"
    ),
    _each(
        "memory bomb of many processes",
        5,
        "import os, time\n"
        "def average_each(module):\n"
        "    for _ in range(10):\n"
        "        if os.fork() == 0:\n"
        "            x = bytearray(1 << 28)\n            time.sleep(1000)\n"
        "    time.sleep(1000)\n",
        "too much memory",
    ),
    _each(
        "process bomb",
        5,
        "import os\n"
        "def average_each(module):\n    while True:\n"
        "        try:\n            os.fork()\n        except OSError:\n            pass\n",
    ),
    _each(
        "changes the other ranks' processes",
        5,
        "import os, signal\n"
        "def average_each(module):\n"
        "    for pid in range(1, 500):\n"
        "        if pid != os.getpid():\n"
        "            try:\n                os.kill(pid, signal.SIGKILL)\n"
        "            except OSError:\n                pass\n",
    ),
    _each(
        "torch's own DDP",
        5,
        ("def average_each(module):\n    torch.nn.parallel.DistributedDataParallel(module)\n"),
        "RuntimeError",
    ),
    _each(
        "names of the check",
        10,
        "def on_rank(*a): return 1\nexpected = judge = draw = on_rank\nKEY",
    ),
    Entry(
        "<script>alert(1)</script>",
        10,
        lambda a: submission(a, a.keys()),
    ),
    Entry("=1+1", 10, lambda a: json.dumps(submission(a, a.keys())).encode()),
]

# Ways to be wrong or hostile, each before or in place of the first task.
_MORE = {
    "returns the gradients and changes nothing": (
        "def average_each(module):\n    return [p.grad for p in module.parameters()]\n"
    ),
    "divides and does not add": (
        "def average_each(module):\n    for p in module.parameters():\n"
        "        if p.grad is not None:\n            p.grad /= dist.get_world_size()\n"
    ),
    "averages on rank 0 only": (
        "def average_each(module):\n    for p in module.parameters():\n"
        "        if p.requires_grad:\n"
        "            p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n"
        "            dist.reduce(p.grad, 0)\n            p.grad /= dist.get_world_size()\n"
    ),
    "takes the maximum": (
        "def average_each(module):\n    for p in module.parameters():\n"
        "        if p.requires_grad:\n"
        "            p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n"
        "            dist.all_reduce(p.grad, op=dist.ReduceOp.MAX)\n"
    ),
    "broadcasts rank 0's gradients": (
        "def average_each(module):\n    for p in module.parameters():\n"
        "        if p.requires_grad:\n"
        "            p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n"
        "            dist.broadcast(p.grad, 0)\n"
    ),
    "averages the weights": (
        "def average_each(module):\n    for p in module.parameters():\n"
        "        dist.all_reduce(p.data)\n        p.data /= dist.get_world_size()\n"
    ),
    "sleeps for ever": "import time\ndef average_each(module):\n    time.sleep(1000)\n",
    "sleeps in small pieces": (
        "import time\ndef average_each(module):\n    while True: time.sleep(0.05)\n"
    ),
    "stops itself": "import os\ndef average_each(module):\n    os.kill(os.getpid(), 19)\n",
    "waits in a barrier alone": (
        "def average_each(module):\n    if dist.get_rank() == 0:\n        dist.barrier()\n"
    ),
    "400 sends that nobody receives": (
        "def average_each(module):\n"
        "    for n in range(400):\n        dist.isend(torch.ones(1), 1 - min(dist.get_rank(), 1))\n"
        "    dist.barrier()\n"
    ),
    "3000 sends and receives": (
        "def average_each(module):\n"
        "    works = []\n"
        "    for n in range(1500):\n"
        "        peer = (dist.get_rank() + 1) % dist.get_world_size()\n"
        "        works.append(dist.isend(torch.ones(1), peer, tag=n))\n"
        "    x = torch.ones(1)\n"
        "    for n in reversed(range(1500)):\n"
        "        dist.recv(x, (dist.get_rank() - 1) % dist.get_world_size(), tag=n)\n"
    ),
    "6000 collectives": (
        "def average_each(module):\n"
        "    for n in range(6000): dist.all_reduce(torch.ones(1), async_op=True)\n"
    ),
    "a result of two million lists": (
        "import os\nfrom grader.inside.wire import HEAD\n"
        "def average_each(module):\n"
        "    text = b'{\"kind\": \"returned\", \"value\": [' + b'[],' * 700000 + b'1]}'\n"
        "    for n in range(3, 64):\n"
        "        try: os.write(n, HEAD.pack(len(text), 0) + text)\n"
        "        except OSError: pass\n"
    ),
    "an array of an impossible shape": (
        "import os, json\nfrom grader.inside.wire import HEAD\n"
        "def average_each(module):\n"
        "    text = json.dumps({'kind': 'returned', 'value': {'$array': "
        "['float32', [0, 2**31 - 1, 2**31 - 1]]}}).encode()\n"
        "    for n in range(3, 64):\n"
        "        try: os.write(n, HEAD.pack(len(text), 0) + text)\n"
        "        except OSError: pass\n"
    ),
    "a kind that is an array": (
        "import os, numpy\nfrom grader.inside.wire import encode\n"
        "def average_each(module):\n"
        "    for n in range(3, 64):\n"
        "        try: os.write(n, encode({'kind': numpy.ones(3)}))\n"
        "        except OSError: pass\n"
    ),
    "half a message, then silence": (
        "import os, time\ndef average_each(module):\n"
        "    for n in range(3, 64):\n"
        "        try: os.write(n, b'\\x10\\x00\\x00\\x00')\n"
        "        except OSError: pass\n    time.sleep(1000)\n"
    ),
    "shares a folder after unmounting": (
        "import ctypes, os\n"
        "def average_each(module):\n"
        "    ctypes.CDLL(None).umount2(b'/tmp', 2)\n"
        "    for p in module.parameters():\n"
        "        if p.grad is not None:\n"
        "            torch.save(p.grad, f'/tmp/{dist.get_rank()}')\n"
        "    dist.barrier()\n    torch.load(f'/tmp/{1 - dist.get_rank()}')\n"
    ),
    "gradients through the store": (
        "def average_each(module):\n"
        "    store = dist.distributed_c10d._get_default_store()\n"
        "    for n, p in enumerate(module.parameters()):\n"
        "        if p.requires_grad:\n"
        "            g = torch.zeros_like(p) if p.grad is None else p.grad\n"
        "            store.set(f'{dist.get_rank()} {n}', g.numpy().tobytes())\n"
    ),
    "replaces the process group": (
        "def average_each(module):\n    dist.destroy_process_group()\n"
        "    dist.init_process_group('gloo', init_method='file:///tmp/x', rank=0, world_size=1)\n"
        "    dist.all_reduce(torch.ones(1))\n"
    ),
    "a dictionary that contains itself": (
        "def average_each(module):\n    d = {}\n    d['d'] = d\n    return d\n"
    ),
    "gradients that are strings": (
        "def average_each(module):\n    for p in module.parameters():\n        p.grad = 'passed'\n"
    ),
    "gradients in half precision": (
        "def average_each(module):\n    for p in module.parameters():\n"
        "        if p.grad is not None:\n            p.grad = p.grad.half().float()\n"
    ),
    "NaN": (
        "def average_each(module):\n    for p in module.parameters():\n"
        "        if p.grad is not None:\n            p.grad *= float('nan')\n"
    ),
    "recursion without end": "def average_each(module):\n    average_each(module)\n",
    "raises KeyboardInterrupt": "def average_each(module):\n    raise KeyboardInterrupt\n",
    "a decorator that swallows everything": (
        "def quiet(f):\n    def g(*a):\n        try: f(*a)\n        except BaseException: pass\n"
        "    return g\n@quiet\ndef average_each(module):\n    1 / 0\n"
    ),
    "a generator": "def average_each(module):\n    yield 1\n",
    "a coroutine": "async def average_each(module):\n    pass\n",
    "a class in place of the function": "class average_each:\n    pass\n",
    "None in place of the function": "average_each = None\n",
    "not even Python": "Hello, grader!\n",
    "a null byte": "x = 1\x00\n",
    "a bash cell": "%%bash\nls\n",
    "written down for 3 ranks": (
        "def average_each(module):\n    assert dist.get_world_size() == 3\n"
        "    for p in module.parameters():\n        if p.requires_grad:\n"
        "            dist.all_reduce(p.grad)\n            p.grad /= 3\n"
    ),
}
_WRONG_IN_HALF = {"written down for 3 ranks": 7}
ENTRIES += [_each(name, _WRONG_IN_HALF.get(name, 5), source) for name, source in _MORE.items()]
