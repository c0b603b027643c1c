"""Functions in forked processes: where their output goes, and that they leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from processes import all_end, all_gone, becomes, processes_with

from labkit.launch.forks import start_forked, stop_forked


def say_and_end(number: int) -> None:
    print("from", number)
    os.system("echo from a program; echo trouble >&2")
    print(os.environ["ONLY"], os.getcwd(), os.getpid() == os.getsid(0), file=sys.stderr)
    if number > 1:
        raise ValueError(number)
    sys.exit(number)


@pytest.mark.parametrize(("number", "code"), [(0, 0), (1, 1), (2, 1)])
def test_a_fork_has_its_own_session_output_folder_and_environment(number, code, tmp_path):
    out, err = tmp_path / "out", tmp_path / "err"
    process = start_forked(
        say_and_end, number, stdout=out, stderr=err, folder=tmp_path, environment={"ONLY": "this"}
    )
    process.join(60)
    assert process.exitcode == code
    assert out.read_text() == f"from {number}\nfrom a program\n"
    assert err.read_text().startswith(f"trouble\nthis {tmp_path} True\n")
    assert err.read_text().endswith("ValueError: 2\n" if number == 2 else "True\n")


def start_others_and_wait() -> None:
    subprocess.Popen(["sleep", "300"])
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    print("started", flush=True)
    time.sleep(300)


def wait_for(text: str, file: Path) -> None:
    assert becomes(lambda: file.exists() and text in file.read_text(), 100), f"no {text!r}"


def test_to_stop_a_fork_ends_what_it_started_in_whichever_session(tmp_path):
    environment = {**os.environ, "MARKER": (marker := uuid.uuid4().hex)}
    out = tmp_path / "out"
    process = start_forked(start_others_and_wait, stdout=out, environment=environment)
    wait_for("started", out)
    process.join(0.1)
    assert process.exitcode is None
    assert len(processes_with(marker)) >= 2  # a fork's own environment is that of its parent
    stop_forked(process)
    assert process.exitcode == -signal.SIGKILL
    assert all_gone(marker)


CHECKS_ITS_PARENT = """
import os, sys, time
from labkit.launch import guard
guard._prctl = lambda *_: False  # as on macOS
if os.fork() == 0:
    guard.die_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(300)
time.sleep(300)
"""


def test_without_the_systems_help_a_fork_ends_with_its_parent_too():
    with subprocess.Popen(
        [sys.executable, "-c", CHECKS_ITS_PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        child = int(parent.stdout.readline())
        assert not all_end([child], within=0.1)
        parent.kill()
        assert all_end([child])
