"""Run one of the project's scripts from a chapter or a test, and leave no process behind.

A script that uses Lightning runs in a fork of a process that has loaded Lightning. Its strategy
"ddp" runs the script again for each further device, in a new interpreter: these become forks, too.
Each saves seven seconds of processor time.
"""

import functools
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.launch.forks import ForkServer, is_shared
from labkit.launch.guard import run_guarded
from labkit.launch.memory import check_memory
from labkit.launch.nodes import as_script, run_warm, server_with
from labkit.launch.popen import ForkedPopen, run_forked

# gloo reports each connection on stdout, in an order that varies.
_NOISE = re.compile(r"^\[Gloo\] Rank \d+ is connected.*\n?", re.MULTILINE)

_LAUNCHER = "pytorch_lightning.strategies.launchers.subprocess_script"
_LIGHTNING = ForkServer(_LAUNCHER)
_IMPORTS = re.compile(r"^\s*import pytorch_lightning\b", re.MULTILINE)
_TORCHRUN_REPORT = re.compile(r"^E\d{4} .*torch/distributed/elastic/.*\] failed", re.MULTILINE)


class ScriptError(RuntimeError):
    """A script failed or did not end in time. The text holds the end of its output.

    `said` holds all of its output, stdout and then stderr. `exit_code` is None if it did not end in
    time.
    """

    def __init__(self, message: str, said: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.said = said
        self.exit_code = exit_code


def project_root(start: Path | None = None) -> Path:
    """The folder with this project's pyproject.toml, at or above `start` (default: the current
    folder).
    """
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        if (folder / "pyproject.toml").is_file() and (folder / "labs").is_dir():
            return folder
    raise FileNotFoundError(
        f"{start} is not inside a checkout of this project (no pyproject.toml with a labs folder "
        "at or above it). Open the notebook from the book folder of a checkout."
    )


def run_script(
    script: str,
    *args: object,
    ranks: int | None = None,
    timeout: float = 900.0,
    nodes: int = 1,
    max_restarts: int = 0,
    preload: Sequence[str] = (),
) -> str:
    """Run a script of this project with this Python, and return what it printed to stdout.

    Args:
        script: its path from the project's root, for example "labs/accumulate_vs_ddp.py".
        args: its command-line arguments; numbers are converted to text.
        ranks: run this many ranks of it under torchrun; None runs it as a plain script. Ranks and
            torchrun's agent are forks of a server that has loaded torch (`labkit.launch.nodes`),
            which takes a tenth of the time of new interpreters. A plain script is a new one, but
            for one that uses Lightning.
        timeout: seconds, after which the script and everything it started are stopped.
        preload: modules that its processes find loaded, because they are forks of a server that
            has loaded them; a plain script is then one, too.
        nodes: start this many torchrun agents with `ranks` ranks each, as on a cluster.
        max_restarts: how often torchrun may restart all ranks after one has failed.

    Raises FileNotFoundError if the script does not exist. Raises ScriptError, with the end of the
    output, if the script fails or does not end in time. Raises ValueError if the memory does not
    hold so many ranks, and `labkit.launch.forks.NotStartedError` if no process can be started. Two
    ranks of a lab take about a second.
    """
    root = project_root()
    if not (root / script).is_file():
        raise FileNotFoundError(f"there is no script {script} in this project")
    words = [script, *map(str, args)]
    run: Callable[..., subprocess.CompletedProcess[str]] = run_guarded
    if ranks is None and preload:
        run = functools.partial(run_forked, server_with(*preload), as_script)
    elif ranks is None and is_shared() and _IMPORTS.search((root / script).read_text("utf-8")):
        run = functools.partial(run_forked, _LIGHTNING, _run_with_lightning)
    elif ranks is None:
        words = [sys.executable, *words]
    else:
        check_memory(ranks * nodes)
        words = [f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}", *words]
        run = functools.partial(run_warm, nodes=nodes, preload=preload)
    # Threads change the last digits, and ranks that share a few cores only slow each other down.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if max_restarts:  # see labkit.launch.lab: restarted ranks need a store of their own
        environment.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        done = run(words, timeout, cwd=root, env=environment)
    except subprocess.TimeoutExpired as late:
        said, code, end = (late.output, late.stderr), None, f"had not ended after {timeout:g} s"
    else:
        said, code = (done.stdout, done.stderr), done.returncode
        end = f"ended with exit code {code}"
    if code != 0:
        # torchrun adds a long report of its own below what the script said, and says less.
        own = [_TORCHRUN_REPORT.split(text or "", maxsplit=1)[0].splitlines() for text in said]
        ends = "\n".join("\n".join(lines[-30:]) for lines in own)
        raise ScriptError(f"{script} {end}:\n{ends}", "".join(said), code)
    return _NOISE.sub("", said[0]).strip("\n")


def _run_with_lightning(words: list[str]) -> None:
    from lightning_fabric.utilities.rank_zero import rank_zero_only
    from pytorch_lightning.strategies.launchers import subprocess_script

    subprocess_script.subprocess = types.SimpleNamespace(Popen=_start_again)
    rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", "0"))  # read when it was loaded
    as_script(words)


def _start_again(command: list[str], env: Mapping[str, str], cwd: Any = None) -> ForkedPopen:
    """What Lightning starts: this Python, the script, and its arguments."""
    place = {"folder": cwd or os.getcwd(), "environment": dict(env)}
    return ForkedPopen(_LIGHTNING, _run_with_lightning, command[1:], **place)
