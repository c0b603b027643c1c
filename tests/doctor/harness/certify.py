"""Certify scripts in forks of a process that has loaded torch, instead of in new interpreters."""

import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from doctor.harness.runs import OF_A_RANK, QUIET, SOURCES
from doctor.harness.scripts import Script

from ddp_doctor.certificate import forks
from ddp_doctor.certificate.program import measure
from ddp_doctor.certificate.starts import OwnRanksError
from labkit.launch.forks import ForkServer


def certified(
    server: ForkServer, script: Script, timeout: float = 600.0, cpu: bool = False
) -> dict[str, Any]:
    """The certificate of a script, as JSON. Raises TimeoutError, and OwnRanksError as `measure`."""
    ranks = script.ranks if script.launch == "torchrun" else None
    with tempfile.TemporaryDirectory(prefix="doctor-") as name:
        path = Path(name) / f"{script.name}.py"
        path.write_text(script.text)
        with server.forked(_certify, path, ranks, cpu) as connection:
            if not connection.poll(timeout):
                raise TimeoutError(f"no certificate of {path} after {timeout:g} s")
            answer = connection.recv()
    if isinstance(answer, OwnRanksError):
        raise answer
    return dict(answer)


def _certify(caller: Connection, script: Path, ranks: int | None, cpu: bool) -> None:
    for name in OF_A_RANK:
        os.environ.pop(name, None)
    os.environ.update(QUIET | {"PYTHONPATH": str(SOURCES)})
    os.chdir(script.parent)
    forks.load()
    try:
        certificate = measure([str(script)], script.parent, ranks, cpu)
    except OwnRanksError as error:
        caller.send(error)
    else:
        caller.send(None if certificate is None else certificate.as_json())
