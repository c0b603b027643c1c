"""Ranks that share cores do not interrupt each other's threads, and import only once."""

import os
import subprocess
import sys

import pytest

import labkit.testing.museum  # noqa: F401  loaded here, so that a call may name it
from labkit.launch.ranks import run_ranks

POLICIES = """
import os
from labkit.launch.ranks import run_ranks

os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # pytest's own is inherited

def policies():
    return {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}

print(*run_ranks(policies, 2), policies())
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")
def test_every_thread_of_a_rank_is_scheduled_as_batch_and_the_caller_as_before():
    command = [sys.executable, "-c", POLICIES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    batch, other = {os.SCHED_BATCH}, {os.SCHED_OTHER}
    assert done.stdout == f"{batch} {batch} {other}\n", done.stderr


def test_a_module_of_the_project_that_a_call_names_is_imported_before_the_ranks_are_forked():
    def is_loaded(name: str, backwards: bool) -> bool:
        return name[:: -1 if backwards else 1] in sys.modules

    name = "labkit.testing.museum"
    assert run_ranks(is_loaded, 2, name, False, device="cpu") == [True, True]
    # Not named, not loaded: what this asks is not true anyway.
    assert run_ranks(is_loaded, 2, name[::-1], True, device="cpu") == [False, False]
