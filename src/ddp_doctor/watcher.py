"""A process of its own that waits for the ranks, merges their journals, and reports.

It survives what kills a rank, and it can report while ranks are stuck. It imports neither torch nor
anything of the user's, and joins no process group. The process that starts the watcher imports
this module, too, so the report and its rules are imported by functions.
"""

import atexit
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from ddp_doctor.journal import alive, read
from ddp_doctor.session import Options, Session

VERDICT = "verdict.json"
HANGS = {"hang_missing_rank", "mismatched_collectives"}
PATIENCE = 2.0  # seconds that the leader waits for the report at its end


def start_watcher(session: Session) -> None:
    """Start this run's watcher. The leader waits for it at exit, `PATIENCE` seconds at most."""
    (session.run / VERDICT).unlink(missing_ok=True)
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parent.parent)!r}); "
        "from ddp_doctor.watcher import main; main(sys.argv[1:])"
    )
    arguments = [str(session.run), json.dumps(asdict(session.options)), str(os.getpid())]
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
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.returncode = 0  # it goes on without us

    # Runs after the session's own exit handler, which is registered later.
    atexit.register(wait)


def main(arguments: list[str]) -> None:
    """Wait for the end of the run, then write and print the report."""
    run, options, leader = Path(arguments[0]), Options(**json.loads(arguments[1])), arguments[2]
    hung = _wait(run, options, int(leader))
    from ddp_doctor.report import report

    result = report(run, options, hung=hung)
    temporary = run / (VERDICT + ".new")
    try:
        temporary.write_text(json.dumps({"worst": result.worst}))
        temporary.replace(run / VERDICT)
    except OSError:
        pass  # a full disk: the exit code stays the script's own


def _wait(run: Path, options: Options, leader: int) -> bool:
    from ddp_doctor.report import merge, report

    reported_hang = False
    look_again = 0.0
    gone_since: float | None = None
    while True:
        time.sleep(0.15)
        pages = read(run)
        states = []
        for page in pages:
            pid = int(page.name.rsplit("-", 1)[1])
            here = page.name.rsplit("-", 1)[0] == os.uname().nodename
            ended = page.now is not None and page.now.ended
            states.append((page, ended, alive(pid) if here else not ended))
        running = [page for page, ended, living in states if living and not ended]
        leading = alive(leader)
        known_ended = any(page.name.endswith(f"-{leader}") and ended for page, ended, _ in states)
        if not running and (not leading or known_ended):
            gone_since = gone_since or time.monotonic()
            world = max(
                (f.get("world", 1) for p in pages for f in p.facts if f["kind"] == "group"),
                default=1,
            )
            all_there = sum(ended for _, ended, _ in states) >= world
            if all_there or time.monotonic() - gone_since > 1.0:
                return reported_hang
        else:
            gone_since = None
        if running and not reported_hang and options.hang_after > 0:
            now = time.time()
            waited = all(page.now and now - page.now.since > options.hang_after for page in running)
            if waited and now >= look_again:
                look_again = now + options.hang_after / 2
                # Slow is not stuck: ranks that import or load data wait for nobody.
                if {each.code for each in merge(run, hung=True).findings} & HANGS:
                    reported_hang = True
                    report(run, options, hung=True)
