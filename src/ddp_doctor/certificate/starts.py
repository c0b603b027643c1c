"""One start of a script for a certificate: its processes, their environments, how they failed."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ddp_doctor.certificate import forks
from ddp_doctor.certificate.guard import ENDED, VARIABLE, end_session, guard, temporary_folder
from ddp_doctor.certificate.plan import STARTS_RANKS, Part
from ddp_doctor.facts.places import is_users
from ddp_doctor.options import say
from ddp_doctor.run.folders import SITE

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
LIMIT = 600.0  # seconds for one start of the script
AFTER_FAILURE = 5.0  # seconds for the other ranks, once one has failed
AFTER_PLAN = 1.0  # seconds for what has started the ranks, once they have left
WORD = 20.0  # seconds after which a start says what it waits for, and again
ERROR = re.compile(
    r"(The doctor failed: )?[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b"
)  # a traceback's last line
FOLLOWS = re.compile(r"\b(ChildFailedError|ProcessRaisedException)\b|closed by peer|reset by peer")
_HOLDERS: list[socket.socket] = []  # each keeps its port while it is open


class OwnRanksError(ValueError):
    """The script starts its own ranks, and was started as ranks."""


Child = subprocess.Popen[bytes] | forks.Fork


class Start:
    """One start of the script, as one process or as ranks; output goes to files."""

    def __init__(
        self, part: Part, command: Sequence[str], environments: list[dict[str, str]]
    ) -> None:
        self.part = part
        self.output = part.path("output")
        self.output.mkdir(parents=True, exist_ok=True)
        self.processes: list[Child] = []
        for at, environment in enumerate(environments):
            output = self.output / f"{at}.txt"
            self.processes.append(self.process(command, self.environment(environment), output))

    def process(self, command: Sequence[str], environment: dict[str, str], output: Path) -> Child:
        """Start one process: a fork of this one, where that is possible."""
        if forks.can_fork():
            return forks.Fork(command, output, environment)
        with open(output, "wb") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "ddp_doctor.certificate.child", *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
                pass_fds=(guard().writes,),
            )

    def environment(self, launcher: dict[str, str]) -> dict[str, str]:
        """This process's environment with what is needed; an empty value removes a variable."""
        variables = os.environ | launcher | self.part.environment() | doctor_paths()
        variables |= temporary_folder(Path(self.part.folder)) | {VARIABLE: str(guard().writes)}
        return {name: value for name, value in variables.items() if value != ""}

    def wait(self) -> str:
        """Wait for all; once one fails, five seconds more. Returns how the first one failed.

        Once all ranks have left, what they were started by is not waited for.
        """
        try:
            failed, done = self._watch()
            running = [at for at, process in enumerate(self.processes) if process.poll() is None]
            where = self._places(running) if failed is None and running and not done else ""
        finally:
            for process in self.processes:
                end_session(process.pid)
                process.wait()
                guard().tell(ENDED, process.pid)
        if failed is None and not done:  # what ran on has been killed here
            ended = [at for at in range(len(self.processes)) if at not in running]
            failed = next((at for at in ended if self.processes[at].returncode), None)
        if failed is not None:
            code = self.processes[failed].returncode or 0
            signal_ = f" (it was ended by {signal.Signals(-code).name})" if code < 0 else ""
            return error_in(self._output(failed)) + signal_
        return f"it did not end within {LIMIT:g} s{where}" if running and not done else ""

    def _watch(self) -> tuple[int | None, bool]:
        """The first process that failed, and whether the ranks did all that is wanted of them."""
        began = time.monotonic()
        deadline, report = began + LIMIT, began + WORD
        failed, done = None, False
        while any(process.poll() is None for process in self.processes):
            codes = [process.poll() for process in self.processes]
            now = time.monotonic()
            if self.part.path(STARTS_RANKS).exists():
                raise OwnRanksError("the script starts its own ranks: leave out --ranks, torchrun.")
            if not done and self.part.is_done():
                done, deadline = True, min(deadline, now + AFTER_PLAN)
            if failed is None and not done and any(codes):
                deadline = min(deadline, now + AFTER_FAILURE)
                if self.part.departures():  # a rank that was behind, as under Join, has lost it
                    done = True
                else:
                    failed = next(at for at, code in enumerate(codes) if code)
            if now > deadline:
                break
            if now > report:
                report += WORD
                running = [at for at, code in enumerate(codes) if code is None]
                name = "one process of the script" if self.part.is_one else "the script's ranks"
                say(f"waiting for {name}, {now - began:.0f} s so far{self._places(running)}.")
            time.sleep(0.02)
        return failed, done or bool(failed is None and self.part.departures())

    def _output(self, at: int) -> str:
        return (self.output / f"{at}.txt").read_text(errors="replace")

    def _places(self, running: Sequence[int]) -> str:
        """Where processes are that have not ended: each writes its frames at this signal."""
        running = [at for at in running if self.part.can_be_asked(self.processes[at].pid).exists()]
        for at in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[at].pid, signal.SIGUSR1)
        time.sleep(0.5)
        stacks = {at: self._output(at).rpartition("most recent call first")[2] for at in running}
        places = [f"process {at} is at {line}" for at in running for line in frames(stacks[at])[:1]]
        return f": {', '.join(places[:4])}" if places else ""


def doctor_paths() -> dict[str, str]:
    """The variable with which Python processes, and all that they start, begin with the doctor."""
    paths = [str(SITE), str(SITE.parents[1]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def error_in(output: str) -> str:
    """The last error in a process's output, and the script's innermost line below which it rose."""
    # torch puts the rank before each line of a traceback.
    lines = re.sub(r"^\[rank\d+\]: ?|\x1b\[[\d;]*m", "", output, flags=re.M).strip().splitlines()
    errors = [n for n, line in enumerate(lines) if ERROR.match(line)]
    # Not what a launcher, or a rank that has lost another one, makes of the script's own error.
    errors = [n for n in errors if not FOLLOWS.search(lines[n])] or errors
    if not errors:
        return (lines or ["no message"])[-1][:300].rstrip(".")
    places = frames("\n".join(lines[: errors[-1]]))
    text = lines[errors[-1]][:300].rstrip(". ") + (f" at {places[-1]}" if places else "")
    return text + ("; set TMPDIR to a shorter folder" if "AF_UNIX path too long" in text else "")


def frames(output: str) -> list[str]:
    """The script's own lines in tracebacks, in their order."""
    places = re.findall(r'^\s+File "(.+)", line (\d+)', output, re.M)
    return [f"{os.path.basename(file)}:{line}" for file, line in places if is_users(file)]


def rank_variables(rank: int, world: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives to a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "certificate",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "",
    }


def launch(world: int) -> list[dict[str, str]]:
    """The environment of each rank of one launch, with a port that nobody else gets meanwhile."""
    port = _reserve_port()
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if world > 1 else {}
    return [rank_variables(rank, world, port) | threads for rank in range(world)]


def _reserve_port() -> int:
    """A port that the system gives to no other process until this one ends.

    Its socket is bound and does not listen, so torch's store, which sets SO_REUSEADDR, can (Linux).
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _HOLDERS.append(holder)
    return int(holder.getsockname()[1])
