"""Certify a script: start it as ranks and as one process, compare, and say what was measured."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_doctor.certificate.guard import FOLDER, guard, guarded_folder
from ddp_doctor.certificate.plan import AT_MOST, NEEDS_RANKS, TURNS, WORLD, Part
from ddp_doctor.certificate.starts import LAUNCHED, OwnRanksError, Start, all_launched
from ddp_doctor.options import FOUND, LEVELS, UNCHECKED, say
from ddp_doctor.run.folders import own_folder

if TYPE_CHECKING:
    from ddp_doctor.facts.certificate import Certificate
    from ddp_doctor.options import Options
    from ddp_doctor.report.report import Report

CUT = f"The rules' run ends after {AT_MOST} steps per optimizer: they say nothing of later ones."


@contextlib.contextmanager
def common_folder() -> Iterator[Path]:
    """A folder that all ranks of a launch find; rank 0 removes it. A new one without ranks."""
    if "RANK" not in os.environ:
        with guarded_folder() as folder:
            yield folder
        return
    names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT")
    run = "-".join(os.environ.get(name, "") for name in names)
    safe = "".join(c if c.isalnum() else "." for c in f"{run}-{os.getppid()}")
    try:
        folder = own_folder(Path(tempfile.gettempdir()) / f"ddp-doctor-{os.getuid()}-{safe}")
    except OSError as error:
        raise SystemExit(f"ddp-doctor: {error}. Set TMPDIR to a folder of your own.") from None
    first = os.environ["RANK"] == "0"
    if first:
        guard().tell(FOLDER, folder)
    try:
        yield folder
    finally:
        if first:
            shutil.rmtree(folder, ignore_errors=True)


def measure(
    command: Sequence[str], folder: Path, ranks: int | None, cpu: bool
) -> "Certificate | None":
    """Start the script as often as needed; None on a rank that is not the first."""
    alone = dict.fromkeys(LAUNCHED, "")
    rank = os.environ.get("RANK")
    part = Part(str(folder), "ranks", cpu)
    if rank is not None or ranks is None:
        failed = Start(part, command, [alone if rank is None else {}]).wait()
    if rank not in (None, "0"):
        return None
    if ranks is None and part.path(NEEDS_RANKS).exists():
        ranks = 2
    by_launcher = rank is not None or ranks is not None
    if rank is None and ranks is not None:
        failed = Start(part, command, all_launched(ranks)).wait()
    if part.path(TURNS).exists():
        world = int(part.path(WORLD).read_text())
        part = replace(part, turns=int(part.path(TURNS).read_text()))
        failed = Start(part, command, all_launched(world) if by_launcher else [alone]).wait()
    one, failed_one = replace(part, kind="one"), ""
    if part.path(WORLD).exists() and part.path(WORLD).read_text() != "1":
        environment = all_launched(1)[0] if by_launcher else alone
        one, failed_one = _measure_one(one, command, environment)
    from ddp_doctor.certificate.verdict import judge  # with torch, which a fork must not find

    return judge(part, one, failed, failed_one)


def _measure_one(
    part: Part, command: Sequence[str], environment: dict[str, str]
) -> tuple[Part, str]:
    """Start the script as one process, and again where it needs another start; how it failed."""
    failed = Start(part, command, [environment]).wait()
    from ddp_doctor.certificate.verdict import has_nothing_of, makes_all_passes

    for _ in range(2):
        if not part.spread and makes_all_passes(part):
            again = replace(part, spread=True)
        elif not part.late and has_nothing_of(part, failed):
            # A script may expect one rank's batch where samples are made, but not in the model:
            # one process gets its samples where the ranks' models get them.
            again = replace(part, late=True)
        else:
            break
        shutil.rmtree(part.path(""))
        error = Start(again, command, [environment]).wait()
        part, failed = again, error and (failed or error)
    return part, failed


def report_with_rules(
    command: Sequence[str],
    folder: Path,
    certificate: "Certificate",
    ranks: int | None,
    cpu: bool,
) -> "Report":
    """The certificate's report. The script is started once more, for the rules. They see at most
    100 steps per optimizer, look for why the gradients are not equal, and check what the measured
    steps do not show: data, their order, learning rates, the number of micro-batches.
    """
    from ddp_doctor.facts.journal import read_statuses
    from ddp_doctor.report.report import make_report

    world = certificate.world or ranks or 2
    part = Part(str(folder), "observed", cpu, world=world)
    part.journals.mkdir(parents=True)
    if is_launched(folder, ranks):
        Start(part, command, all_launched(world)).wait()
    else:
        Start(part, command, [dict.fromkeys(LAUNCHED, "")]).wait()
    statuses = [journal.status for journal in read_statuses(part.journals)]
    if any(status is not None and status.steps >= AT_MOST for status in statuses):
        certificate.notes.append(CUT)
    return make_report(part.journals, certificate=certificate)


def is_launched(folder: Path, ranks: int | None) -> bool:
    """Whether a launcher starts the script's ranks, and not the script."""
    needs_ranks = Part(str(folder), "ranks").path(NEEDS_RANKS).exists()
    return "RANK" in os.environ or ranks is not None or needs_ranks


def run(command: Sequence[str], ranks: int | None, options: "Options") -> int:
    """The command line's `--certify`: print, write, and return the exit code."""
    with common_folder() as folder:
        try:
            certificate = measure(command, folder, ranks, options.cpu)
        except OwnRanksError as error:
            say(f"{error}")
            return 2
        if certificate is None:
            return 0
        result = report_with_rules(command, folder, certificate, ranks, options.cpu)
        launched = is_launched(folder, ranks)
        if certificate.verdict == "not judged":
            keep_output(folder, Path(options.folder))
    from ddp_doctor.other_ways import other_ways
    from ddp_doctor.report.report import write_report

    silent = options.quiet and certificate.verdict == "equal" and not result.findings
    write_report(result, options, Path(options.folder), silent)
    if certificate.verdict == "not judged":
        say(f"what the script printed is in {Path(options.folder) / 'output'}")
        if certificate.world > 1 and not certificate.error and not options.quiet:
            say(other_ways(command, certificate.world, launched))
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
