"""Start the doctor in this process: `start` for a launched or spawned one, `watch` for a script.

Of all modules only this one knows every part: session, observers, watcher, report. The observers
import torch and the report imports all rules, so functions import them when they need them.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_doctor.facts.types import CpuFact
from ddp_doctor.observe.session import Session
from ddp_doctor.options import Options, say
from ddp_doctor.run.folders import SITE, own_folder
from ddp_doctor.run.watcher import start_watcher

RUN = "DDP_DOCTOR_RUN"  # the run's folder, for the processes that a process starts
OPTIONS = "DDP_DOCTOR_OPTIONS"


_sessions: dict[int, Session] = {}  # by process: a forked one has its parent's, too


def start(options: Options | None = None, leader: bool | None = None) -> Session | None:
    """Begin to observe this process. Idempotent. None if no folder can be written.

    The leader starts the watcher, which merges and reports: rank 0 under a launcher, or the
    process that starts the ranks.
    """
    if os.getpid() in _sessions:
        return _sessions[os.getpid()]
    given = os.environ.get(OPTIONS)
    if options is None:
        options = Options(**json.loads(given)) if given else Options()
    inherited = os.environ.get(RUN)
    if inherited:
        run: Path | None = Path(inherited)
        lead = bool(leader)
    else:
        run = _run_folder(options)
        lead = leader if leader is not None else int(os.environ.get("RANK", "0") or 0) == 0
    if run is None:
        return None
    os.environ[RUN] = str(run)
    os.environ[OPTIONS] = json.dumps(asdict(options))
    _reach_children()
    try:
        session = Session(options, run)
        if options.cpu:
            from ddp_doctor.run import on_cpu

            on_cpu.install(lambda name: session.write("cpu", **CpuFact(name=name)))
        from ddp_doctor.observe.install import install

        session.patches = install(session)
    except Exception as error:
        say(f"could not start ({type(error).__name__}: {error}). Your run goes on without it.")
        return None
    _sessions[os.getpid()] = session
    if lead:
        session.leads = True
        start_watcher(session)
    return session


def watch(**options: Any) -> Session | None:
    """Observe this script. Call it on its first line, before it imports torch's functions by name.

    Keywords are the command line's options: `folder`, `json`, `first`, `every`, `hang_after`.
    Raises ValueError if `first` or `every` is less than 1, or `hang_after` is negative.
    The report is printed when the script ends; in a notebook, below the cell that trains.
    """
    chosen = Options(**options) if options else None
    shell = _notebook()
    if shell is None:
        return start(chosen)
    session = start(chosen, leader=False)
    if session is not None:
        shell.events.register("post_run_cell", _AfterCell(session, shell))
    return session


def _notebook() -> Any:
    """The running IPython shell, or None in a script. IPython is never imported here."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


class _AfterCell:
    """Reports below the first cell in which this process, or one that it started, trained."""

    def __init__(self, session: Session, shell: Any) -> None:
        self.session = session
        self.shell = shell

    def __call__(self, result: Any) -> None:
        session = self.session
        if not any(session.run_folder.glob("*.jsonl")):
            return
        from ddp_doctor.report.report import report

        self.shell.events.unregister("post_run_cell", self)
        session.close(result.error_in_exec)
        session.over = True
        if session.patches is not None:
            session.patches.undo()
        _sessions.clear()
        for name in (RUN, OPTIONS):
            os.environ.pop(name, None)
        report(session.run_folder, session.options)


def _run_folder(options: Options) -> Path | None:
    """A folder for this run's journals, on which all ranks of a host or a shared disk agree."""
    env = os.environ
    parts = [env.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")]
    parts.append(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if "RANK" not in env:
        parts = ["alone", str(os.getpid()), str(time.time_ns() // 1000)]
    elif env.get("LOCAL_WORLD_SIZE", env.get("WORLD_SIZE")) == env.get("WORLD_SIZE"):
        parts.append(str(os.getppid()))
    name = "-".join("".join(c if c.isalnum() else "." for c in part) for part in parts if part)
    run = Path(options.folder).absolute() / "journals" / name
    try:
        run.parent.mkdir(parents=True, exist_ok=True)
        own_folder(run)
        probe = run / f".probe-{os.getpid()}"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        say(f"nothing is observed: {error}. Pass another --folder; your run goes on.")
        return None
    return run


def _reach_children() -> None:
    """Let the Python processes that this one starts be observed as well (spawned ranks)."""
    site = str(SITE)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if site not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([site, *paths])
