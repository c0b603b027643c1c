"""The processes of `labkit.launch.ranks`: a supervisor between the caller and its ranks, and ranks.

1. The supervisor, forked from a server that has loaded torch and never runs a thread
   (`labkit.launch.forks`), imports the project's modules that the function names, and forks the
   ranks.
2. Each rank joins a process group over the loopback interface, calls the function, and sends its
   result or its error to the supervisor. The store is a file, so nothing listens for it.
3. The supervisor collects reports until every rank has reported, one has failed, the time is up,
   the caller is gone, or all wait and none moves. After a failure or a timeout it asks the ranks
   that still run for their stacks (`labkit.launch.rank_states`).
4. If all returned, it lets them exit: a rank that left earlier would close its connections to a
   slower one. Then it ends what remains, and sends the caller the reports and the ranks' output.
"""

import contextlib
import faulthandler
import importlib
import inspect
import linecache
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist

from labkit.launch.forks import fresh_randomness, start_forked, stop_forked
from labkit.launch.rank_states import (
    Frame,
    RankState,
    Stillness,
    describe,
    read_stack,
    show_cells_as,
)

INJECTED = ("rank", "world_size", "device")
# A rank raises one of these when another rank has failed: it is not the cause.
SECONDARY_ERROR = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Connection refused|Read error"
)
# Seconds that ranks may take to join, even if the time for the function is shorter: on a busy
# machine, joining takes longer than the function.
JOIN_WITHIN = 30.0

_JOINED = "joined"  # sent to the supervisor before the report: the rank can communicate
# After a failure the other ranks get this long to arrive at where they will be stuck, so that the
# report says the same at every run; it ends early once none of them moves any more.
_SETTLE = 5.0
_LOOK_EVERY = 0.1
# On a busy machine, a rank waits for a core before it can write its stack.
_ANSWER_WITHIN = 5.0
_LEAVE_WITHIN = 5.0
_SHOWN = 200_000  # bytes of output per rank; the rest is counted, not shown


class Job(NamedTuple):
    """One call of run_ranks, as it is sent to the supervisor and to every rank."""

    payload: bytes  # cloudpickle of (fn, args)
    home: str  # the file that fn was written in
    devices: tuple[str, ...]  # one per rank
    backend: str
    timeout: float  # seconds
    environment: dict[str, str]
    cells: dict[str, str]  # text of the files that exist only in the caller's kernel
    modules: tuple[str, ...] = ()  # what the supervisor imports, so that not each rank does
    stuck_after: float | None = None  # seconds

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


class Outcome(NamedTuple):
    """What the caller receives: one report per rank, and the (stdout, stderr) of each rank."""

    reports: list[Report]
    outputs: list[tuple[str, str]]
    all_joined: bool  # whether all ranks joined the process group


class _CallerGoneError(Exception):
    pass


def supervise(caller: Connection, job: Job) -> None:
    """Run `job` and send its Outcome to `caller`. When it returns, no rank is left."""
    # SIGUSR1 asks a rank for its stack. Before the rank has its handler, it would kill the rank.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for name in job.modules:
        with contextlib.suppress(Exception):  # raised again in the rank that needs it, and reported
            importlib.import_module(name)
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    ranks = _Ranks(job, folder)
    try:
        try:
            ranks.start()
            if ranks.watch(caller):
                ranks.release()
            else:
                ranks.look_at_the_unfinished()
        finally:
            stop_forked(*ranks.processes)
        reports = [ranks.reports[rank] for rank in range(job.world_size)]
        with contextlib.suppress(BrokenPipeError):
            caller.send(Outcome(reports, ranks.outputs(), ranks.all_joined))
    except _CallerGoneError:
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Ranks:
    """The running ranks of one job, and their reports so far."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.folder = folder
        self.reports: dict[int, Report] = {}
        self.joined: set[int] = set()
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []

    def start(self) -> None:
        """Start every rank. Raises OSError if the system has no more processes or files."""
        for rank in range(self.job.world_size):
            ours, theirs = multiprocessing.Pipe()
            process = start_forked(
                run_rank,
                *(rank, self.job, self.folder, theirs),
                stdout=self.folder / f"stdout-{rank}",
                stderr=self.folder / f"stderr-{rank}",
                environment=self.job.environment,
            )
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    @property
    def all_joined(self) -> bool:
        return len(self.joined) == self.job.world_size

    @property
    def unfinished(self) -> list[int]:
        return [r for r in range(self.job.world_size) if r not in self.reports]

    def watch(self, caller: Connection) -> bool:
        """Collect reports. True if every rank returned; False after a failure, after a timeout, or
        if the ranks are stuck.
        """
        deadline = time.monotonic() + max(self.job.timeout, JOIN_WITHIN)
        counts = False  # whether the function's own time has begun
        stillness = Stillness([process.pid for process in self.processes])
        while self.unfinished:
            if not counts and self.all_joined:
                counts, deadline = True, time.monotonic() + self.job.timeout
            self._collect(caller, deadline)
            failed = any(report.status != "returned" for report in self.reports.values())
            if failed:
                self._settle(caller, min(deadline, time.monotonic() + _SETTLE))
                return False
            still = counts and self.job.stuck_after and stillness.seconds() >= self.job.stuck_after
            if (still and self._all_wait()) or time.monotonic() >= deadline:
                return False
        return all(report.status == "returned" for report in self.reports.values())

    def _collect(self, caller: Connection, deadline: float) -> None:
        """Receive the reports that arrive within a moment, at the latest until `deadline`."""
        rank_of = {self.pipes[rank]: rank for rank in self.unfinished}
        left = max(0.0, deadline - time.monotonic())
        ready = wait([caller, *rank_of], timeout=min(left, _LOOK_EVERY))
        if caller in ready:
            # The caller never sends: its end was closed, by KeyboardInterrupt or by its death.
            raise _CallerGoneError
        for pipe in ready:
            rank = rank_of[pipe]
            try:
                message = pipe.recv()
            except (EOFError, ConnectionResetError):
                message = self._report_death(rank)
            if message == _JOINED:
                self.joined.add(rank)
            else:
                self.reports[rank] = message
        for rank in self.unfinished:
            # A child that a dead rank left behind may still hold the rank's end of the pipe open.
            if self.processes[rank].exitcode is not None and not self.pipes[rank].poll():
                self.reports[rank] = self._report_death(rank)

    def _report_death(self, rank: int) -> Report:
        now = time.monotonic()
        process = self.processes[rank]
        process.join(_LEAVE_WITHIN)
        code = process.exitcode
        if code is None:
            text = "closed its connection to the supervisor without a result"
        elif code < 0:
            numbers = {number.value: number.name for number in signal.Signals}
            name = numbers.get(-code, f"signal {-code}")  # most real-time signals have no name
            hint = " (often: the system ran out of memory)" if name == "SIGKILL" else ""
            text = f"was killed by {name}{hint}"
        else:
            text = f"ended without a result, with exit code {code} (os._exit?)"
        return Report("died", text, time=now)

    def _settle(self, caller: Connection, deadline: float) -> None:
        """Wait until every other rank has reported or no longer moves."""
        before: list[RankState] | None = None
        while self.unfinished and time.monotonic() < deadline:
            self._collect(caller, min(deadline, time.monotonic() + _LOOK_EVERY))
            now = self._look()
            if now == before and all(state.waits for state in now):
                return
            before = now
        # A rank that was ending while the others were asked is what they failed of.
        self._collect(caller, time.monotonic() + _LOOK_EVERY)

    def _all_wait(self) -> bool:
        """Whether every unfinished rank waits for others, at the same place in two looks.

        A GPU computes without a thread that runs.
        """
        on_cpu = all(device == "cpu" for device in self.job.devices)
        before, now = (self._look() for _ in range(2)) if on_cpu else ([], [])
        return bool(now) and now == before and all(state.waits for state in now)

    def _look(self) -> list[RankState]:
        """Ask every unfinished rank for its stack, and read it."""
        before = sizes = self._sizes_of_stacks()
        asked = [self.processes[rank] for rank in self.unfinished]
        for process in asked:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        # Wait until every rank has answered or ended and none is still writing, but not longer:
        # some may be unable to.
        deadline = time.monotonic() + _ANSWER_WITHIN
        answered = False
        while not answered and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY / 4)
            earlier, sizes = sizes, self._sizes_of_stacks()
            looks = zip(asked, before, sizes, strict=True)
            done = (new > old or not process.is_alive() for process, old, new in looks)
            answered = sizes == earlier and all(done)
        return [self._state(rank) for rank in self.unfinished]

    def _sizes_of_stacks(self) -> list[int]:
        files = [self.folder / f"stack-{rank}" for rank in self.unfinished]
        return [file.stat().st_size if file.exists() else 0 for file in files]

    def _state(self, rank: int) -> RankState:
        try:
            head, dump = (self.folder / f"stack-{rank}").read_text().split("\n", 1)
        except (FileNotFoundError, ValueError):
            return RankState("had not started", waits=False)
        if not dump:
            return RankState(
                "does not answer: it is starting, is stopped, or has taken SIGUSR1", waits=False
            )
        return describe(read_stack(dump, int(head)), self.job.cells, self.job.home)

    def look_at_the_unfinished(self) -> None:
        for rank, state in zip(self.unfinished, self._look(), strict=True):
            self.reports[rank] = Report("unfinished", state.text, waits=state.waits)

    def release(self) -> None:
        """All ranks have reported: let them end on their own, for a bounded time."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # a rank that ended after its report
                pipe.send("go")
        deadline = time.monotonic() + _LEAVE_WITHIN
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))

    def outputs(self) -> list[tuple[str, str]]:
        """What each rank wrote to stdout and stderr. No rank may run any more."""

        def read(name: str) -> str:
            return show_cells_as(_read_output(self.folder / name), self.job.cells)

        ranks = range(self.job.world_size)
        return [(read(f"stdout-{rank}"), read(f"stderr-{rank}")) for rank in ranks]


def _read_output(file: Path) -> str:
    if not file.exists():
        return ""
    with file.open("rb") as stream:
        text = stream.read(_SHOWN).decode("utf-8", errors="replace")
    more = file.stat().st_size - _SHOWN
    return f"{text}\n… {more:,} more bytes, not shown\n" if more > 0 else text


def run_rank(rank: int, job: Job, folder: Path, supervisor: Connection) -> None:
    """Be rank `rank`: report once through `supervisor`, then wait for its answer."""
    stacks = (folder / f"stack-{rank}").open("w")
    stacks.write(f"{threading.main_thread().ident}\n")
    stacks.flush()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    try:
        report = _call(rank, job, folder, supervisor)
    except SystemExit as leave:
        code = "" if leave.code is None else repr(leave.code)
        report = Report("exited", f"called sys.exit({code})", time=time.monotonic())
    except BaseException as error:
        report = _report_exception(error, job)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the function may have closed it
            stream.flush()
    supervisor.send(report)
    supervisor.recv()


def _call(rank: int, job: Job, folder: Path, supervisor: Connection) -> Report:
    # torch read TORCH_DISTRIBUTED_DEBUG when it was loaded: in the fork server, before this call.
    dist.set_debug_level_from_env()
    for file, text in job.cells.items():
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    fresh_randomness()
    torch.set_num_threads(1)
    device = torch.device(job.devices[rank])
    if device.type == "cuda":  # has not been run on a GPU yet
        torch.cuda.set_device(device)
    dist.init_process_group(
        job.backend,
        # A file as a store listens nowhere; as a file:// address its path could not hold a space.
        store=dist.FileStore(str(folder / "store"), job.world_size),
        rank=rank,
        world_size=job.world_size,
        # The timeout of run_ranks comes first, and its report says more.
        timeout=timedelta(seconds=job.timeout + 60),
    )
    # Connected here does not mean connected everywhere: a function that destroys its group at once
    # would break up the connecting of a slower rank.
    dist.all_reduce(torch.zeros(1))
    supervisor.send(_JOINED)
    fn, args = cloudpickle.loads(job.payload)
    handed = dict(zip(INJECTED, (rank, job.world_size, device), strict=True))
    bound = bind(fn, args, handed)
    result = fn(*bound.args, **bound.kwargs)
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


def bind(
    fn: Callable[..., Any], args: Sequence[Any], handed: Mapping[str, Any]
) -> inspect.BoundArguments:
    """The arguments for `fn`: `handed` by parameter name, and `args` in order for all other
    parameters.

    Raises TypeError, with the parameter's name, if the two do not match the signature.
    """
    try:
        signature = inspect.signature(fn)
    except ValueError:
        raise TypeError("its parameters cannot be read; wrap it in a function of yours") from None
    parameters = signature.parameters
    others = [parameter for name, parameter in parameters.items() if name not in handed]
    bound = signature.replace(parameters=others).bind(*args)
    bound.apply_defaults()
    values = {**bound.arguments, **handed}
    return inspect.BoundArguments(signature, {name: values[name] for name in parameters})


def _report_exception(error: BaseException, job: Job) -> Report:
    # The first two frames are this file's: the reader's code starts below them.
    stack = error.__traceback__
    while stack is not None and stack.tb_frame.f_code.co_filename == __file__:
        stack = stack.tb_next
    lines = traceback.format_exception(type(error), error, stack or error.__traceback__)
    text = show_cells_as("".join(lines), job.cells).rstrip()
    line = "raised " + f"{type(error).__name__}: {error}".rstrip(": ").split("\n", 1)[0]
    # An OSError is about a connection of the function's own: torch's errors are RuntimeErrors.
    if SECONDARY_ERROR.search(str(error)) and not isinstance(error, OSError):
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
