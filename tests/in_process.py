"""Run a script of this project inside the test's process, as `python SCRIPT ARGUMENTS` would.

For scripts that start their ranks themselves, or need none: nothing has to import torch again.
"""

import contextlib
import io
import os
import runpy
import sys
import warnings
from typing import NamedTuple
from unittest import mock

from labkit.launch.scripts import project_root


class Ended(NamedTuple):
    """How the script ended: its exit code (1 for a message), and what it printed."""

    code: int
    stdout: str
    stderr: str


def run_in_process(script: str, *arguments: object, **environment: str) -> Ended:
    """Run `script`, a path from the project's root, with the variables of `environment`.

    Exceptions other than SystemExit are raised as they are. The environment, `sys.argv`, the
    working directory and the filters of warnings are restored.
    """
    root = project_root()
    stdout, stderr = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        mock.patch.object(sys, "argv", [script, *map(str, arguments)]),
        mock.patch.dict(os.environ, environment),
        contextlib.chdir(root),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        warnings.catch_warnings(),
    ):
        try:
            runpy.run_path(str(root / script), run_name="__main__")
        except SystemExit as leave:
            code = leave.code
            if code is not None and not isinstance(code, int):
                print(code, file=stderr)
    number = code if isinstance(code, int) else int(code is not None)
    return Ended(number, stdout.getvalue(), stderr.getvalue())
