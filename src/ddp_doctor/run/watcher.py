"""A process of its own that waits for the ranks, merges their journals, and reports.

It survives what kills a rank, and it can report while ranks are stuck. It imports neither torch nor
anything of the user's, and joins no process group. The process that starts the watcher imports
this module, too, so the report and its rules are imported by functions.
"""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from ddp_doctor.explain.findings import HANGS
from ddp_doctor.facts.journal import (
    Journal,
    ProcessJournal,
    Status,
    alive,
    read_statuses,
    remove_old,
    world_size,
    write_whole,
)
from ddp_doctor.observe.session import Session
from ddp_doctor.options import Options, say

VERDICT = "verdict.json"
# Seconds that the leader waits for the report at its end. Others may wait for the end of a rank,
# but not for that of a process that starts ranks, or is alone.
PATIENCE, PATIENCE_ALONE = 2.0, 60.0
# A process that is killed never writes that it has ended; on another host, its host cannot be
# checked from here. It counts as gone once it has written nothing for so many seconds, and all that
# is here has ended. Longer than a shared disk delays a write.
GONE_AFTER = 120.0


def start_watcher(session: Session) -> None:
    """Start this run's watcher. At its exit, the leader waits for the report."""
    (session.run_folder / VERDICT).unlink(missing_ok=True)
    remove_old(session.run_folder)
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r}); "
        "from ddp_doctor.run.watcher import main; main(sys.argv[1:])"
    )
    arguments = [str(session.run_folder), json.dumps(asdict(session.options)), str(os.getpid())]
    environment = {k: v for k, v in os.environ.items() if k not in ("DDP_DOCTOR_RUN", "PYTHONPATH")}
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=sys.__stderr__ or subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )
    leader = os.getpid()

    def wait() -> None:
        if os.getpid() == leader:
            if session.journal is None and not session.over:  # it was no rank, and has ended, too
                Journal(session.run_folder).set_status("ended", ended=True)
            try:
                process.wait(PATIENCE if "RANK" in os.environ else PATIENCE_ALONE)
            except subprocess.TimeoutExpired:
                process.returncode = 0  # it goes on without us

    # Runs after the session's own exit handler, which is registered later.
    atexit.register(wait)


def main(arguments: list[str]) -> None:
    """Wait for the end of the run, then write and print the report."""
    run, options, leader = Path(arguments[0]), Options(**json.loads(arguments[1])), arguments[2]
    waited = _wait(run, options, int(leader))
    from ddp_doctor.report.report import report

    result = report(run, options, waited=waited)
    with contextlib.suppress(OSError):  # a full disk: `--fail-on` says that there is no report
        write_whole(run / VERDICT, json.dumps(result.verdict()))


Seen = dict[str, tuple[Status | None, float]]  # by process: its status, and since when it is this


def _silence(seen: Seen, journals: list[ProcessJournal]) -> dict[str, float]:
    """For how many seconds each process has written nothing, by the clock of this process."""
    now = time.monotonic()
    for journal in journals:
        if journal.name not in seen or seen[journal.name][0] != journal.status:
            seen[journal.name] = journal.status, now
    return {journal.name: now - seen[journal.name][1] for journal in journals}


def _wait(run: Path, options: Options, leader: int) -> bool:
    """Wait until all processes have ended. Returns whether ranks seemed stuck meanwhile."""
    from ddp_doctor.report.report import make_report, report

    seemed_stuck = said = False
    look_again = 0.0
    gone_since: float | None = None
    world = 1
    seen: Seen = {}
    while True:
        time.sleep(0.15)
        journals = read_statuses(run)
        silent = _silence(seen, journals)
        running = [
            journal
            for journal in journals
            if not journal.ended and (not journal.here or alive(journal.pid))
        ]
        leader_ended = any(
            journal.here and journal.pid == leader and journal.ended for journal in journals
        )
        if (leader_ended or not alive(leader)) and not any(journal.here for journal in running):
            if gone_since is None:
                gone_since, world = time.monotonic(), world_size(run)
            waiting = [journal for journal in running if silent[journal.name] < GONE_AFTER]
            waited = time.monotonic() - gone_since
            all_there = sum(journal.ended for journal in journals) >= world
            if not waiting and (all_there or waited > 1.0):
                return seemed_stuck
            if waiting and waited > 5.0 and not said:
                said = True
                say(
                    f"Processes on other hosts that have not ended: {len(waiting)}. The report "
                    f"follows at most {GONE_AFTER:g} s after their last activity."
                )
        else:
            gone_since = None
        if running and not seemed_stuck and options.hang_after > 0:
            now = time.time()
            stuck = all(
                journal.status and now - journal.status.since > options.hang_after
                for journal in running
            )
            if stuck and now >= look_again:
                look_again = now + options.hang_after / 2
                # Slow is not stuck: ranks that import or load data wait for nobody.
                if {finding.code for finding in make_report(run, live=True).findings} & HANGS:
                    seemed_stuck = True
                    report(run, options, live=True)
