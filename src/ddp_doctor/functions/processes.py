"""Start ranks that call a user's functions, and leave no process, folder, or port behind.

    found = measured(functions, ranks=2, limit=60)

A fork server that has loaded torch starts on first use and ends with this process. It forks the
ranks. Each leads a session of its own, which it ends once its connection to this process closes,
however that happens.
"""

import contextlib
import importlib.util
import io
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from ddp_doctor.certificate.guard import SOCKETS, end_session, guarded_folder
from ddp_doctor.certificate.starts import rank_variables
from ddp_doctor.facts.places import users_trace

LOADED = ("torch._dynamo", "torch.distributed.fsdp", "ddp_doctor.functions.gradients")
AFTER_A_FAILURE = 5.0  # seconds that the other ranks have


class Task(NamedTuple):
    """What a rank gets. `limit`: seconds that it waits for another."""

    functions: bytes
    world: int
    limit: float
    folder: Path
    environment: dict[str, str]


class Failed(NamedTuple):
    """How the ranks, or one process, failed: `where` is which of them, `text` a traceback."""

    where: str
    text: str


def measured(functions: Any, ranks: int, limit: float) -> tuple[Any, ...] | Failed:
    """What each of `ranks` ranks measured, then what one process measured.

    Raises ValueError for a function that cannot be imported, and RuntimeError if the processes
    cannot be started. Cost: `ranks` + 1 forks; once per process, an interpreter with torch.
    """
    method = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
    context: Any = mp.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(list(LOADED))
    if len(tempfile.gettempdir()) > SOCKETS:
        raise RuntimeError(
            f"The path of the temporary folder, {tempfile.gettempdir()}, is too long for a socket. "
            "Set TMPDIR to a shorter one."
        )
    found: list[Any] = []
    with guarded_folder() as folder:
        for world in (ranks, 1):
            task = Task(by_name(functions), world, limit, folder, dict(os.environ))
            group = _group(context, task)
            if isinstance(group, Failed):
                return group
            found += group
    return tuple(found)


class _ByName(pickle.Pickler):
    """Pickles a function as its file and its name there, so that any rank finds it."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, FunctionType | type) or value.__module__.startswith("ddp_doctor."):
            return NotImplemented
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
        if "<" in value.__qualname__ or (file is None and value.__module__ == "__main__"):
            raise pickle.PicklingError
        if file is None:
            return NotImplemented
        return _imported, (value.__module__, str(Path(file).absolute()), value.__qualname__)


def by_name(functions: Any) -> bytes:
    """`functions` as bytes. Raises ValueError if one of them cannot be imported."""
    for name, value in vars(functions).items():
        try:
            _ByName(io.BytesIO()).dump(value)
        except (pickle.PicklingError, AttributeError, TypeError):
            role = "loss" if hasattr(value, "loss") else name
            raise ValueError(
                f"{role} is {getattr(value, 'loss', value)!r}, which the ranks cannot import by "
                "its name. Define it at the top level of a file."
            ) from None
    file = io.BytesIO()
    _ByName(file).dump(functions)
    return file.getvalue()


def _imported(module: str, file: str, name: str) -> Any:
    """The function of that name in the module, from its file even if that is not on the path."""
    if module not in sys.modules:  # `multiprocessing` has loaded the main module
        spec = None
        with contextlib.suppress(ImportError):
            spec = importlib.util.find_spec(module)
        if spec is None or spec.origin != file:
            spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None
        assert spec.loader is not None
        loaded = sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    return reduce(getattr, name.split("."), sys.modules[module])


def _group(context: Any, task: Task) -> list[Any] | Failed:
    """Start the ranks and wait for what they measured; the first failure of one is theirs."""
    ends: dict[Any, int] = {}
    processes: list[Any] = []
    found: dict[int, Any] = {}
    failed: list[Failed] = []
    until: float | None = None
    try:
        for rank in range(task.world):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=_be_rank, args=(theirs, task, rank)))
            processes[-1].start()
            theirs.close()
            ends[ours] = rank
        while ends and (until is None or time.monotonic() < until):
            for end in wait([*ends], None if until is None else until - time.monotonic()):
                rank = ends.pop(end)
                found[rank] = _answer(end, processes[rank], rank, task)
                if isinstance(found[rank], Failed):
                    failed.append(found[rank])
                    until = until or time.monotonic() + AFTER_A_FAILURE
    finally:
        for process in processes:
            end_session(process.pid)
            process.kill()
            process.join()
    first = [one for one in failed if "peer" not in one.text] or failed  # others' end is no cause
    return first[0] if first else [found[rank] for rank in range(task.world)]


def _answer(end: Any, process: Any, rank: int, task: Task) -> Any:
    try:
        return end.recv()
    except (EOFError, OSError):
        process.join()
    output = task.folder / f"output.{rank}"
    if not output.exists():
        raise RuntimeError(
            "The doctor's processes ended before they could start. In a script, call it below "
            'if __name__ == "__main__":, as multiprocessing requires.'
        )
    text = output.read_text(errors="replace").strip()[-1000:]
    return Failed(_who(rank, task), f"It ended with exit code {process.exitcode}.\n{text}".strip())


def _who(rank: int, task: Task) -> str:
    return f"rank {rank} of {task.world}" if task.world > 1 else "one process"


def _be_rank(end: Connection, task: Task, rank: int) -> None:
    """Measure in a group of `task.world`, send the result, and end."""
    os.setsid()
    threading.Thread(target=_end_with, args=(end,), daemon=True).start()
    output = os.open(task.folder / f"output.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number in (1, 2):
        os.dup2(output, number)
    os.environ.clear()
    variables = rank_variables(rank, task.world, port=0)  # the group has a file
    os.environ.update(task.environment | variables)
    try:
        import torch
        import torch.distributed as dist

        from ddp_doctor.functions import gradients

        torch.set_num_threads(1)
        store = dist.FileStore(str(task.folder / f"store.{task.world}"), task.world)
        limit = timedelta(seconds=task.limit)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=task.world, timeout=limit
        )
        measure: Any = gradients.measure_ranks if task.world > 1 else gradients.measure_one
        end.send(measure(pickle.loads(task.functions), task.folder))
    except BaseException as error:
        end.send(Failed(_who(rank, task), told(error)))
    os._exit(0)


def _end_with(end: Connection) -> None:
    """End this session once the other end is closed: its process is gone. It never sends."""
    with contextlib.suppress(OSError):
        end.poll(None)
    os.killpg(0, signal.SIGKILL)


def told(error: BaseException) -> str:
    """The traceback, from the user's first line on."""
    trace = users_trace(error.__traceback__) or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, trace)).strip()
