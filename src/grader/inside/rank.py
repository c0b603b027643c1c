"""One rank: receive a job, run the student's cells and the check's part for ranks, send back data.

1. receive the job: the given and the student's cells, of the check what calls the student, this
   rank's own input;
2. join the process group;
3. execute each cell separately in the namespace of the module `student`. A cell that fails is
   reported, and what depends on it fails as a consequence;
4. call the check's `on_rank(student, given)`;
5. send what it returned, as plain data. No verdict is made here: this process is the student's.

Two other jobs run in processes without any code of a student's: `oracle`, and `implementations`.
"""

import builtins
import linecache
import os
import socket
import sys
import traceback
import types
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grader.inside.exhibit import answer_calls, remotes
from grader.inside.link import Link
from grader.inside.oracle import run_oracle
from grader.inside.wire import Channel

CHECK = "<check>"


def run_rank(connection: socket.socket) -> None:
    """The whole life of a rank. Returns when its data has been sent."""
    channel = Channel(connection)
    job = channel.receive()
    if job is None:
        return
    torch.set_num_threads(1)
    if job["call"] == "oracle":
        run_oracle(channel, execute, plain)
    elif job["call"] == "implementations":
        _run_implementations(channel, job)
    else:
        _run_student(channel, job)


def _run_student(channel: Channel, job: dict[str, Any]) -> None:
    # torch.manual_seed also queues a seed, with a stack trace, for each kind of accelerator.
    torch.default_generator.manual_seed(job["seed"])
    link = None
    if job["link"] == "gloo":
        _join_gloo(job)
    else:
        link = Link(channel, job["rank"], job["world_size"])
        link.join()
    tell = link.tell if link else channel.send
    if not job["torch_ddp"]:
        _take_away_ddp()
    student = types.ModuleType("student")
    # Where pickle and dataclasses look for the classes that a cell defines.
    sys.modules["student"] = student
    for cell in job["cells"]:
        failure = execute(cell["source"], f"<{cell['id']}>", student.__dict__)
        if failure:
            tell({"kind": "cell failed", "cell": cell["id"], **failure})
    check = types.ModuleType("check")
    check.gate = link.gate if link else None
    check.implementation = lambda number: remotes(link, number)
    failure = execute(job["check"], CHECK, check.__dict__)
    if failure is None:
        value, failure = _call(check.on_rank, student, job["given"])
    if failure:
        tell({"kind": "raised", **failure})
        return
    try:
        message = {"kind": "returned", "value": plain(value)}
        tell(message)
    except (TypeError, ValueError, RecursionError) as error:
        tell({"kind": "raised", "type": "TypeError", "message": f"returned {error}"[:300]})


def _run_implementations(channel: Channel, job: dict[str, Any]) -> None:
    """Run one rank of the implementations that a student's test judges."""
    link = Link(channel, job["rank"], job["world_size"])
    link.join()
    _load(job["museum"])
    check = types.ModuleType("check")
    check.exhibit = _exhibit
    failure = execute(job["check"], CHECK, check.__dict__)
    if failure is None:
        known, failure = _call(lambda *_: check.implementations(), None, None)
    if failure:
        link.tell({"kind": "raised", **failure})
        return
    answer_calls(link.calls, link.tell, [known[name] for name in job["names"]])


def _load(sources: dict[str, str]) -> None:
    """Make modules of `sources`, {name: text}, each importing only those before it."""
    for name, source in sources.items():
        module = types.ModuleType(name)
        module.__path__ = []  # a package to whoever imports what is in it
        sys.modules[name] = module
        exec(compile(source, f"{name}.py", "exec", dont_inherit=True), module.__dict__)


def _exhibit(name: str) -> Any:
    """The implementation that an exhibit of the museum, loaded before, is about."""
    return next(m.EXHIBIT.wrap for n, m in sys.modules.items() if n.endswith(f"museum.{name}"))


def _take_away_ddp() -> None:
    """Leave no DistributedDataParallel where a solution would look for one.

    It can still be dug up by who knows torch's inside; what the ranks then send each other is seen.
    """

    class DistributedDataParallel:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("torch's DistributedDataParallel is not part of this task")

    for module in (torch.nn.parallel, torch.nn.parallel.distributed):
        module.DistributedDataParallel = DistributedDataParallel
    for module in (dist, torch._C._distributed_c10d):
        vars(module).pop("Reducer", None)


def _join_gloo(job: dict[str, Any]) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job["meet"], job["world_size"]),
        rank=job["rank"],
        world_size=job["world_size"],
        timeout=timedelta(seconds=job["seconds"]),
    )
    # Connected here does not mean connected everywhere.
    dist.all_reduce(torch.zeros(1))


def execute(source: str, name: str, namespace: dict[str, Any]) -> dict[str, Any] | None:
    """Execute `source` as the file `name` in `namespace`; what it raised, or None."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        exec(compile(source, name, "exec", dont_inherit=True), namespace)
    except BaseException as error:
        return _describe(error)
    return None


def _call(function, student, given) -> tuple[Any, dict[str, Any] | None]:
    try:
        return function(student, given), None
    except BaseException as error:
        return None, _describe(error)


def _describe(error: BaseException) -> dict[str, Any]:
    kind = type(error).__name__
    if getattr(builtins, kind, None) is not type(error):
        kind = "an exception of its own"
    cell, line = None, None
    if isinstance(error, SyntaxError):
        cell, line = error.filename, error.lineno
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith("<") and frame.filename != CHECK:
            cell, line = frame.filename, frame.lineno
    return {
        "type": kind,
        "message": str(error)[:2000],
        "cell": (cell or "").strip("<>"),
        "line": line,
    }


def plain(value: Any) -> Any:
    """`value` with tensors as arrays and tuples as lists: what may leave this process."""
    if isinstance(value, Tensor):
        value = value.detach().resolve_conj().resolve_neg()
        value = value.to_dense() if value.is_sparse else value
        if value.is_floating_point() and value.dtype not in (torch.float16, torch.float64):
            value = value.float()  # numpy has neither bfloat16 nor float8
        return np.array(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return value


def leave() -> None:
    """End this process at once: no exit handler of the student's runs."""
    os._exit(0)
