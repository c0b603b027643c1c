"""Of a handed-in notebook only the solutions' source is read, and repairs are told."""

import copy
import os
import resource
import time

import pytest
from grader_notebooks import ASSIGNMENTS, cell, first_assignment, submission, write

from grader.allowed import unusual
from grader.merge import known_to, read_submission, without_magics
from grader.notebook_file import LONGEST, hash_of
from grader.source import read_assignment

ASSIGNMENT = first_assignment()


def read(tmp_path, change):
    notebook = submission(ASSIGNMENT, ASSIGNMENT.keys())
    change(notebook)
    return read_submission(write(notebook, tmp_path / "a.ipynb"), ASSIGNMENT)


def test_the_solutions_of_an_untouched_notebook_come_without_a_remark(tmp_path):
    found = read(tmp_path, lambda notebook: None)
    assert found.solutions == ASSIGNMENT.keys()
    assert found.notes == []
    assert found.unreadable == ""


def test_of_several_cells_the_last_one_edited_counts(tmp_path):
    def change(notebook):
        for source in ("first = 1", "last = 1", ASSIGNMENT.stubs()["flat"]):
            again = copy.deepcopy(cell(notebook, "flat"))
            notebook["cells"].append({**again, "id": source[:5].strip(), "source": source})

    found = read(tmp_path, change)
    assert found.solutions["flat"] == "last = 1"
    assert "4 cells are called flat" in found.notes[0]


def test_a_solution_that_looks_around_in_its_process_is_noted_for_a_person(tmp_path):
    def change(notebook):
        cell(notebook, "each")["source"] = "from inspect import stack\nget = '_getframe'\n"
        wrapped = "def average_flat(wrap):\n    wrap.run.__closure__\n    wrap.modules()\n"
        cell(notebook, "flat")["source"] = wrapped

    found = read(tmp_path, change)
    assert found.notes == [
        "cell each, line 1: inspect.stack; line 2: '_getframe': a person should look",
        "cell flat, line 2: .__closure__: a person should look",
    ]


@pytest.mark.parametrize("path", sorted(ASSIGNMENTS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_key_uses_nothing_at_which_a_person_should_look(path, tmp_path):
    assignment = read_assignment(path)
    notebook = submission(assignment, assignment.keys())
    assert read_submission(write(notebook, tmp_path / "a.ipynb"), assignment).notes == []


# What each reaches is an object, a file, or a process beyond the solution.
CHEATS = """
import traceback
from operator import attrgetter
torch.save(1, "/tmp/x")
from pathlib import Path
dist.group.WORLD._get_backend(torch.device("cpu"))
type.__subclasses__(object)
dict(x=(i for i in [1]).gi_frame)
dist.fsdp.fully_shard(1)
nn.parallel.DistributedDataParallel(1)
dist.tensor.distribute_tensor(1)
torch.ops.c10d.allreduce_(1)
getattr(type, "__sub" + "classes__")()
sum(getattr(object, n) for n in ["__sub" + "classes__"])
torch.os.listdir("/")
import random; random._os.fork()
import contextlib; contextlib.sys.modules
from torch.distributed import *
"{0.__globals__}".format(1)
dist.all_reduce = lambda *a, **k: None
type("A", (), {})
import functools; functools.reduce(getattr, ["a"], dist)
import asyncio; asyncio.create_subprocess_shell("ls")
import numpy; numpy.zeros(1).tofile("/tmp/x")
import typing; typing.get_type_hints(1)
dist.fsdp = dist.fully_shard = 1
next(dist.rendezvous("tcp://127.0.0.1:1"))
dist.init_process_group("gloo")
import asyncio; asyncio.new_event_loop().create_server(print)
import threading; T = threading.Thread; T.run = print
setattr(dist, "all_reduce", print)
import functools; functools.update_wrapper(dist, print, ["all_reduce"], [])
import enum; enum.global_enum(enum.Enum("E", {"all_reduce": 1}, module="torch.distributed"))
kind = type(int); kind("A", (), {})
import typing; typing.get_origin(typing.Type[int])("A", (), {})
import abc; abc.ABCMeta("A", (), {})
import dataclasses; dataclasses.make_dataclass("A", [])
self._get_backend = 0; group._get_backend("cpu")
self._set_from_file = 0; storage._set_from_file(1)
import copy; copy.dispatch_table[Exception] = print
from math import pi as __reduce__
import numpy; numpy.test()
T = torch.Tensor; T.backward = print
type(p).grad = property(print)
object.__setattr__(dist, "all_reduce", print)
replace(dist, print)
torch.classes.load_library("x.so")
"{0.gi_frame.f_back}".format(1)
text = "{0" + ".gi_frame}"; text.format(1)
getattr("{0" + ".gi_frame}", "format")(1)
kind = type[int]; kind("A", (), {})
type(int)[int]("A", (), {})
type(int)(int)("A", (), {})
import enum; enum.Enum("A", {"__re" + "duce__": print})
type(credits)(name="x", data="", files=["passwd"], dirs=["/etc"])
dist.isend(p, 1)
self.isend = 0; group.isend(p, 1)
print(dist.Backend)
self.create_server = 0; loop.create_server(print)
self.serialization = self._open_file = 0; [t] = [torch]; t.serialization._open_file("x", "w")
self.module = dist
own = [torch.distributed]
self._backward_hooks = 0; p._backward_hooks.popitem()
model.names = []
setattr(model, "names", [])
object.__setattr__(p, "gr" + "ad", 1)
self._composable = 0; getattr(dist, "_composable")
""".strip().splitlines()
CHEATS += [
    "class A(Exception):\n    if 1:\n        def __reduce__(self): return print, ()",
    "class A(Exception):\n    class __reduce__: pass",
    "class A:\n    match 1:\n        case __reduce__: pass",
    "match torch:\n    case object(_C=found): pass",
    "class A(metaclass=print): pass",
    "class A:\n    @classmethod\n    def reach(cls): return super().__getattribute__",
    "class A:\n    @classmethod\n    def put(cls): super().__setattr__(dist, 'all_reduce', print)",
    "import functools\nfunctools.singledispatch(print).register(print)",
    "class A:\n    _base = 0\n    def reach(self): return self._base\nA.reach(p)",
    f"x{'.a' * 600} = 1\nimport sys",
]


@pytest.mark.parametrize("source", CHEATS)
def test_what_reaches_beyond_a_solution_is_told_with_its_line(source):
    told = unusual(f"x = 1\n{source}", known_to(ASSIGNMENT))
    assert told
    assert "line 1: " not in told[0]


@pytest.mark.slow
def test_of_the_right_solutions_only_one_by_torchs_own_sharding_is_marked():
    from surveys.grader.right_solutions import RIGHT

    paths = sorted(ASSIGNMENTS.glob("*.ipynb"))
    marked = [
        name
        for number, tasks in RIGHT.items()
        for known in [known_to(read_assignment(paths[number - 1]))]
        for sources in tasks.values()
        for name, source in sources.items()
        if unusual(without_magics(source)[0], known)
    ]
    assert marked == ["torch's fully_shard per layer"]


def _loses_flat(notebook):
    notebook["cells"] = [c for c in notebook["cells"] if c.get("id") != "flat"]


@pytest.mark.parametrize(
    ("change", "note", "graded"),
    [
        (lambda n: cell(n, "flat").update(metadata={}), "found by its cell id", True),
        (lambda n: cell(n, "imports").update(source="import nothing"), "was edited: the or", True),
        (_loses_flat, "cell flat is missing: graded as not written", False),
        (lambda n: cell(n, "flat").update(source="#" * (LONGEST + 1)), "characters", False),
    ],
)
def test_a_damaged_cell_is_told_and_only_a_lost_solution_counts_as_not_written(
    tmp_path, change, note, graded
):
    found = read(tmp_path, change)
    assert len(found.notes) == 1
    assert note in found.notes[0]
    source = ASSIGNMENT.keys() if graded else ASSIGNMENT.stubs()
    assert found.solutions == ASSIGNMENT.keys() | {"flat": source["flat"]}


def test_outputs_tags_and_points_of_its_own_are_not_read_whatever_their_size(tmp_path):
    def change(notebook):
        for one in notebook["cells"]:
            if one["cell_type"] == "code":
                text = "passed\n" * 1_000_000
                one["outputs"] = [{"output_type": "stream", "name": "stdout", "text": text}]
                one["metadata"]["tags"] = ["raises-exception", "nbval-skip", "nbval-ignore-output"]
        notebook["metadata"]["grader"]["points"] = 1000

    found = read(tmp_path, change)
    assert (found.solutions, found.notes, found.unreadable) == (ASSIGNMENT.keys(), [], "")


@pytest.mark.parametrize("start", [b"[" * 200_000 + b"]" * 200_000, b"\x89PNG"])
def test_what_is_no_notebook_is_unreadable(start, tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_bytes(b'{"nbformat": 4, "cells": ' + start + b"}")
    assert "not JSON" in read_submission(path, ASSIGNMENT).unreadable


def test_what_is_no_regular_file_is_unreadable_and_waits_for_nobody(tmp_path):
    other = tmp_path / "other.ipynb"
    write(submission(ASSIGNMENT, ASSIGNMENT.keys()), other)
    os.mkfifo(tmp_path / "pipe.ipynb")
    (tmp_path / "link.ipynb").symlink_to(other)
    (tmp_path / "folder.ipynb").mkdir()
    for name, said in (("pipe", "regular file"), ("link", "a link"), ("folder", "regular file")):
        found = read_submission(tmp_path / f"{name}.ipynb", ASSIGNMENT)
        assert said in found.unreadable
        assert found.solutions == ASSIGNMENT.stubs()
        assert hash_of(tmp_path / f"{name}.ipynb") == "unreadable"


@pytest.mark.parametrize("text", ["[],", '{"a":1},'])
def test_a_large_file_of_many_values_costs_the_trusted_side_nothing(tmp_path, text):
    path = tmp_path / "large.ipynb"
    body = text * (40_000_000 // len(text))
    path.write_text('{"nbformat": 4, "cells": [' + body + "[]]}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = read_submission(path, ASSIGNMENT)
    assert found.unreadable
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("%%time\nx = 1", "\nx = 1"),
        ("\n%%capture out\nx = 1", "\n\nx = 1"),
        ("%matplotlib inline\nx = 1", "None\nx = 1"),
        ("def f():\n    !ls -l\n    return 1", "def f():\n    None\n    return 1"),
        ("y = !ls\nx = 1", "y = None\nx = 1"),
        ("%time x = 1", "x = 1"),
        ("x?", "None"),
        ("%pwd\nx = 1\n", "None\nx = 1\n"),
        ("t = '''\n%time\n!no\n'''\n%pwd", "t = '''\n%time\n!no\n'''\nNone"),
        ("%%writefile a.py\nx = 1", "\nx = 1"),
        ("!a\n" * 60 + "x = 1", "None\n" * 60 + "x = 1"),
        ("x = 7 \\\n% 4", "x = 7 \\\n% 4"),
    ],
)
def test_magics_are_taken_out_and_lines_keep_their_numbers(source, wanted):
    found, ignored = without_magics(source)
    assert found == wanted
    assert bool(ignored) == (source != wanted)


@pytest.mark.parametrize("source", ["def f(:\n    pass", "%%bash\nls", "x = (\n%time"])
def test_a_students_own_syntax_error_stays(source):
    with pytest.raises(SyntaxError):
        compile(without_magics(source)[0], "cell", "exec")


def test_magics_and_the_lines_of_another_system_are_told_and_cost_nothing(tmp_path):
    def change(notebook):
        one = cell(notebook, "each")
        one["source"] = "%%time\r\ntorch.cat?\r\n" + ASSIGNMENT.keys()["each"]

    found = read(tmp_path, change)
    assert "%%time, torch.cat? was ignored" in found.notes[0]
    assert found.solutions["each"] == "\nNone\n" + ASSIGNMENT.keys()["each"]


def test_ten_thousand_magics_are_told_in_one_short_note_and_cost_seconds_at_most(tmp_path):
    def change(notebook):
        cell(notebook, "each")["source"] = "%time x = 1\n" * 10_000

    unusual("x = 1")
    before = time.process_time()
    assert all(len(note) < 400 for note in read(tmp_path, change).notes)
    assert time.process_time() - before < 10
