"""Certify a script: start it as ranks and as one process, compare, and say what was measured.

This process has to be one that can be forked. `certify` starts one, whatever is loaded here.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_doctor.certificate.guard import ENDED, FOLDER, VARIABLE, guard, guarded_folder, report
from ddp_doctor.certificate.plan import AT_MOST, NEEDS_RANKS, TURNS, WORLD, Part
from ddp_doctor.certificate.starts import (
    LAUNCHER,
    OwnRanksError,
    Start,
    doctor_paths,
    error_in,
    launch,
)
from ddp_doctor.facts.certificate import Certificate
from ddp_doctor.options import FOUND, LEVELS, MOST_RANKS, UNCHECKED, say
from ddp_doctor.run.folders import own_folder

if TYPE_CHECKING:
    from ddp_doctor.options import Options
    from ddp_doctor.report.report import Report

CUT = f"The rules' run ends after {AT_MOST} steps per optimizer: they say nothing of later ones."
ENDS_WELL = "The script did not fail with its own samples, only with those that it was given."
RESULT = "result.json"  # the certificate, and the report that explains it; or what is wrong


def certify(
    script: str | Path, *arguments: str, ranks: int | None = None, cpu: bool = False
) -> Certificate:
    """Measure whether `ranks` processes of a script compute the gradient that one process computes.

    Usually starts the script twice: as ranks for at most 16 steps of each optimizer, and as one
    process that gets all their samples, for five. Either may need another start. `ranks`: 2 if the
    script expects a launcher; a script that starts its own ranks decides. `cpu`: run a script that
    was written for GPUs on CPU ranks. Nothing that the script does later happens. Raises
    FileNotFoundError if there is no such script, ValueError for less than one rank, more than
    `MOST_RANKS`, or `ranks` of a script that starts its own, and RuntimeError if the doctor fails.
    Cost: a new interpreter, two to six starts in forks of it, and on disk a copy of the gradients
    per step.
    """
    if not Path(script).is_file():
        raise FileNotFoundError(f"there is no script {str(script)!r} here ({Path.cwd()}).")
    if ranks is not None and not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"ranks is {ranks}: pass 1 to {MOST_RANKS}.")
    return certify_apart([str(script), *arguments], ranks, cpu)[0]


def certify_apart(
    command: Sequence[str], ranks: int | None, cpu: bool, explain: bool = False
) -> tuple[Certificate, str]:
    """The certificate of a script, and the rules' report as text.

    The report is made if `explain`, and only if the ranks are not equal: for it, the script starts
    once more. Raises ValueError if the script starts its own ranks, and RuntimeError if the doctor
    fails.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    environment |= doctor_paths() | {VARIABLE: str(guard().writes)}
    with guarded_folder() as folder:
        task = json.dumps([ranks, cpu, explain, *command])
        process = subprocess.Popen(
            [sys.executable, "-m", "ddp_doctor.certificate.program", str(folder), task],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
            pass_fds=(guard().writes,),
        )
        try:
            errors = process.communicate()[1]
        finally:
            process.kill()
            process.wait()
            guard().tell(ENDED, process.pid)
        result = folder / RESULT
        if not result.exists():
            raise RuntimeError(f"The doctor failed: {error_in(errors)}.")
        certificate, text, error = json.loads(result.read_text())
    if error:
        raise ValueError(error)
    return Certificate.of_json(certificate), text


def main(name: str, task: str) -> None:
    """Certify, and write the result to a folder."""
    report()
    folder, (ranks, cpu, explain, *command) = Path(name), json.loads(task)
    result: list[Any] = [None, "", ""]
    try:
        certificate = measure(command, folder, ranks, cpu)
        assert certificate is not None
        if explain and certificate.verdict in ("scaled", "different"):
            report_ = report_with_rules(command, folder, certificate, ranks, cpu)
            result[1] = report_.as_text(80) if report_.run.ranks else ""
        result[0] = certificate.as_json()
    except OwnRanksError as error:
        result[2] = str(error)
    (folder / RESULT).write_text(json.dumps(result))


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
) -> Certificate | None:
    """Start the script as often as needed; None on a rank that is not the first."""
    no_launcher = dict.fromkeys(LAUNCHER, "")
    rank = os.environ.get("RANK")
    part = Part(str(folder), "ranks", cpu)
    if rank is not None or ranks is None:
        failure = Start(part, command, [no_launcher if rank is None else {}]).wait()
    if rank not in (None, "0"):
        return None
    if ranks is None and part.path(NEEDS_RANKS).exists():
        ranks = 2
    by_launcher = rank is not None or ranks is not None
    if rank is None and ranks is not None:
        failure = Start(part, command, launch(ranks)).wait()
    if part.path(TURNS).exists():
        world = int(part.path(WORLD).read_text())
        part = replace(part, turns=int(part.path(TURNS).read_text()))
        failure = Start(part, command, launch(world) if by_launcher else [no_launcher]).wait()
    one, failure_of_one = replace(part, kind="one"), ""
    if part.path(WORLD).exists() and part.path(WORLD).read_text() != "1":
        environment = launch(1)[0] if by_launcher else no_launcher
        one, failure_of_one = _measure_one(one, command, environment)
    from ddp_doctor.certificate.verdict import judge  # with torch, which a fork must not find

    return judge(part, one, failure, failure_of_one)


def _measure_one(
    part: Part, command: Sequence[str], environment: dict[str, str]
) -> tuple[Part, str]:
    """Start the script as one process, and again where it needs another start; how it failed."""
    failure = Start(part, command, [environment]).wait()
    from ddp_doctor.certificate.evidence import lacks_samples, makes_all_passes

    for _ in range(2):
        if not part.all_passes and makes_all_passes(part):
            part = replace(part, all_passes=True)
        elif not part.at_model and lacks_samples(part, failure):
            # A script may expect one rank's batch where samples are made, but not in the model:
            # one process gets its samples where the ranks' models get them.
            part = replace(part, at_model=True)
        else:
            break
        shutil.rmtree(part.path(""))
        error = Start(part, command, [environment]).wait()
        failure = error and (failure or error)
    return part, failure


def report_with_rules(
    command: Sequence[str],
    folder: Path,
    certificate: Certificate,
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
    launched = is_launched(folder, ranks)
    Start(part, command, launch(world) if launched else [dict.fromkeys(LAUNCHER, "")]).wait()
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
        ends = [rank.end for rank in result.run.ranks]
        if ends and all(end and not end["raised"] for end in ends):
            certificate.notes += [ENDS_WELL] * bool(certificate.error)
            certificate.error = ""
        launched = is_launched(folder, ranks)
        not_judged = certificate.verdict == "not judged"
        said = keep_output(folder, Path(options.folder) / "output") if not_judged else ""
    from ddp_doctor.other_ways import other_ways
    from ddp_doctor.report.report import write_report

    silent = options.quiet and certificate.verdict == "equal" and not result.findings
    write_report(result, options, Path(options.folder), silent)
    if not_judged:
        say(said)
        if certificate.world > 1 and not certificate.error and not options.quiet:
            say(other_ways(command, certificate.world, launched))
    return exit_code(certificate, result.worst, options.fail_on)


def keep_output(folder: Path, kept: Path) -> str:
    """Copy what the script printed in each start that there was; say where, or why not."""
    try:
        for output in folder.glob("*/output"):
            if output.parent.name != "observed":
                shutil.copytree(output, kept / output.parent.name, dirs_exist_ok=True)
    except OSError as error:
        return f"could not keep what the script printed ({error})."
    return f"what the script printed is in {kept}"


def exit_code(certificate: Certificate, worst: str | None, fail_on: str | None) -> int:
    """The script's, unless `fail_on` asks for the verdict. `worst`: the worst finding of a rule."""
    if not fail_on:
        return int(bool(certificate.error))
    found = FOUND if worst in LEVELS[fail_on] else 0
    return {"equal": found, "not judged": UNCHECKED}.get(certificate.verdict, FOUND)


if __name__ == "__main__":
    main(*sys.argv[1:])
