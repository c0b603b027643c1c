"""One rank of a check: run the student's cells, then the check's `on_rank`, and send back its data.

1. Each given cell and each cell of the student's is executed by itself, in the namespace of the
   module `student`. A cell that fails is reported; what needs it fails as a consequence.
2. The check's `on_rank(student, given)` is called while `seen` writes down what is communicated.
3. What it returned is packed. No verdict is made here: this process is the student's.
"""

import ast
import asyncio
import contextlib
import inspect
import math
import random
import resource
import sys
import threading
import traceback
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from grader.inside.values import pack
from labkit.testing.watch import LaunchedCollective, RecordedCollectives

_OWN_CPU_TIME = 6  # seconds of processor time that a rank may use
_PREFIX = "<ipykernel "  # of the names of the cells' files: the engine shows lines of such files
LONGEST = 300  # characters of a message


def file_of(cell: str) -> str:
    """The name under which the code of a cell appears in stacks."""
    return f"{_PREFIX}{cell}>"


def draw(draws: list[dict[str, Any]]) -> list[Any]:
    """The inputs of each draw: {"source", "seed", "world_size"} → one dictionary per rank.

    All of it is the teacher's code.
    """
    drawn = []
    for one in draws:
        check = types.ModuleType("check")
        check.__dict__["seen"] = None
        exec(compile(one["source"], "<check>", "exec", dont_inherit=True), check.__dict__)
        drawn.append(check.draw(np.random.default_rng(one["seed"]), one["world_size"]))
    return drawn


class RankFailedError(Exception):
    """A rank cannot go on; `about` says why, as plain data."""

    def __init__(self, about: dict[str, Any]) -> None:
        super().__init__(about)
        self.about = about


def run(rank: int, world_size: int, request: dict[str, Any]) -> bytes:
    """One rank of a check."""
    resource.setrlimit(resource.RLIMIT_CPU, (_OWN_CPU_TIME, _OWN_CPU_TIME + 1))
    torch.default_generator.manual_seed(random.Random(f"{request['seed']} {rank}").getrandbits(31))
    given = request["givens"][rank]
    seen = RecordedLaunches()
    _take_away_ddp()
    student, check = types.ModuleType("student"), types.ModuleType("check")
    # Where pickle and dataclasses look for the classes that a cell defines.
    sys.modules["student"] = student
    student.__dict__["display"] = print  # a notebook has it without an import
    check.__dict__["seen"] = seen
    failed = {}
    for name, source in request["cells"]:
        try:
            _execute(source, file_of(name), student.__dict__)
        except BaseException as error:
            failed[name] = _described(error, rank)
    try:
        exec(compile(request["source"], "<check>", "exec", dont_inherit=True), check.__dict__)
        with seen:
            value = check.on_rank(student, given)
        return pack({"value": value, "failed": failed})
    except BaseException as error:
        raise RankFailedError(_described(error, rank) | {"failed": failed}) from error


def _execute(source: str, file: str, namespace: dict[str, Any]) -> None:
    """Like a notebook's cell: `await` may stand outside of functions."""
    flag = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(source, file, "exec", flag, dont_inherit=True)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, namespace))
    else:
        exec(code, namespace)


def _described(error: BaseException, rank: int) -> dict[str, Any]:
    """What `error` is, and the innermost line of a student's cell that it passed."""
    where = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        where.insert(0, (error.filename or "", error.lineno))
    own = [(file, line) for file, line in where if file.startswith(_PREFIX)]
    file, line = own[-1] if own else ("", 0)
    try:
        message = str(error)
    except Exception:
        message = ""
    message = message.encode("utf-8", "replace").decode()[:LONGEST]
    name = type(error).__name__
    if isinstance(error, TypeError) and "Expected parameter" in message and "NoneType" in message:
        message = f"rank {rank} passed None to a collective: is some .grad None there?"
    return {
        "how": "raised",
        "rank": rank,
        "type": name[:LONGEST],
        "message": message,
        "cell": file.removeprefix(_PREFIX).removesuffix(">"),
        "line": line or 0,
    }


def _take_away_ddp() -> None:
    """Leave no DistributedDataParallel where a solution would look for one."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("torch's DistributedDataParallel is not part of this task")

    for module in (torch.nn.parallel, torch.nn.parallel.distributed):
        module.DistributedDataParallel = refuse
    for module in (dist, torch._C._distributed_c10d):
        vars(module).pop("Reducer", None)


class Launch(NamedTuple):
    """One collective, as this rank launched it."""

    op: str  # "all_reduce" for each form of it; otherwise torch's name
    sizes: tuple[int, ...]  # elements of each tensor that this rank sends
    nbytes: int  # of these
    progress: int  # gates that backward had passed


class RecordedLaunches(RecordedCollectives):
    """Launches of all threads, in order; `gate` marks how far backward has come."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.progress = 0
        _record_elsewhere(self)

    def before(self, launch: LaunchedCollective) -> None:
        self.launches.append(_launch(launch, self.progress))

    def gate(self, x: torch.Tensor, passed: Any = None) -> torch.Tensor:
        """`x`. When backward comes here, `progress` grows by one and `passed()` is called."""

        def passes(_: torch.Tensor) -> None:
            self.progress += 1
            if passed is not None:
                passed()

        x = x.view_as(x)
        if x.requires_grad:
            x.register_hook(passes)
        return x

    def all_reduced(self) -> list[int]:
        """The elements of each tensor that was all-reduced."""
        return [n for one in self.launches if one.op == "all_reduce" for n in one.sizes]

    def signal(self, name: str) -> None:
        """Tell the other ranks, without a collective."""
        dist.distributed_c10d._get_default_store().set(name, "1")

    def wait_for(self, name: str, seconds: float) -> bool:
        """Whether some rank signaled `name` within this time."""
        with contextlib.suppress(RuntimeError):
            store = dist.distributed_c10d._get_default_store()
            store.wait([name], timedelta(seconds=seconds))
            return True
        return False


def _launch(launch: LaunchedCollective, progress: int) -> Launch:
    op = launch.op.strip("_")
    op = "all_reduce" if op.startswith(("allreduce", "all_reduce")) else op
    shapes = launch.shapes
    # A gather's tensors are what comes in, of all ranks, and then what this rank sends.
    if "gather" in op:
        shapes = shapes[-1:]
    sizes = [math.prod(shape) for shape in shapes]
    whole = sum(map(math.prod, launch.shapes))
    nbytes = launch.bytes * sum(sizes) // whole if whole else 0
    if len(launch.shapes) == 1:  # an expanded tensor has fewer elements than its shape says
        sizes = [launch.bytes // getattr(torch, launch.dtype).itemsize]
    return Launch(op, tuple(sizes), nbytes, progress)


def _record_elsewhere(seen: RecordedLaunches) -> None:
    """Record in a student's threads and callbacks, too: a dispatch mode is a thread's own."""
    here = threading.local()
    here.records = True

    def recorded(action: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            if getattr(here, "records", False):
                return action(*args)
            here.records, child = True, RecordedCollectives()
            child.before = seen.before
            try:
                with child:
                    return action(*args)
            finally:
                here.records = False

        return watched

    def started(self: threading.Thread) -> None:
        self.run = recorded(self.run)
        start(self)

    start, threading.Thread.start = threading.Thread.start, started
    futures = torch.futures.Future.__base__  # what get_future() returns
    for name in ("then", "add_done_callback"):
        method = getattr(futures, name)
        setattr(futures, name, lambda self, call, its=method: its(self, recorded(call)))
