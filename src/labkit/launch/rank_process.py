"""One rank of `labkit.launch.ranks`: set up, call the function, report, wait for the others.

1. Redirect stdout and stderr to files of this rank; the caller shows them in rank order.
2. Create the process group over the loopback interface. The ranks meet through a file, so no store
   listens.
3. Unpickle the function and call it.
4. Send its result, or its error, to the supervisor as bytes.
5. Wait until the supervisor says that every rank has reported. A rank that left earlier would
   close its connections to a slower rank, which would then report a misleading error.

On a GPU it also makes that GPU the current one; this has not been run on one yet.
"""

import contextlib
import faulthandler
import inspect
import linecache
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist

from labkit.launch.guard import die_with_parent
from labkit.launch.rank_states import Frame, describe, show_cells_as

HANDED = ("rank", "world_size", "device")
JOINED = "joined"  # sent to the supervisor before the report: the rank can communicate
# A rank whose neighbor fell reports this; it is a victim, not the cause.
VICTIM = re.compile(r"closed by peer|reset by peer|Broken pipe|Connection refused|Read error")


class Job(NamedTuple):
    """One call of run_ranks, as it is sent to the supervisor and to every rank."""

    payload: bytes  # cloudpickle of (fn, args)
    home: str  # the file that fn was written in
    devices: tuple[str, ...]  # one per rank
    backend: str
    timeout: float  # seconds
    environment: dict[str, str]
    cells: dict[str, str]  # text of the files that exist only in the caller's kernel
    start_method: str  # how the supervisor starts a rank: "fork", or "spawn" where there is none
    modules: tuple[str, ...] = ()  # what the supervisor imports, so that not each rank does

    @property
    def world_size(self) -> int:
        return len(self.devices)


class Report(NamedTuple):
    """How one rank ended, as it is sent to the caller."""

    status: str  # "returned", "raised", "exited", "died", "unsendable", "unfinished"
    text: str = ""  # for people: the traceback, or where it stands
    line: str = ""  # the same in one line
    payload: bytes = b""  # cloudpickle of the result or of the exception
    time: float = 0.0  # time.monotonic() when it happened: one clock for all processes of a machine
    waits: bool = False


def bind(
    fn: Callable[..., Any], args: Sequence[Any], handed: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments for `fn`: `handed` by parameter name, and `args` in order for all other
    parameters.

    Raises TypeError, with the parameter's name, if the two do not match the signature.
    """
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    left = list(args)
    try:
        signature = inspect.signature(fn)
    except ValueError:
        raise TypeError("its parameters cannot be read; wrap it in a function of yours") from None
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += left
            left = []
        elif parameter.kind is parameter.VAR_KEYWORD:
            continue
        elif parameter.kind is parameter.KEYWORD_ONLY:
            if name in handed:
                keywords[name] = handed[name]
            elif parameter.default is parameter.empty:
                raise TypeError(
                    f"keyword-only parameter {name!r} has no default and cannot be given"
                )
        elif name in handed:
            positional.append(handed[name])
        elif left:
            positional.append(left.pop(0))
        elif parameter.default is parameter.empty:
            raise TypeError(f"nothing was given for parameter {name!r}")
        else:
            # Later handed parameters are still given, so the default has to be written out.
            positional.append(parameter.default)
    if left:
        raise TypeError(f"{len(left)} more argument(s) than it has parameters for")
    return positional, keywords


def run_rank(rank: int, job: Job, folder: Path, supervisor: Connection) -> None:
    """Run rank `rank`: report once through `supervisor`, then wait for its answer."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
    _redirect_output(folder, rank)
    stacks = (folder / f"stack-{rank}").open("w")
    stacks.write(f"{threading.main_thread().ident}\n")
    stacks.flush()
    faulthandler.enable()
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    try:
        report = _call(rank, job, folder, supervisor)
    except SystemExit as leave:
        report = Report("exited", _exit_text(leave.code), time=time.monotonic())
    except BaseException as error:
        report = _report_exception(error, job)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the function may have closed it
            stream.flush()
    supervisor.send(report)
    supervisor.recv()


def _redirect_output(folder: Path, rank: int) -> None:
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
        stream = os.fdopen(
            number, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False
        )
        setattr(sys, name, stream)


def _call(rank: int, job: Job, folder: Path, supervisor: Connection) -> Report:
    os.environ.clear()
    os.environ.update(job.environment)
    # torch read TORCH_DISTRIBUTED_DEBUG when it was loaded: in the fork server, before this call.
    dist.set_debug_level_from_env()
    for file, text in job.cells.items():
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    # Under torchrun a rank is a new interpreter; a fork would share its parent's random state.
    torch.seed()
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    torch.set_num_threads(1)
    device = torch.device(job.devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        job.backend,
        # A file as a store listens nowhere; as a file:// address its path could not hold a space.
        store=dist.FileStore(str(folder / "meet"), job.world_size),
        rank=rank,
        world_size=job.world_size,
        # The timeout of run_ranks comes first, and its report says more.
        timeout=timedelta(seconds=job.timeout + 60),
    )
    # Connected here does not mean connected everywhere: a function that destroys its group at once
    # would break up the connecting of a slower rank.
    dist.all_reduce(torch.zeros(1))
    supervisor.send(JOINED)
    fn, args = cloudpickle.loads(job.payload)
    handed = dict(zip(HANDED, (rank, job.world_size, device), strict=True))
    positional, keywords = bind(fn, args, handed)
    result = fn(*positional, **keywords)
    try:
        payload = cloudpickle.dumps(result)
    except Exception as error:
        text = (
            f"returned a {type(result).__name__}, which cannot be sent back "
            f"({type(error).__name__}: {error}). Return numbers, strings, tensors, or lists and "
            "dictionaries of them"
        )
        return Report("unsendable", text, time=time.monotonic())
    return Report("returned", payload=payload, time=time.monotonic())


def _exit_text(code: object) -> str:
    return f"called sys.exit({'' if code is None else repr(code)})"


def _report_exception(error: BaseException, job: Job) -> Report:
    # The first two frames are this file's: the reader's code starts below them.
    stack = error.__traceback__
    while stack is not None and stack.tb_frame.f_code.co_filename == __file__:
        stack = stack.tb_next
    lines = traceback.format_exception(type(error), error, stack or error.__traceback__)
    text = show_cells_as("".join(lines), job.cells).rstrip()
    line = "raised " + f"{type(error).__name__}: {error}".rstrip(": ").split("\n", 1)[0]
    # An OSError is about a connection of the function's own: torch's errors are RuntimeErrors.
    if VICTIM.search(str(error)) and not isinstance(error, OSError):
        # This rank only lost its connection, so report where it waited: the library's own text
        # names ports and sources, and differs from run to run.
        frames = [Frame(f.filename, f.lineno, f.name) for f in traceback.extract_tb(stack)]
        state = describe(frames[::-1], job.cells, job.home)
        line = state.text if state.waits else line  # else, it is said as the library says it
    return Report("raised", text, line, _pickle_exception(error), time.monotonic())


def _pickle_exception(error: BaseException) -> bytes:
    """The pickled exception; its parts if it cannot be unpickled as a whole; otherwise b""."""
    parts = type(error), error.args, error.__dict__
    for candidate in (error, parts):
        try:
            payload = cloudpickle.dumps(candidate)
            cloudpickle.loads(payload)  # one whose __init__ takes other arguments fails only here
        except Exception:
            continue
        return payload
    return b""


def rebuild_exception(payload: bytes) -> BaseException | None:
    """The exception that `_pickle_exception` sent; None if this process cannot rebuild it."""
    try:
        found = cloudpickle.loads(payload)
        if isinstance(found, BaseException):
            return found
        kind, args, attributes = found
        error = kind.__new__(kind, *args)  # not by __init__: its arguments are lost
        error.__dict__.update(attributes)
        return error
    except Exception:
        return None
