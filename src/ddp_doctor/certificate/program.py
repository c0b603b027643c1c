"""Certify a script: start it as ranks and as one process, compare, and say what was measured."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_doctor.certificate.child import NEEDS_RANKS, WORLD_IN_SCRIPT
from ddp_doctor.certificate.forks import cheapest
from ddp_doctor.certificate.plan import TURNS, WATCHED, Part
from ddp_doctor.certificate.starts import LAUNCHED, Start, all_launched
from ddp_doctor.options import FOUND, LEVELS, UNCHECKED, say
from ddp_doctor.run.folders import own_folder

if TYPE_CHECKING:
    from ddp_doctor.facts.certificate import Certificate
    from ddp_doctor.options import Options
    from ddp_doctor.report.report import Report


def divides_micro_batches(folder: Path, world: str) -> bool:
    """Whether one process made as many backward passes as all ranks together, as a script does that
    divides their number by WORLD_SIZE.
    """
    from ddp_doctor.certificate.plan import OWN
    from ddp_doctor.certificate.verdict import read

    ranks, one = (read(folder / kind).get((0, 0, OWN)) for kind in ("ranks", "one"))
    if ranks is None or one is None:
        return False
    return int(one["backwards"]) == int(world) * int(ranks["backwards"]) > 0


def are_mixed_up(folder: Path) -> bool:
    """Whether one process lacks samples of the ranks, or has them with other targets or inputs, or
    as weights.
    """
    from ddp_doctor.certificate.premises import Unmarked
    from ddp_doctor.certificate.verdict import FLAT, judge

    properties = judge(folder, "", "").properties
    p1 = next((one for one in properties if one.name == "P1"), None)
    return p1 is not None and (isinstance(p1.why, Unmarked) or p1.why == FLAT)


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
    by_launcher = rank is not None or ranks is not None
    if as_ranks.path(TURNS).exists():
        turns = int(as_ranks.path(TURNS).read_text())
        as_ranks, as_one = (replace(part, turns=turns) for part in (as_ranks, as_one))
        for file in as_ranks.path("").glob("*.pt"):
            file.unlink()
        every = all_launched(int(world.read_text())) if by_launcher else [alone]
        failed = start(as_ranks, command, every).wait()
    failed_one = ""
    if world.exists() and world.read_text() != "1":
        environment = all_launched(1)[0] if by_launcher else alone
        failed_one = _measure_one(as_one, command, environment, world.read_text(), start)
    return judge(folder, failed, failed_one)


def _measure_one(
    part: Part,
    command: Sequence[str],
    environment: dict[str, str],
    world: str,
    start: type[Start],
) -> str:
    """Start the script as one process, and again where it needs another start; how it failed."""
    folder, by_launcher = Path(part.folder), bool(environment["RANK"])
    failed = start(part, command, [environment]).wait()
    nothing = failed and not any(part.path("").glob("step.0.*.pt"))
    if nothing or are_mixed_up(folder):
        # A script may expect one rank's batch where samples are made, but not in the model: one
        # process gets its samples where the ranks' models get them.
        shutil.rmtree(part.path(""))
        part = replace(part, late=True)
        failed = start(part, command, [environment]).wait() and failed
    if by_launcher and not failed and divides_micro_batches(folder, world):
        part.path(WORLD_IN_SCRIPT).touch()  # it is started again, and told the number
        environment["WORLD_SIZE"] = world
        failed = start(part, command, [environment]).wait()
    return failed


def report_with_rules(
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
    from ddp_doctor.report.report import make_report

    late = any(one.name == "later" and one.verdict != "equal" for one in certificate.properties)
    part = Part(str(folder), "observed", cpu, observed=WATCHED if late else 6)
    part.journals.mkdir(parents=True)
    needs_ranks = Part(str(folder), "ranks").path(NEEDS_RANKS).exists()
    if "RANK" in os.environ or ranks is not None or needs_ranks:
        start(part, command, all_launched(certificate.world or ranks or 2)).wait()
    else:
        start(part, command, [dict.fromkeys(LAUNCHED, "")]).wait()
    return make_report(part.journals, certificate=certificate)


def run(command: Sequence[str], ranks: int | None, options: "Options") -> int:
    """The command line's `--certify`: print, write, and return the exit code."""
    start = cheapest()
    with common_folder() as folder:
        certificate = measure(command, folder, ranks, options.cpu, start)
        if certificate is None:
            return 0
        result = report_with_rules(command, folder, certificate, ranks, options.cpu, start)
        if certificate.verdict == "not judged":
            keep_output(folder, Path(options.folder))
    from ddp_doctor.report.report import write_report

    silent = options.quiet and certificate.verdict == "equal" and not result.findings
    write_report(result, options, Path(options.folder), silent)
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
    found = FOUND if worst in LEVELS[fail_on] else 0
    return {"equal": found, "not judged": UNCHECKED}.get(certificate.verdict, FOUND)
