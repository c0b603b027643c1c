"""Several torchrun agents on one machine: where they meet, and what ends them."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import pytest
from processes import all_gone, processes_with

from labkit.launch import nodes
from labkit.launch.scripts import ScriptError, run_script

RANK_THAT_WAITS = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1], os.environ["RANK"]).touch()
time.sleep(600)
"""
SECOND_AGENT_DOES_NOT_START = """
import subprocess, sys
from labkit.launch import nodes

really, started = subprocess.Popen, []

def popen(*args, **options):
    if started:
        raise OSError("no second one")
    started.append(really(*args, **options))
    return started[0]

subprocess.Popen = popen
sys.argv[1:] = ["--nodes", "2", "--nproc-per-node", "1", "waits_for_the_other_node.py"]
nodes.main()
"""


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """An environment by whose marker `processes_with` finds them; who is left is killed."""
    marker = f"marker-{uuid.uuid4().hex}"
    yield {**os.environ, "TEST_MARKER": marker}
    for process in processes_with(marker):
        process.kill()


def test_a_reserved_port_can_be_listened_at_and_is_given_to_nobody_else():
    with nodes.reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            with socket.create_connection(("127.0.0.1", port)):
                server.accept()[0].close()


def ending_with(code: int, after: float = 0) -> subprocess.Popen[bytes]:
    program = f"import sys, time; time.sleep({after}); sys.exit({code})"
    return nodes.start([sys.executable, "-c", program])


def test_the_exit_code_is_the_failing_agents_and_the_others_are_ended(monkeypatch):
    monkeypatch.setattr(nodes, "GRACE", 0.2)
    agents = [ending_with(0, after=600), ending_with(7), ending_with(0)]
    assert nodes.first_failure(agents) == 7
    assert all(agent.poll() is not None for agent in agents)


def test_an_agent_that_fails_last_is_a_failure_too_and_none_is_none():
    assert nodes.first_failure([ending_with(0), ending_with(3, after=0.3)]) == 3
    assert nodes.first_failure([ending_with(0, after=0.3), ending_with(0)]) == 0


def test_a_script_that_fails_on_two_nodes_fails_as_a_whole():
    with pytest.raises(ScriptError, match="not a number"):
        run_script(
            "labs/accumulate_vs_ddp.py", "--seed", "not a number", ranks=1, nodes=2, timeout=120
        )


def test_the_exit_code_of_forked_agents_is_torchruns(script):
    with pytest.raises(ScriptError) as caught:
        run_script(script("raise SystemExit(3)\n"), ranks=1, nodes=2)
    assert caught.value.exit_code == 1  # torchrun's own, whatever a rank's
    assert "exitcode  : 3" in caught.value.said
    assert run_script(script("print('well')\n"), ranks=1, nodes=2).count("well") == 2


def test_the_exit_code_of_fresh_agents_is_torchruns_too(script):
    with pytest.raises(ScriptError) as caught:
        run_script(script("raise SystemExit(3)\n"), ranks=1, nodes=2, fresh=True)
    assert caught.value.exit_code == 1
    assert "exitcode  : 3" in caught.value.said
    # torchrun starts ranks with -u: a line and its end are two writes, between which others fit.
    said = run_script(script("print('well')\n"), ranks=1, nodes=2, fresh=True)
    assert said.count("well") == 2


def test_help_on_two_nodes_is_printed_once():
    output = run_script("labs/accumulate_vs_ddp.py", "--help", ranks=1, nodes=2, timeout=120)
    assert output.count("usage:") == 1


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_however_it_is_ended_its_agents_and_their_ranks_end_too(how, environment, tmp_path):
    script = tmp_path / "rank_that_waits.py"
    script.write_text(RANK_THAT_WAITS)
    (seen := tmp_path / "seen").mkdir()
    two_nodes = ["-m", "labkit.launch.nodes", "--nodes", "2", "--nproc-per-node", "1"]
    command = [*two_nodes, script, seen]
    started = subprocess.Popen(
        [sys.executable, *command], env=environment, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while len(list(seen.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert {path.name for path in seen.iterdir()} == {"0", "1"}
    # Itself, two agents and their guards, two ranks: the marker finds what is to be gone.
    assert len(processes_with(environment["TEST_MARKER"])) >= 7
    started.send_signal(how)
    started.wait(timeout=30)
    assert all_gone(environment["TEST_MARKER"])


def test_if_the_second_agent_cannot_be_started_the_first_one_does_not_stay(environment):
    command = [sys.executable, "-c", SECOND_AGENT_DOES_NOT_START]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert "no second one" in done.stderr
    assert all_gone(environment["TEST_MARKER"])
