"""Certify scripts in forks of a process that has loaded torch, instead of in new interpreters."""

import atexit
import multiprocessing.process
import os
import sys
import tempfile
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from doctor.corpus_runs import QUIET, SOURCES
from doctor.corpus_scripts import Script

from ddp_doctor.certificate.plan import Part
from ddp_doctor.certificate.program import Start, measure
from labkit.launch.forks import ForkServer, start_forked, stop_forked


def certified(
    server: ForkServer, script: Script, arguments: tuple[str, ...] = (), timeout: float = 150.0
) -> dict[str, Any]:
    """The certificate of a script, as JSON. Raises TimeoutError."""
    with tempfile.TemporaryDirectory(prefix="doctor-") as name:
        path = Path(name) / f"{script.name}.py"
        path.write_text(script.text)
        ranks = script.ranks if script.launch == "torchrun" else None
        with server.forked(_certify, [str(path), *arguments], Path(name), ranks) as connection:
            if not connection.poll(timeout):
                raise TimeoutError(f"no certificate of {script.name} after {timeout:g} s")
            return dict(connection.recv())


def _certify(caller: Connection, command: list[str], folder: Path, ranks: int | None) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(QUIET | {"PYTHONPATH": str(SOURCES)})
    os.chdir(folder)
    certificate = measure(command, folder, ranks, cpu=False, start=_Forked)
    caller.send(None if certificate is None else certificate.as_json())


class _Forked(Start):
    """Processes that need not import torch."""

    def process(self, part: Part, command: Any, environment: dict[str, str], at: int) -> "_Process":
        return _Process(
            start_forked(
                _run,
                list(command),
                stdout=self.output / f"{at}.txt",
                environment=self.environment(part, environment),
            )
        )


class _Process:
    """What `Start` asks of a `subprocess.Popen`."""

    def __init__(self, forked: BaseProcess) -> None:
        self.forked = forked
        self.pid = forked.pid

    @property
    def returncode(self) -> int | None:
        return self.forked.exitcode

    def poll(self) -> int | None:
        return self.forked.exitcode

    def wait(self) -> None:
        stop_forked(self.forked)


def _run(command: list[str]) -> None:
    import torch

    from ddp_doctor.certificate import child

    atexit._clear()
    multiprocessing.process._parent_process = None
    sys.path.insert(0, "")
    torch.set_num_threads(1)
    sys.argv = ["child", *command]
    child.main()
