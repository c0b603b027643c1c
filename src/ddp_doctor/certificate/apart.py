"""Certify in a process of its own, which can be forked, whatever is loaded in this one."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ddp_doctor.certificate.forks import cheapest
from ddp_doctor.certificate.guard import ENDED, FOLDER, VARIABLE, guard, report
from ddp_doctor.certificate.program import measure, report_with_rules
from ddp_doctor.certificate.starts import LAUNCHED, OwnRanksError, said
from ddp_doctor.facts.certificate import Certificate
from ddp_doctor.run.folders import SITE

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
    paths = [str(SITE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment[VARIABLE] = str(guard().writes)
    with tempfile.TemporaryDirectory(prefix="ddp-doctor-") as folder:
        guard().tell(FOLDER, folder)
        arguments = [folder, json.dumps(ranks), json.dumps(cpu), json.dumps(explain), *command]
        process = subprocess.Popen(
            [sys.executable, "-m", "ddp_doctor.certificate.apart", *arguments],
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
        result = Path(folder) / RESULT
        if not result.exists():
            raise RuntimeError(f"The doctor failed: {said(errors)}.")
        found, text, wrong = json.loads(result.read_text())
    if wrong:
        raise ValueError(wrong)
    return Certificate.of_json(found), text


def main(name: str, *words: str) -> None:
    """Certify, and write the result to a folder."""
    report()
    folder = Path(name)
    ranks, cpu, explain = map(json.loads, words[:3])
    start = cheapest()
    try:
        certificate = measure(words[3:], folder, ranks, cpu, start)
    except OwnRanksError as error:
        (folder / RESULT).write_text(json.dumps([None, "", str(error)]))
        return
    assert certificate is not None
    text = ""
    if explain and certificate.verdict in ("scaled", "different"):
        explained = report_with_rules(words[3:], folder, certificate, ranks, cpu, start)
        text = explained.as_text(80) if explained.run.ranks else ""
    (folder / RESULT).write_text(json.dumps([certificate.as_json(), text, ""]))


if __name__ == "__main__":
    main(*sys.argv[1:])
