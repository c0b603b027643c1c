"""The guard: a command's whole family is gone when the command, or its caller, is."""

import os
import signal
import subprocess
import sys
import uuid

import pytest
from processes import LIMITS, all_gone, becomes, processes_with

from labkit.launch.guard import run_guarded

LEAVES_A_DAEMON = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "300"])
subprocess.Popen(["sleep", "300"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(300)
print("out")
print("err", file=sys.stderr)
sys.exit(3)
"""


def test_output_and_exit_code_come_back_and_daemons_are_gone():
    marker = uuid.uuid4().hex
    words = [sys.executable, "-c", LEAVES_A_DAEMON]
    done = run_guarded(words, 100, env={**os.environ, "M": marker})
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
    assert processes_with(marker) == []


def test_a_command_that_is_late_is_stopped_with_all_that_it_started():
    marker = uuid.uuid4().hex
    program = "import subprocess,time; subprocess.Popen(['sleep','300'], start_new_session=True)\n"
    program += "print('began', flush=True); time.sleep(300)"
    for limit in LIMITS:
        with pytest.raises(subprocess.TimeoutExpired) as caught:
            run_guarded([sys.executable, "-c", program], limit, env={**os.environ, "M": marker})
        assert processes_with(marker) == []
        if caught.value.output:
            break
    assert caught.value.output == "began\n"


def test_a_command_that_does_not_exist_is_named():
    done = run_guarded(["no-such-command-anywhere"], 30)
    assert done.returncode == 127
    assert "no-such-command-anywhere" in done.stderr


def test_nothing_is_left_when_the_caller_is_killed():
    marker = uuid.uuid4().hex
    caller = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from labkit.launch.guard import run_guarded\n"
            "import sys\n"
            "run_guarded([sys.executable, '-c', 'import subprocess,time;'\n"
            '\'subprocess.Popen(["sleep","300"], start_new_session=True);time.sleep(300)\'], 290)',
        ],
        env={**os.environ, "M": marker},
        start_new_session=True,
    )
    # The caller, the guard, the command, and its sleep.
    assert becomes(lambda: len(processes_with(marker)) >= 4, 100)
    os.killpg(caller.pid, signal.SIGKILL)
    caller.wait()
    assert all_gone(marker)


@pytest.mark.parametrize("command", ["ls", []])
def test_a_command_that_is_no_list_of_words_is_refused(command):
    with pytest.raises(ValueError, match="has to be a list of words"):
        run_guarded(command, 30)


def test_if_the_guard_itself_is_killed_the_command_dies_and_the_caller_goes_on():
    environment = {**os.environ, "M": (marker := uuid.uuid4().hex)}
    done = run_guarded(["sh", "-c", "kill -9 $PPID; exec sleep 300"], 100, env=environment)
    assert done.returncode == -signal.SIGKILL
    assert all_gone(marker)
