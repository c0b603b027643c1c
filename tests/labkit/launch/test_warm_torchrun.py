"""torchrun in a fork of the fork server: what it leaves behind, and what it costs."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest
from processes import all_gone, processes_with

from labkit.launch.scripts import ScriptError, project_root, run_script

# A process that is found by the variable MARKER, and that no signal to its rank reaches.
DAEMON = "import subprocess; subprocess.Popen(['sleep', '300'], start_new_session=True)\n"


@pytest.fixture
def marker(script, monkeypatch):
    """The value of MARKER in every process that a script starts, and in no other."""
    run_script(script("pass"), ranks=1)  # starts the fork server, which outlives a run
    marker = uuid.uuid4().hex
    monkeypatch.setenv("MARKER", marker)
    return marker


def test_a_run_that_is_late_leaves_no_rank_and_no_process_of_a_rank(script, marker):
    name = script(DAEMON + "import time; print('waiting', flush=True); time.sleep(300)")
    with pytest.raises(ScriptError, match=r"(?s)had not ended after 3 s.*waiting"):
        run_script(name, ranks=2, timeout=3)
    assert processes_with(marker) == []


def test_a_run_that_ends_well_leaves_no_process_of_a_rank(script, marker):
    assert run_script(script(DAEMON), ranks=2) == ""
    assert processes_with(marker) == []


@pytest.mark.parametrize(("by", "nodes"), [(signal.SIGKILL, 2), (signal.SIGTERM, 1)])
def test_a_caller_that_is_killed_leaves_no_rank_behind(script, by, nodes):
    marker = uuid.uuid4().hex
    name = script("import time; time.sleep(300)")
    start = f"run_script({name!r}, ranks=2, nodes={nodes})"
    call = f"from labkit.launch.scripts import run_script; {start}"
    environment = {**os.environ, "MARKER": marker}
    caller = subprocess.Popen([sys.executable, "-c", call], cwd=project_root(), env=environment)
    deadline = time.monotonic() + 60
    # The caller, the fork server and its tracker, the supervisor, and an agent and two ranks for
    # each node; several agents have a parent of their own.
    all_of_them = {1: 7, 2: 11}[nodes]
    while len(processes_with(marker)) < all_of_them and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(processes_with(marker)) >= all_of_them
    caller.send_signal(by)
    caller.wait()
    assert all_gone(marker)


# Above a rank are its agent, the parent of several agents, and the supervisor. Below the
# supervisor are, for each node, an agent and two ranks, and that parent.
@pytest.mark.parametrize(("nodes", "above", "below"), [(1, 2, 3), (2, 3, 7)])
def test_if_the_supervisor_itself_is_killed_no_agent_and_no_rank_stays(
    script, tmp_path, nodes, above, below
):
    found = tmp_path / "found"
    name = script(
        "import json, os, pathlib, psutil, time\n"
        "if os.environ['RANK'] == '0':\n"
        f"    supervisor = psutil.Process().parents()[{above - 1}]\n"
        "    pids = []\n"
        f"    while len(pids) < {below}:  # the other ranks are still being started\n"
        "        pids = [one.pid for one in supervisor.children(recursive=True)]\n"
        f"    pathlib.Path({str(found)!r}).write_text(json.dumps(pids))\n"
        "    time.sleep(1)  # meanwhile they ask the kernel to end with their parents\n"
        "    supervisor.kill()\n"
        "time.sleep(300)"
    )
    with pytest.raises(ScriptError, match="137"):
        run_script(name, ranks=2, nodes=nodes, timeout=60)
    pids = json.loads(found.read_text())
    deadline = time.monotonic() + 10
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_rank_gets_the_environment_and_the_folder_of_the_call(script, monkeypatch):
    text = "import os; print(os.environ['LATE'], os.path.isdir('labs'), 'GONE' in os.environ)"
    name = script(text)
    monkeypatch.setenv("GONE", "yes")
    monkeypatch.setenv("LATE", "first")
    run_script(name, ranks=1)  # the fork server has started, with these variables
    monkeypatch.delenv("GONE")
    monkeypatch.setenv("LATE", "second")
    assert run_script(name, ranks=1) == "second True False"


def test_the_callers_process_need_not_load_torch():
    check = "import sys, labkit.launch.scripts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
