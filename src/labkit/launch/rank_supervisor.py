"""The process between the caller and its ranks: it starts, watches, and ends them.

Each call of `run_ranks` has one supervisor. It is forked from the fork server, which has loaded
torch and never runs a thread, so starting a rank costs one fork and no import of torch.

1. Leave the caller's session, adopt orphans (`labkit.launch.guard`), and import the project's
   modules that the function names.
2. Fork one process per rank.
3. Collect reports until every rank has reported, one has failed, the time is up, or the caller has
   ended.
4. After a failure or a timeout, ask the ranks that still run for their stacks.
5. If all returned, let them exit. Kill those that remain, and everything that they started.
6. Send the caller the reports and the ranks' output.
"""

import contextlib
import importlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from labkit.launch.guard import adopt_orphans, kill_descendants, own_session
from labkit.launch.rank_process import JOINED, Job, Report, run_rank
from labkit.launch.rank_states import RankState, describe, read_stack, show_cells_as

# After a failure the other ranks get this long to arrive at where they will be stuck, so that the
# report says the same at every run; it ends early once none of them moves any more.
_SETTLE = 2.0
_LOOK_EVERY = 0.1
# On a busy machine, a rank waits for a core before it can write its stack.
_ANSWER_WITHIN = 1.0
_LEAVE_WITHIN = 5.0
# Seconds that ranks may take to join, even if the time for the function is shorter: on a busy
# machine, joining takes longer than the function.
JOIN_WITHIN = 30.0
_SHOWN = 200_000  # bytes of output per rank; the rest is counted, not shown


class Outcome(NamedTuple):
    """What the caller receives: one report per rank, and the (stdout, stderr) of each rank."""

    reports: list[Report]
    outputs: list[tuple[str, str]]
    all_joined: bool  # whether all ranks joined the process group


def supervise(caller: Connection, job: Job) -> None:
    """Run `job` and send its Outcome to `caller`. When it returns, no process is left below it."""
    own_session()
    adopt_orphans()
    if hasattr(signal, "SIGUSR1"):
        # It asks a rank for its stack. A rank that cannot answer yet must not be ended by it.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if job.start_method == "fork":
        _import(job.modules)
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    try:
        ranks = _Ranks(job, folder)
        try:
            ranks.start()
            if ranks.watch(caller):
                ranks.release()
            else:
                ranks.look_at_the_unfinished()
        finally:
            ranks.stop()
        outputs = [
            tuple(
                show_cells_as(_read_output(folder / f"{stream}-{r}"), job.cells)
                for stream in ("stdout", "stderr")
            )
            for r in range(job.world_size)
        ]
        reports = [ranks.reports[r] for r in range(job.world_size)]
        with contextlib.suppress(BrokenPipeError):
            caller.send(Outcome(reports, outputs, ranks.all_joined))
    except _CallerGoneError:
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _import(modules: Sequence[str]) -> None:
    """Import them here, once: the ranks are forks of this process."""
    for name in modules:
        with contextlib.suppress(Exception):  # raised again in the rank that needs it, and reported
            importlib.import_module(name)


class _CallerGoneError(Exception):
    pass


class _Ranks:
    """The running ranks of one job, and their reports so far."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.folder = folder
        self.reports: dict[int, Report] = {}
        self.joined: set[int] = set()
        self.pipes: dict[int, Connection] = {}
        self.processes: dict[int, BaseProcess] = {}

    def start(self) -> None:
        """Start every rank. Raises OSError if the system has no more processes or files."""
        context = multiprocessing.get_context(self.job.start_method)
        for rank in range(self.job.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_rank, args=(rank, self.job, self.folder, theirs))
            process.start()
            theirs.close()
            self.pipes[rank] = ours
            self.processes[rank] = process

    @property
    def all_joined(self) -> bool:
        return len(self.joined) == self.job.world_size

    @property
    def unfinished(self) -> list[int]:
        return [r for r in range(self.job.world_size) if r not in self.reports]

    def watch(self, caller: Connection) -> bool:
        """Collect reports. True if every rank returned; False after a failure or a timeout."""
        deadline = time.monotonic() + max(self.job.timeout, JOIN_WITHIN)
        counts = False  # whether the function's own time has begun
        while self.unfinished:
            if not counts and self.all_joined:
                counts, deadline = True, time.monotonic() + self.job.timeout
            self._collect(caller, deadline)
            failed = any(report.status != "returned" for report in self.reports.values())
            if failed:
                self._settle(caller, min(deadline, time.monotonic() + _SETTLE))
                return False
            if time.monotonic() >= deadline:
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
            try:
                message = pipe.recv()
                if message == JOINED:
                    self.joined.add(rank_of[pipe])
                else:
                    self.reports[rank_of[pipe]] = message
            except (EOFError, ConnectionResetError):
                self.reports[rank_of[pipe]] = self._report_death(rank_of[pipe])
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
            name = _signal_name(-code)
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

    def _look(self) -> list[RankState]:
        """Ask every unfinished rank for its stack, and read it."""
        before = sizes = self._sizes_of_stacks()
        for rank in self.unfinished:
            if hasattr(signal, "SIGUSR1") and self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        # Wait until every rank has answered and none is still writing, but not longer: some may
        # be unable to.
        deadline = time.monotonic() + _ANSWER_WITHIN
        answered = not hasattr(signal, "SIGUSR1")
        while not answered and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY / 4)
            earlier, sizes = sizes, self._sizes_of_stacks()
            grown = (new > old for new, old in zip(sizes, before, strict=True))
            answered = sizes == earlier and all(grown)
        return [self._state(rank) for rank in self.unfinished]

    def _sizes_of_stacks(self) -> list[int]:
        files = [self.folder / f"stack-{rank}" for rank in self.unfinished]
        return [file.stat().st_size if file.exists() else 0 for file in files]

    def _state(self, rank: int) -> RankState:
        try:
            head, dump = (self.folder / f"stack-{rank}").read_text().split("\n", 1)
        except (FileNotFoundError, ValueError):
            return RankState("had not started", waits=False)
        if not hasattr(signal, "SIGUSR1"):
            return RankState("had not finished (where it stands cannot be read here)", waits=False)
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
        for pipe in self.pipes.values():
            with contextlib.suppress(OSError):  # a rank that ended after its report
                pipe.send("go")
        deadline = time.monotonic() + _LEAVE_WITHIN
        for process in self.processes.values():
            process.join(max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
        for process in self.processes.values():
            process.join()
        kill_descendants()


def _signal_name(number: int) -> str:
    """SIGKILL for 9; "signal 40" for a number without a name, as most real-time signals are."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read_output(file: Path) -> str:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            text = stream.read(_SHOWN).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    if size > _SHOWN:
        text += f"\n… {size - _SHOWN:,} more bytes, not shown\n"
    return text
