"""Certify a script: start it as ranks and as one process, compare, and say what was measured."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_doctor.certificate.child import NEEDS_RANKS, WORLD_IN_SCRIPT
from ddp_doctor.certificate.plan import WATCHED, Part
from ddp_doctor.facts.places import is_users
from ddp_doctor.options import FOUND, UNCHECKED, say
from ddp_doctor.run.folders import own_folder

if TYPE_CHECKING:
    from ddp_doctor.facts.certificate import Certificate
    from ddp_doctor.options import Options
    from ddp_doctor.report.report import Report

HERE = Path(__file__).resolve().parents[1]
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
        paths = [str(HERE / "site"), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
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
        if failed is None:
            failed = next((at for at, p in enumerate(self.processes) if p.returncode > 0), None)
        if failed is not None:
            return said(self._output(failed))
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
    lines = output.strip().splitlines()
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
    return [launched(rank, world, port) for rank in range(world)]


def _reserved() -> socket.socket:
    """A socket whose port the system gives to no other process until this one ends.

    It is bound and does not listen, so torch's store, which sets SO_REUSEADDR, can (Linux).
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _RESERVED.append(holder)
    return holder


def divides_micro_batches(folder: Path, world: str) -> bool:
    """Whether one process made as many backward passes as all ranks together, as a script does that
    divides their number by WORLD_SIZE. Then it is started again, and told the number of ranks.
    """
    from ddp_doctor.certificate.plan import OWN
    from ddp_doctor.certificate.verdict import read

    ranks, one = (read(folder / kind).get((0, 0, OWN)) for kind in ("ranks", "one"))
    if ranks is None or one is None:
        return False
    return int(one["backwards"]) == int(world) * int(ranks["backwards"])


def are_mixed_up(folder: Path) -> bool:
    """Whether one process did not get the samples of all ranks, or not with what belongs to them.
    Then it gets its samples where the ranks' models get them.
    """
    from ddp_doctor.certificate.premises import MARK
    from ddp_doctor.certificate.verdict import judge

    properties = judge(folder, "", "").properties
    return any(one.name == "P1" and one.why.endswith(MARK) for one in properties)


@contextlib.contextmanager
def common_folder() -> Iterator[Path]:
    """A folder that all ranks of a launch find; rank 0 removes it. A new one without ranks."""
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory(prefix="ddp-doctor-") as name:
            yield Path(name)
        return
    names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT")
    run = "-".join(os.environ.get(name, "") for name in names)
    safe = "".join(c if c.isalnum() else "." for c in f"{run}-{os.getppid()}")
    try:
        folder = own_folder(Path(tempfile.gettempdir()) / f"ddp-doctor-{os.getuid()}-{safe}")
    except OSError as error:
        raise SystemExit(f"ddp-doctor: {error}") from None
    try:
        yield folder
    finally:
        if os.environ["RANK"] == "0":
            shutil.rmtree(folder, ignore_errors=True)


def measure(
    command: Sequence[str],
    folder: Path,
    ranks: int | None,
    cpu: bool,
    start: type[Start] = Start,
) -> "Certificate | None":
    """Start the script as often as needed; None on a rank that is not the first."""
    from ddp_doctor.certificate.verdict import judge

    as_ranks, as_one = Part(str(folder), "ranks", cpu), Part(str(folder), "one", cpu)
    alone = dict.fromkeys(LAUNCHED, "")
    rank = os.environ.get("RANK")
    if rank is not None:
        failed = start(as_ranks, command, [{}]).wait()
        if rank != "0":
            return None
    elif ranks is None:
        failed = start(as_ranks, command, [alone]).wait()
        if as_ranks.path(NEEDS_RANKS).exists():
            ranks = 2
    if rank is None and ranks is not None:
        failed = start(as_ranks, command, all_launched(ranks)).wait()
    world = as_ranks.path("world")
    failed_one = ""
    if world.exists() and world.read_text() != "1":
        by_launcher = rank is not None or ranks is not None
        environment = all_launched(1)[0] if by_launcher else alone
        failed_one = start(as_one, command, [environment]).wait()
        nothing = failed_one and not any(as_one.path("").glob("step.0.*.pt"))
        if nothing or are_mixed_up(folder):
            # A script may expect one rank's batch where samples are made, but not in the model.
            shutil.rmtree(as_one.path(""))
            as_one = replace(as_one, late=True)
            failed_one = start(as_one, command, [environment]).wait() and failed_one
        if by_launcher and not failed_one and divides_micro_batches(folder, world.read_text()):
            as_one.path(WORLD_IN_SCRIPT).touch()
            environment["WORLD_SIZE"] = world.read_text()
            failed_one = start(as_one, command, [environment]).wait()
    return judge(folder, failed, failed_one)


def explained(
    command: Sequence[str],
    folder: Path,
    certificate: "Certificate",
    ranks: int | None,
    cpu: bool,
    start: type[Start] = Start,
) -> "Report":
    """The certificate's report. The script is started once more: the rules look at six ordinary
    steps of it, say why the gradients are not equal, and look at what the measured steps do not
    show: data, their order, learning rates, the number of micro-batches.
    """
    from ddp_doctor.report.report import merge

    late = any(one.name == "later" and one.verdict != "equal" for one in certificate.properties)
    part = Part(str(folder), "observed", cpu, observed=WATCHED if late else 6)
    part.journals.mkdir(parents=True)
    needs_ranks = Part(str(folder), "ranks").path(NEEDS_RANKS).exists()
    if "RANK" in os.environ or ranks is not None or needs_ranks:
        start(part, command, all_launched(certificate.world or ranks or 2)).wait()
    else:
        start(part, command, [dict.fromkeys(LAUNCHED, "")]).wait()
    return merge(part.journals, certificate=certificate)


def certify(
    script: str | Path, *arguments: str, ranks: int | None = None, cpu: bool = False
) -> "Certificate":
    """Measure whether `ranks` processes of a script compute the gradient that one process computes.

    Starts the script twice: as ranks for at most 16 steps of each optimizer, and as one process
    that gets all their samples, for four. `ranks`: 2 if the script expects a launcher; a script
    that starts its own ranks decides. `cpu`: run a script that was written for GPUs on CPU ranks.
    Nothing that the script does later happens. Raises FileNotFoundError if there is no such script.
    Cost: two starts, and a copy of the gradients on disk per rank and step.
    """
    if not Path(script).is_file():
        raise FileNotFoundError(f"there is no script {str(script)!r} here ({Path.cwd()}).")
    with tempfile.TemporaryDirectory(prefix="ddp-doctor-") as name:
        certificate = measure([str(script), *arguments], Path(name), ranks, cpu)
    assert certificate is not None
    return certificate


def run(command: Sequence[str], ranks: int | None, options: "Options") -> int:
    """The command line's `--certify`: print, write, and return the exit code."""
    with common_folder() as folder:
        certificate = measure(command, folder, ranks, options.cpu)
        if certificate is None:
            return 0
        result = explained(command, folder, certificate, ranks, options.cpu)
        if certificate.verdict == "not judged":
            keep_output(folder, Path(options.folder))
    from ddp_doctor.report.report import written

    silent = options.quiet and certificate.verdict == "equal" and not result.findings
    written(result, options, Path(options.folder), silent)
    if certificate.verdict == "not judged":
        say(f"what the script printed is in {Path(options.folder) / 'output'}")
    return exit_code(certificate, result.worst, options.fail_on)


def keep_output(folder: Path, kept: Path) -> None:
    """Copy what the script printed in each start that there was."""
    for output in folder.glob("*/output"):
        if output.parent.name != "observed":
            shutil.copytree(output, kept / "output" / output.parent.name, dirs_exist_ok=True)


def exit_code(certificate: "Certificate", worst: str | None, fail_on: str | None) -> int:
    """The script's, unless `fail_on` asks for the verdict. `worst`: the worst finding of a rule."""
    if not fail_on:
        return int(bool(certificate.error))
    levels = {"error": ["error"], "warning": ["error", "warning"]}[fail_on]
    found = FOUND if worst in levels else 0
    return {"equal": found, "not judged": UNCHECKED}.get(certificate.verdict, FOUND)
