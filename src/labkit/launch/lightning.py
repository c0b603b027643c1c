"""Run a script that uses Lightning in a fork of a process that has loaded Lightning.

Lightning's strategy "ddp" runs the script again for each further device, in a new interpreter.
These become forks, too. Each saves seven seconds of processor time.
"""

import functools
import os
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.launch.forks import ForkServer
from labkit.launch.nodes import as_script
from labkit.launch.popen import ForkedPopen, run_forked

_LAUNCHER = "pytorch_lightning.strategies.launchers.subprocess_script"
_SERVER = ForkServer(_LAUNCHER)
_IMPORTS = re.compile(r"^\s*import pytorch_lightning\b", re.MULTILINE)


def uses_lightning(script: Path) -> bool:
    return bool(_IMPORTS.search(script.read_text("utf-8")))


def _run(words: list[str]) -> None:
    from lightning_fabric.utilities.rank_zero import rank_zero_only
    from pytorch_lightning.strategies.launchers import subprocess_script

    subprocess_script.subprocess = types.SimpleNamespace(Popen=_start_again)
    rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", "0"))  # read when it was loaded
    as_script(words)


def _start_again(command: list[str], env: Mapping[str, str], cwd: Any = None) -> ForkedPopen:
    """What Lightning starts: this Python, the script, and its arguments."""
    place = {"folder": cwd or os.getcwd(), "environment": dict(env)}
    return ForkedPopen(_SERVER, _run, command[1:], **place)


# Run the script `words[0]` with its arguments, and capture what it prints.
run_with_lightning = functools.partial(run_forked, _SERVER, _run)
