"""One run of a script, in a process forked from a server that has loaded torch.

`supervise` starts the ranks and waits for them and for the doctor's report. `_run_rank` does in
each of them what an interpreter does that is given the script.
"""

import atexit
import functools
import multiprocessing.process
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from ddp_doctor.certificate.starts import rank_variables
from labkit.launch.forks import start_forked, stop_forked
from labkit.launch.guard import has_children
from labkit.launch.nodes import reserved_port

FINGERPRINT = Path(__file__).resolve().parent / "fingerprint"
REPORT_WITHIN = 120.0  # seconds in which the report has to follow the end of the ranks
# Seconds that the others have once one has failed, which is when its exit code is there.
GRACE = 20.0


@dataclass(frozen=True)
class Job:
    """A script to run in `folder`, with the doctor's command line, or None without the doctor."""

    script: Path
    ranks: int
    launch: str
    doctor: tuple[str, ...] | None
    report: Path
    folder: Path
    timeout: float
    environment: dict[str, str]


def supervise(caller: Connection, job: Job) -> None:
    """Send the exit code of each rank, and how long they ran, once the last report is there."""
    for name in ("steps", "cwd"):
        (job.folder / name).mkdir(parents=True)
    with reserved_port() as port:
        started = time.monotonic()
        count = job.ranks if job.launch == "torchrun" else 1
        ranks = [_start(job, rank, port) for rank in range(count)]
        try:
            codes = _exit_codes(caller, ranks, started + job.timeout)
        finally:
            stop_forked(*ranks)
        seconds = time.monotonic() - started
    until = time.monotonic() + REPORT_WITHIN
    # The doctor's watcher outlives its rank; it ends after the last report.
    while job.doctor is not None and has_children() and time.monotonic() < until:
        time.sleep(0.02)
    caller.send((codes, seconds))


def _start(job: Job, rank: int, port: int) -> BaseProcess:
    environment = job.environment | {"FINGERPRINTS": str(job.folder / "steps")}
    if job.launch == "torchrun":
        environment |= rank_variables(rank, job.ranks, port)
    return start_forked(
        _run_rank,
        job,
        stdout=job.folder / f"out.{rank}",
        stderr=job.folder / f"err.{rank}",
        folder=job.folder / "cwd",
        environment=environment,
    )


def _exit_codes(
    caller: Connection, ranks: Sequence[BaseProcess], deadline: float
) -> list[int | None]:
    """Wait for all ranks. As torchrun does, end the others some time after one has failed."""
    failed_at = None
    while running := [process for process in ranks if process.exitcode is None]:
        now = time.monotonic()
        if now > deadline:
            stop_forked(*running)
        if failed_at is None and any(process.exitcode for process in ranks):
            failed_at = now
        if failed_at is not None and now - failed_at > GRACE:
            for process in running:
                os.killpg(process.pid or 0, signal.SIGTERM)
        if caller in wait([caller, *(process.sentinel for process in running)], timeout=0.1):
            caller.recv()  # it never sends: this raises EOFError
    return [process.exitcode for process in ranks]


def _run_rank(job: Job) -> None:
    """Run the script as an interpreter would, with its exit handlers; exit with its code."""
    import torch
    from doctor.harness.fingerprint.steps import watch

    import ddp_doctor.__main__ as program
    from ddp_doctor.run import script

    atexit._clear()  # what the fork server has registered
    multiprocessing.process._parent_process = None  # the script is no child of its interpreter
    sys.path.insert(0, "")  # for the script's folder
    torch.set_num_threads(1)
    watch(str(job.folder / "steps"))
    _keep_groups_until_the_end()
    code = 0
    try:
        if job.doctor is None:
            sys.argv = [str(job.script)]
            script.run_script(str(job.script), [])
        else:
            sys.argv = ["ddp_doctor", *job.doctor, str(job.script)]
            program.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    multiprocessing.util._exit_function()
    sys.exit(code)


def _keep_groups_until_the_end() -> None:
    """Make `destroy_process_group` leave the group's threads to the end of this process.

    If a DDP wrapper holds the last reference to a group, its destructor joins gloo's thread with
    the interpreter's lock held, and that thread may wait for the lock to drop its last collective
    (torch 2.13). On a busy machine, one run in some dozens would hang.
    """
    import torch.distributed as dist

    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_but_keep(group: dist.ProcessGroup | None = None) -> None:
        kept.append(group or dist.group.WORLD)
        destroy(group)

    kept: list[dist.ProcessGroup | None] = []
    dist.destroy_process_group = destroy_but_keep
