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

from ddp_doctor.certificate.plan import Part
from ddp_doctor.facts.places import is_users
from ddp_doctor.run.folders import SITE

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
LIMIT = 600.0  # seconds for one start of the script
_RESERVED: list[socket.socket] = []  # an open one keeps its port


class Start:
    """One start of the script, as one process or as ranks; output goes to files."""

    def __init__(
        self, part: Part, command: Sequence[str], environments: list[dict[str, str]]
    ) -> None:
        self.output = part.path("output")
        self.output.mkdir(parents=True, exist_ok=True)
        self.processes = [
            self.process(part, command, environment, at)
            for at, environment in enumerate(environments)
        ]

    def process(
        self, part: Part, command: Sequence[str], environment: dict[str, str], at: int
    ) -> "subprocess.Popen[bytes]":
        """Start one process."""
        with open(self.output / f"{at}.txt", "wb") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "ddp_doctor.certificate.child", *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self.environment(part, environment),
                start_new_session=True,
            )

    def environment(self, part: Part, given: dict[str, str]) -> dict[str, str]:
        """This process's environment with what `part` needs; an empty value removes a variable."""
        paths = [str(SITE), str(SITE.parents[1]), os.environ.get("PYTHONPATH", "")]
        temporary = Path(part.folder) / "tmp"
        temporary.mkdir(exist_ok=True)
        every = os.environ | given | part.environment() | {"TMPDIR": str(temporary)}
        every["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        return {name: value for name, value in every.items() if value != ""}

    def wait(self) -> str:
        """Wait for all; once one fails, five seconds more. Returns how the first one failed."""
        until = time.monotonic() + LIMIT
        failed: int | None = None
        while any(process.poll() is None for process in self.processes):
            codes = [process.poll() for process in self.processes]
            if failed is None and any(codes):
                failed = next(at for at, code in enumerate(codes) if code)
                until = min(until, time.monotonic() + 5.0)
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        late = [at for at, process in enumerate(self.processes) if process.poll() is None]
        where = self._waiting(late) if failed is None and late else ""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if failed is None:  # what was late has been killed here
            ended = [at for at in range(len(self.processes)) if at not in late]
            failed = next((at for at in ended if self.processes[at].returncode), None)
        if failed is not None:
            code = self.processes[failed].returncode or 0
            killed = f" (it was ended by {signal.Signals(-code).name})" if code < 0 else ""
            return said(self._output(failed)) + killed
        return f"it did not end within {LIMIT:g} s{where}" if late else ""

    def _output(self, at: int) -> str:
        return (self.output / f"{at}.txt").read_text(errors="replace")

    def _waiting(self, late: Sequence[int]) -> str:
        """Where processes are that have not ended: each writes its frames at this signal."""
        for at in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[at].pid, signal.SIGUSR1)
        time.sleep(0.5)
        lines = {
            at: frames(self._output(at).rpartition("most recent call first")[2]) for at in late
        }
        listed = [f"process {at} is at {found[0]}" for at, found in lines.items() if found]
        return f": {', '.join(listed[:4])}" if listed else ""


def said(output: str) -> str:
    """The last error in a process's output, and the script's innermost line below which it rose."""
    # torch puts the rank before each line of a traceback.
    lines = re.sub(r"^\[rank\d+\]: ?", "", output, flags=re.M).strip().splitlines()
    errors = [
        n
        for n, line in enumerate(lines)
        if line[:1].isalpha() and ("Error" in line or "Exception" in line)
    ]
    if not errors:
        return (lines or ["no message"])[-1][:300].rstrip(".")
    own = frames("\n".join(lines[: errors[-1]]))
    return lines[errors[-1]][:300].rstrip(".") + (f" at {own[-1]}" if own else "")


def frames(output: str) -> list[str]:
    """The script's own lines in tracebacks, in their order."""
    found = re.findall(r'^\s+File "(.+)", line (\d+)', output, re.M)
    return [f"{os.path.basename(file)}:{line}" for file, line in found if is_users(file)]


def launched(rank: int, world: int, port: int) -> dict[str, str]:
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


def all_launched(world: int) -> list[dict[str, str]]:
    """The environment of each rank of one launch, with a port that nobody else gets meanwhile."""
    port = int(_reserved().getsockname()[1])
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if world > 1 else {}
    return [launched(rank, world, port) | threads for rank in range(world)]


def _reserved() -> socket.socket:
    """A socket whose port the system gives to no other process until this one ends.

    It is bound and does not listen, so torch's store, which sets SO_REUSEADDR, can (Linux).
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _RESERVED.append(holder)
    return holder
