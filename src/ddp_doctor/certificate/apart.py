"""Certify in a process of its own, which can be forked, whatever is loaded in this one."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_doctor.certificate.guard import ENDED, VARIABLE, guard, guarded_folder, report
from ddp_doctor.certificate.program import measure, report_with_rules
from ddp_doctor.certificate.starts import LAUNCHED, OwnRanksError, observed_paths, said
from ddp_doctor.facts.certificate import Certificate

RESULT = "result.json"  # the certificate, and the report that explains it; or what is wrong


def certify(
    script: str | Path, *arguments: str, ranks: int | None = None, cpu: bool = False
) -> Certificate:
    """Measure whether `ranks` processes of a script compute the gradient that one process computes.

    Usually starts the script twice: as ranks for at most 16 steps of each optimizer, and as one
    process that gets all their samples, for five. Either may need another start. `ranks`: 2 if the
    script expects a launcher; a script that starts its own ranks decides. `cpu`: run a script that
    was written for GPUs on CPU ranks. Nothing that the script does later happens. Raises
    FileNotFoundError if there is no such script, ValueError for less than one rank or for `ranks`
    of a script that starts its own, and RuntimeError if the doctor fails. Cost: a new interpreter,
    two to six starts in forks of it, and on disk a copy of the gradients per step.
    """
    if not Path(script).is_file():
        raise FileNotFoundError(f"there is no script {str(script)!r} here ({Path.cwd()}).")
    if ranks is not None and ranks < 1:
        raise ValueError(f"ranks is {ranks}: pass 1 or more.")
    return certify_apart([str(script), *arguments], ranks, cpu)[0]


def certify_apart(
    command: Sequence[str], ranks: int | None, cpu: bool, explain: bool = False
) -> tuple[Certificate, str]:
    """The certificate of a script, and the rules' report as text.

    The report is made if `explain`, and only if the ranks are not equal: for it, the script starts
    once more. Raises ValueError if the script starts its own ranks, and RuntimeError if the doctor
    fails.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    environment |= observed_paths() | {VARIABLE: str(guard().writes)}
    with guarded_folder() as folder:
        given = json.dumps([ranks, cpu, explain, *command])
        process = subprocess.Popen(
            [sys.executable, "-m", "ddp_doctor.certificate.apart", str(folder), given],
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
            raise RuntimeError(f"The doctor failed: {said(errors)}.")
        found, text, wrong = json.loads(result.read_text())
    if wrong:
        raise ValueError(wrong)
    return Certificate.of_json(found), text


def main(name: str, given: str) -> None:
    """Certify, and write the result to a folder."""
    report()
    folder, (ranks, cpu, explain, *command) = Path(name), json.loads(given)
    found, text, wrong = None, "", ""
    try:
        certificate = measure(command, folder, ranks, cpu)
        assert certificate is not None
        if explain and certificate.verdict in ("scaled", "different"):
            explained = report_with_rules(command, folder, certificate, ranks, cpu)
            text = explained.as_text(80) if explained.run.ranks else ""
        found = certificate.as_json()
    except OwnRanksError as error:
        wrong = str(error)
    (folder / RESULT).write_text(json.dumps([found, text, wrong]))


if __name__ == "__main__":
    main(*sys.argv[1:])
