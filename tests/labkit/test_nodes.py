"""Several torchrun agents on one machine: where they meet, and what ends them."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from labkit import nodes
from labkit.scripts import ScriptError, run_script


def test_a_reserved_port_can_be_listened_at_and_is_given_to_nobody_else():
    with nodes.reserved_port() as port:
        others = [socket.create_server(("127.0.0.1", 0)) for _ in range(200)]
        assert port not in {other.getsockname()[1] for other in others}
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            with socket.create_connection(("127.0.0.1", port)):
                server.accept()[0].close()
        for other in others:
            other.close()


def ending_with(code: int, after: float = 0) -> subprocess.Popen[bytes]:
    program = f"import sys, time; time.sleep({after}); sys.exit({code})"
    return subprocess.Popen([sys.executable, "-c", program])


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
            "labs/02_accumulate_vs_ddp.py", "--seed", "not a number", ranks=1, nodes=2, timeout=120
        )


def test_help_on_two_nodes_is_printed_once():
    output = run_script("labs/02_accumulate_vs_ddp.py", "--help", ranks=1, nodes=2, timeout=120)
    assert output.count("usage:") == 1
