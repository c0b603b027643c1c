"""Certify scripts in forks of a process that has loaded torch, instead of in new interpreters."""

import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from doctor.harness.runs import QUIET, SOURCES
from doctor.harness.scripts import Script

from ddp_doctor.certificate import forks
from ddp_doctor.certificate.program import measure
from ddp_doctor.certificate.starts import OwnRanksError
from labkit.launch.forks import ForkServer


def certified(
    server: ForkServer,
    script: Script,
    arguments: tuple[str, ...] = (),
    timeout: float = 600.0,
    cpu: bool = False,
) -> dict[str, Any]:
    """The certificate of a script, as JSON. Raises TimeoutError, and what `measure` raises."""
    with tempfile.TemporaryDirectory(prefix="doctor-") as name:
        path = Path(name) / f"{script.name}.py"
        path.write_text(script.text)
        ranks = script.ranks if script.launch == "torchrun" else None
        return certified_command(server, [str(path), *arguments], Path(name), ranks, timeout, cpu)


def certified_command(
    server: ForkServer,
    command: list[str],
    folder: Path,
    ranks: int | None,
    timeout: float = 600.0,
    cpu: bool = False,
) -> dict[str, Any]:
    """The same for any command, with its files in a new folder."""
    with server.forked(_certify, command, folder, ranks, cpu) as connection:
        if not connection.poll(timeout):
            raise TimeoutError(f"no certificate of {command[0]} after {timeout:g} s")
        answer = connection.recv()
    if isinstance(answer, OwnRanksError):
        raise answer
    return dict(answer)


def _certify(
    caller: Connection, command: list[str], folder: Path, ranks: int | None, cpu: bool
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(QUIET | {"PYTHONPATH": str(SOURCES)})
    os.chdir(folder)
    forks.load()
    try:
        certificate = measure(command, folder, ranks, cpu)
    except OwnRanksError as error:
        caller.send(error)
    else:
        caller.send(None if certificate is None else certificate.as_json())
