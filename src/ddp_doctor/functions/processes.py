"""Start ranks that call a user's functions, and leave no process, folder, or port behind.

    found = measured(functions, ranks=2, limit=60)

A fork server that has loaded torch starts on first use and ends with this process. It forks a
*supervisor*, which forks the ranks. The supervisor ends when its connection to this process closes,
however that happens; the kernel ends the ranks when their supervisor ends.
"""

import contextlib
import ctypes
import importlib.util
import io
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

LOADED = ("torch._dynamo", "torch.distributed.fsdp", "ddp_doctor.functions.gradients")
AFTER_A_FAILURE = 5.0  # seconds that the other ranks have
PACKAGE = str(Path(__file__).resolve().parents[1])
PR_SET_PDEATHSIG = 1


class Task(NamedTuple):
    """What the supervisor gets. `limit`: seconds that a rank waits for another."""

    functions: bytes
    ranks: int
    limit: float
    path: list[str]
    environment: dict[str, str]


class Failed(NamedTuple):
    """How the ranks, or one process, failed: `where` is which of them, `text` a traceback."""

    where: str
    text: str


def measured(functions: Any, ranks: int, limit: float) -> tuple[Any, ...] | Failed:
    """What each of `ranks` ranks measured, then what one process measured.

    Raises ValueError for a function that cannot be imported, and RuntimeError if the processes
    ended without an answer. Cost: `ranks` + 2 forks; once per process, an interpreter with torch.
    """
    task = Task(by_name(functions), ranks, limit, list(sys.path), dict(os.environ))
    method = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
    context: Any = mp.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(list(LOADED))
    ours, theirs = context.Pipe()
    process = context.Process(target=_supervise, args=(theirs, task), name="ddp-doctor")
    try:
        process.start()
        theirs.close()
        found: tuple[Any, ...] | Failed = ours.recv()
    except EOFError:
        raise RuntimeError(
            "The doctor's processes ended without an answer. In a script, call it below "
            'if __name__ == "__main__":, as multiprocessing requires.'
        ) from None
    finally:
        ours.close()
        process.join()
    return found


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
    known = "__test_main__" if module == "__main__" else module
    if known not in sys.modules:
        spec = None
        with contextlib.suppress(ImportError):
            spec = importlib.util.find_spec(known)
        if spec is None or spec.origin != file:
            spec = importlib.util.spec_from_file_location(known, file)
        assert spec is not None
        assert spec.loader is not None
        loaded = sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    return reduce(getattr, name.split("."), sys.modules[known])


def _supervise(caller: Connection, task: Task) -> None:
    """Send what was measured, and end with all that was started."""
    os.setsid()
    _end_with_parent(os.getppid())
    if caller.poll():  # it has ended before this process could ask to end with it
        return
    import torch

    torch.set_num_threads(1)  # a fork of a process with a pool of threads would wait for them
    sys.path[:] = task.path
    os.environ.clear()
    os.environ.update(task.environment)
    try:
        functions = pickle.loads(task.functions)
    except Exception as error:
        caller.send(Failed("importing the functions", told(error)))
        return
    _end_with_parent(None)  # from here on, this process sees its caller's end, and cleans up
    folder = Path(tempfile.mkdtemp(prefix="ddp-doctor-"))
    try:
        found = _group(caller, functions, task, folder, task.ranks)
        one = found if isinstance(found, Failed) else _group(caller, functions, task, folder, 1)
        with contextlib.suppress(OSError):
            caller.send(one if isinstance(one, Failed) else (*found, *one))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def _end_with_parent(parent: int | None) -> None:
    """On Linux, the kernel kills this process once its parent has ended; None: no longer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0 if parent is None else signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def _group(
    caller: Connection, functions: Any, task: Task, folder: Path, world: int
) -> list[Any] | Failed:
    """Start `world` ranks and wait for what they measured; the first failure of one is theirs."""
    context = mp.get_context("fork")
    ends: dict[Connection, int] = {}
    processes: list[BaseProcess] = []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (theirs, os.getpid(), functions, task, folder, rank, world)
        processes.append(context.Process(target=_be_rank, args=arguments))
        processes[-1].start()
        theirs.close()
        ends[ours] = rank
    found: dict[int, Any] = {}
    failed: list[Failed] = []
    until: float | None = None
    try:
        while ends and (left := None if until is None else until - time.monotonic()) != 0:
            if left is not None and left < 0:
                break
            for end in wait([caller, *ends], left):
                if end is caller:
                    raise SystemExit  # it never sends: it is gone
                rank = ends.pop(end)  # type: ignore[call-overload]
                answer = _answer(end, processes[rank], rank, world, folder)
                if isinstance(answer, Failed):
                    failed.append(answer)
                    until = until or time.monotonic() + AFTER_A_FAILURE
                found[rank] = answer
    finally:
        for process in processes:
            process.kill()
            process.join()
    first = [one for one in failed if "peer" not in one.text] or failed  # others' end is no cause
    return first[0] if first else [found[rank] for rank in range(world)]


def _answer(end: Any, process: BaseProcess, rank: int, world: int, folder: Path) -> Any:
    try:
        return end.recv()
    except EOFError:
        process.join()
        output = (folder / f"output.{rank}").read_text(errors="replace").strip()[-1000:]
        where = f"rank {rank} of {world}" if world > 1 else "one process"
        return Failed(where, f"It ended with exit code {process.exitcode}.\n{output}".strip())


def _be_rank(
    end: Connection,
    parent: int,
    functions: Any,
    task: Task,
    folder: Path,
    rank: int,
    world: int,
) -> None:
    """Measure in a group of `world`, send the result, and end."""
    _end_with_parent(parent)
    output = os.open(folder / f"output.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number in (1, 2):
        os.dup2(output, number)
    import torch.distributed as dist

    from ddp_doctor.functions import gradients

    gradients.environment(rank, world)
    measure: Callable[..., Any] = gradients.measure_ranks if world > 1 else gradients.measure_one
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / f"store.{world}"), world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=task.limit),
        )
        end.send(measure(functions, folder))
    except BaseException as error:
        end.send(Failed(f"rank {rank} of {world}" if world > 1 else "one process", told(error)))
    os._exit(0)


def told(error: BaseException) -> str:
    """The traceback, from the user's first line on."""
    trace = error.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename.startswith(PACKAGE):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).strip()
